"""What a reader of a verdict must know besides."""

from __future__ import annotations

from collections.abc import Sequence

from mis_ext.onpolicy.audit.findings import Evidence, Provenance
from mis_ext.onpolicy.audit.hints import MAX_CHANCE, constant_stream
from mis_ext.onpolicy.audit.sample import Facts


def cautions(samples: Sequence[Facts], provenance: Provenance, evidence: Evidence) -> list[str]:
    """What a reader of the verdict must know besides."""
    found: list[str] = []
    if not samples:
        return found
    num_positive = sum(sample.num_positive for sample in samples)
    if num_positive:
        largest = max(sample.max_log_prob for sample in samples)
        found.append(
            f"{num_positive} tokens have a log-prob above 0, {largest:.3g} the largest: these are no log-probs"
        )
    if provenance == "prefill":
        found.append(
            "the rollout log-probs come from scoring the finished text again: the log-probs of the sampled decode, "
            "which the policy loss uses, were not compared"
        )
    if any(sample.num_nonzero for sample in samples):
        return found + filled_in(samples)
    found += _unshown(provenance, evidence)
    if all(sample.train_is_bf16 and sample.rollout_is_bf16 for sample in samples):
        found.append("both sides hold bfloat16 numbers only: differences below their resolution do not show")
    if any(sample.is_stale for sample in samples):
        found.append("the weight versions differ, the log-probs do not: no weight changed, or a version is wrong")
    constant = constant_stream(samples)
    if constant is not None:
        found.append(constant)
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
    num_uncertain = sum(sample.num_uncertain for sample in samples)
    equal = [sample for sample in samples if not sample.num_nonzero and sample.num_uncertain]
    num_equal = sum(sample.num_uncertain for sample in equal)
    num_nonzero = sum(sample.num_uncertain_nonzero for sample in samples)
    is_stale = {sample.is_stale for sample in samples if sample.num_nonzero}
    if not equal or not is_stale or (is_stale == {True} and not any(sample.is_stale for sample in equal)):
        return []
    share = num_nonzero / (num_uncertain - num_equal + 1)
    if min((1.0 - share) ** sample.num_uncertain for sample in equal) * len(samples) > MAX_CHANCE:
        return []
    return [
        f"{len(equal)} of {len(samples)} samples are equal on every token, while in the others {share:.0%} of the "
        "tokens differ: where a side had none, its log-probs may have been filled in from the other"
    ]
