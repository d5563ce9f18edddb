"""What a reader of a verdict must know besides."""

from __future__ import annotations

from collections.abc import Sequence

from mis_ext.diagnosis.limits import MAX_CHANCE, MIN_CONSTANT_TOKENS
from mis_ext.diagnosis.measuring import Measuring
from mis_ext.onpolicy.audit.findings import Evidence, Provenance
from mis_ext.onpolicy.audit.sample import Facts


def cautions(samples: Sequence[Facts], provenance: Provenance, evidence: Evidence) -> list[str]:
    """What a reader of the verdict must know besides."""
    found: list[str] = []
    if not samples:
        return found
    if provenance == "prefill":
        found.append(
            "the rollout log-probs come from scoring the finished text again: the log-probs of the sampled decode, "
            "which the policy loss uses, were not compared"
        )
    if any(sample.num_nonzero for sample in samples):
        return found + filled_in(samples)
    found += _unshown(provenance, evidence)
    measured = Measuring.joined(sample.shown for sample in samples).measured()
    if measured.signals is not None and all(of == rounded for of, rounded, _ in measured.signals.rounded.tolist()):
        found.append("both sides hold bfloat16 numbers only: differences below their resolution do not show")
    if any(sample.is_stale for sample in samples):
        found.append("the weight versions differ, the log-probs do not: no weight changed, or a version is wrong")
    lowest, count = measured.tokens.lowest, measured.tokens.num_valid
    if count >= MIN_CONSTANT_TOKENS and lowest == -measured.tokens.negated_highest:
        found.append(f"all {count:.0f} log-probs of both sides are {lowest:g}, as where an engine returned none")
    return found


def _unshown(provenance: Provenance, evidence: Evidence) -> list[str]:
    """What equal streams do not show by themselves: a copy is equal too."""
    found = []
    if evidence.rollout is None:
        who = "nothing says" if provenance == "unknown" else "it is stated, not shown,"
        found.append(
            f"{who} that the rollout log-probs come from the engine, and were not filled in from the trainer "
            "(it is shown by what the engine's side recorded before training: --engine-records)"
        )
    if evidence.train is None:
        found.append(
            "nothing shows that the trainer computed its log-probs, and did not take the engine's (it is shown by a "
            "run of the same code in which the engines must differ, and do: --control)"
        )
    return found


def filled_in(samples: Sequence[Facts]) -> list[str]:
    """That samples are equal among others that differ, where neither chance nor the weight versions explain it."""
    later = [_later_tokens(sample) for sample in samples]
    equal = [count for sample, (count, _) in zip(samples, later, strict=True) if not sample.num_nonzero and count]
    is_stale = {sample.is_stale for sample in samples if sample.num_nonzero}
    are_stale = any(sample.is_stale for sample in samples if not sample.num_nonzero)
    if not equal or not is_stale or (is_stale == {True} and not are_stale):
        return []
    share = sum(different for _, different in later) / (sum(count for count, _ in later) - sum(equal) + 1)
    if min((1.0 - share) ** count for count in equal) * len(samples) > MAX_CHANCE:
        return []
    return [
        f"{len(equal)} of {len(samples)} samples are equal on every token, while in the others {share:.0%} of the "
        "tokens differ: where a side had none, its log-probs may have been filled in from the other"
    ]


def _later_tokens(sample: Facts) -> tuple[float, float]:
    """Tokens behind the first that are not nearly certain, and those of them that differ."""
    signals = sample.shown.measured().signals
    _, _, later, different = [0.0] * 4 if signals is None else signals.firsts.tolist()
    return later, different
