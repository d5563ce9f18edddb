# SPDX-License-Identifier: Apache-2.0
"""Exactness audit: are the trainer's log-probs the bits that the inference engine sampled with?

Equal bits cannot tell two engines that agree from one stream that was copied. Two kinds of file can, for samples that
come from files:

- What the engine's side recorded before the trainer got the data, such as both hosts' ``--save-debug-rollout-data``.
- A control: a run of the same code in which the engines must differ, such as one with a forgotten weight sync. A
  pipeline that fills one stream in from the other is equal there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mis_ext.checks.token_sums import MAX_CHANCE, MIN_CONSTANT_TOKENS
from mis_ext.correction.collectives import gather_objects
from mis_ext.onpolicy.audit.audit_report import (
    PROVENANCES,
    AuditReport,
    DecileRow,
    Evidence,
    Problem,
    Provenance,
    Verdict,
)
from mis_ext.onpolicy.audit.examination import NUM_DECILES, Facts, Part, Sample, examine_rows, join
from mis_ext.tools.diagnosis.cause import Diagnosis
from mis_ext.tools.diagnosis.measuring import Measuring
from mis_ext.tools.diagnosis.table import diagnose
from mis_ext.validation import check_choice

if TYPE_CHECKING:
    from mis_ext.tools.dumps import DumpedSample, Dumps

Version = str | int


def audit_logprobs(
    train_log_probs: Sequence[Tensor | None] | None,
    rollout_log_probs: Sequence[Tensor | None] | None,
    *,
    masks: Sequence[Tensor | None] | None = None,
    train_token_ids: Sequence[Tensor | None] | None = None,
    rollout_token_ids: Sequence[Tensor | None] | None = None,
    provenance: Provenance = "unknown",
    evidence: Evidence = Evidence(),  # noqa: B008
    train_weight_version: Version | Sequence[Version | None] | None = None,
    rollout_weight_versions: Sequence[Version | Sequence[Version] | None] | None = None,
    names: Sequence[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> AuditReport:
    """Verdict and numbers of a bitwise comparison of two streams of log-probs; what cannot be compared never passes.

    INVALID are: a list or a sample that is missing, lengths or token ids that differ (masked tokens included, being
    the context of others), token ids that are no whole numbers, NaN or infinity on an active token (the same NaN on
    both sides too, as in :func:`mis_ext.onpolicy.compare`), a dtype that is not floating point or not the same for all
    samples of a side, both sides being the same memory, and no active token at all. What lies under the mask is
    otherwise ignored.

    Two dtypes are compared in the narrowest that holds the numbers of both exactly (float32 for float32 against
    bfloat16): the verdict is about the numbers that were given, and ULPs are those of that dtype. Rounding the wider
    side first would hide differences; ``equal_after_bf16_rounding`` says when it would hide all of them.

    Args:
        train_log_probs: Of each sample the trainer's log-probs, ``[T]``, in nats. None, as the list or as a sample,
            means that they are missing.
        rollout_log_probs: Of each sample the inference engine's, ``[T]``.
        masks: Of each sample ``[T]``, nonzero where a token is active; None where all are.
        train_token_ids: Of each sample the ids ``[T]`` that the trainer scored; None where unknown.
        rollout_token_ids: Of each sample the ids ``[T]`` that the engine sampled.
        provenance: Whether the rollout log-probs were recorded while sampling (``"decode"``) or by scoring the
            finished text again (``"prefill"``): what the caller states. A copy has the same bits as two engines that
            agree, so without a statement and without evidence equal streams are UNPROVED.
        evidence: What shows where each stream came from. What is stated only, or not at all, is among the cautions.
        train_weight_version: Version of the weights that the trainer scored with, one for all samples or one each.
        rollout_weight_versions: Of each sample the version, or all versions, that its tokens were sampled with.
        names: What to call each sample in the report, besides its number.
        group: Process group over whose ranks the samples are spread; each rank passes its own, or two empty lists.
            Samples are numbered in rank order. Every rank gets the same report, whatever the number of ranks. None:
            the report is about the samples given here, on a rank of many too.

    Raises:
        ValueError: An unknown provenance, on any rank.
    """
    train_versions: Any = train_weight_version
    if not isinstance(train_versions, (list, tuple)):
        is_list = isinstance(train_log_probs, (Sequence, Tensor))
        train_versions = [train_versions] * (len(train_log_probs) if is_list else 0)  # type: ignore[arg-type]
    part = _examine_columns(
        provenance,
        evidence,
        {
            "train_log_probs": train_log_probs,
            "rollout_log_probs": rollout_log_probs,
            "masks": masks,
            "train_token_ids": train_token_ids,
            "rollout_token_ids": rollout_token_ids,
            "train_weight_version": train_versions,
            "rollout_weight_versions": rollout_weight_versions,
            "names": names,
        },
    )
    # The only communication, and nothing above raises because of what was given: no rank is left waiting.
    return make_report(gather_objects(part, group))


def _examine_columns(provenance: Any, evidence: Any, columns: dict[str, Any]) -> Part:
    # Another rank must be able to unpickle what this one found.
    provenance = provenance if isinstance(provenance, str) else repr(provenance)
    problems, lists = [], {}
    for key, column in columns.items():
        try:
            if isinstance(column, (str, bytes, Mapping)):
                raise TypeError(f"it is a {type(column).__name__}")
            values = None if column is None else list(column)
            if key == "names" and values is not None:
                values = [None if name is None else str(name) for name in values]
            lists[key] = values
        except Exception as error:
            problems.append(Problem(f"{key} must be a list with an entry per sample: {type(error).__name__}: {error}"))
    if not isinstance(evidence, Evidence):
        problems.append(Problem(f"evidence must be an Evidence, got a {type(evidence).__name__}"))
        evidence = Evidence()
    lengths = {key: len(column) for key, column in lists.items() if column is not None}
    num_samples = max(lengths.values(), default=0)
    missing = [key for key in ("train", "rollout") if lists.get(f"{key}_log_probs", ()) is None]
    if missing:
        problems.append(Problem(f"the {' and '.join(missing)} log-probs are missing"))
    elif len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} of {key}" for key, length in lengths.items())
        problems.append(Problem(f"lists of different lengths: {listed}"))
    if problems:
        return Part(provenance, evidence, num_samples, problems, [])
    rows = zip(*([None] * num_samples if column is None else column for column in lists.values()), strict=True)
    return examine_rows((Sample(*row) for row in rows), provenance=provenance, evidence=evidence)


def make_report(parts: list[Part], *, skipped: Sequence[object] = ()) -> AuditReport:
    """The audit's report of what all ranks found, joined."""
    for rank, part in enumerate(parts):
        check_choice("provenance" if len(parts) == 1 else f"provenance on rank {rank}", part.provenance, PROVENANCES)
    whole = join(parts)
    facts = whole.facts
    num_active = sum(found.num_active for found in facts)
    num_nonzero = sum(found.num_nonzero for found in facts)
    num_signed_zero = sum(found.num_signed_zero for found in facts)
    # fsum rounds the exact sum once, so its order and its grouping by rank cannot matter.
    sum_abs_diff = math.fsum(decile.sum_abs_diff for found in facts for decile in found.deciles)
    mean_abs_diff = sum_abs_diff / num_active if num_active else None
    if whole.problems:
        verdict = Verdict.INVALID
    elif num_nonzero:
        verdict = Verdict.DIFFERENT
    elif whole.provenance == "unknown" and whole.evidence == Evidence():
        verdict = Verdict.UNPROVED
    else:
        verdict = Verdict.EXACT_UP_TO_SIGNED_ZERO if num_signed_zero else Verdict.EXACT
    different = verdict is Verdict.DIFFERENT
    divergences = [found.first_divergence for found in facts if found.first_divergence is not None]
    return AuditReport(
        verdict=verdict,
        num_samples=whole.num_samples,
        num_active_tokens=num_active,
        num_nonzero=num_nonzero,
        num_signed_zero=num_signed_zero,
        nonzero_fraction=num_nonzero / num_active if num_active else None,
        mean_abs_diff=mean_abs_diff,
        max_abs_diff=max((decile.max_abs_diff for found in facts for decile in found.deciles), default=None),
        max_ulp=max((found.max_ulp for found in facts), default=None),
        first_divergence=divergences[0] if divergences else None,
        deciles=tuple(_decile_row(facts, number) for number in range(NUM_DECILES)),
        equal_after_bf16_rounding=different and not any(found.num_nonzero_in_bf16 for found in facts),
        train_dtype=", ".join(sorted({found.train_dtype for found in facts})) or None,
        rollout_dtype=", ".join(sorted({found.rollout_dtype for found in facts})) or None,
        provenance=whole.provenance,
        train_weight_versions=_sorted_versions(found.train_versions for found in facts),
        rollout_weight_versions=_sorted_versions(found.rollout_versions for found in facts),
        problems=tuple(whole.problems),
        diagnoses=tuple(_diagnoses(whole, verdict)),
        cautions=tuple(_cautions(facts, whole.provenance, whole.evidence)),
        evidence=whole.evidence,
        skipped=tuple(str(one) for one in skipped),
    )


def _diagnoses(whole: Part, verdict: Verdict) -> list[Diagnosis]:
    """Causes of a difference; of streams that are equal, or cannot be compared, only mistakes in them."""
    others = [Measuring.of_other_ids() for problem in whole.problems if problem.has_other_ids]
    if verdict is Verdict.INVALID and not others:
        return []
    found = diagnose(Measuring.joined([*(fact.shown for fact in whole.facts), *others]).measured())
    if verdict is Verdict.INVALID:
        return [each for each in found if each.cause == "retokenised_samples"]
    return [each for each in found if each.is_fault or verdict is Verdict.DIFFERENT]


def _decile_row(facts: list[Facts], number: int) -> DecileRow:
    rows = [found.deciles[number] for found in facts]
    num_tokens = sum(row.num_tokens for row in rows)
    return DecileRow(
        low=number / NUM_DECILES,
        high=(number + 1) / NUM_DECILES,
        num_tokens=num_tokens,
        num_nonzero=sum(row.num_nonzero for row in rows),
        mean_abs_diff=math.fsum(row.sum_abs_diff for row in rows) / num_tokens if num_tokens else None,
        max_abs_diff=max(row.max_abs_diff for row in rows) if num_tokens else None,
    )


def _sorted_versions(versions: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    # Numbers in their own order: "9" before "10".
    return tuple(sorted({name for names in versions for name in names}, key=lambda name: (len(name), name)))


def _cautions(samples: Sequence[Facts], provenance: Provenance, evidence: Evidence) -> list[str]:
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
    found += _not_shown(provenance, evidence)
    measured = Measuring.joined(sample.shown for sample in samples).measured()
    if measured.signals is not None and all(of == rounded for of, rounded, _ in measured.signals.rounded.tolist()):
        found.append("both sides hold bfloat16 numbers only: differences below their resolution do not show")
    if any(sample.is_stale for sample in samples):
        found.append("the weight versions differ, the log-probs do not: no weight changed, or a version is wrong")
    number, count = measured.tokens.one_number("behavior"), measured.tokens.num_valid
    if count >= MIN_CONSTANT_TOKENS and number is not None:
        found.append(f"all {count:.0f} log-probs of both sides are {number:g}, as where an engine returned none")
    return found


def _not_shown(provenance: Provenance, evidence: Evidence) -> list[str]:
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


# --- of files


def audit_dumps(
    dumps: Dumps,
    *,
    provenance: Provenance = "unknown",
    engine_records: Dumps | None = None,
    control: Dumps | None = None,
    train_weight_version: Version | None = None,
) -> AuditReport:
    """The audit of samples from files, which are in memory one file after the other.

    Args:
        dumps: What is audited.
        provenance: What is stated about the rollout log-probs, as in :func:`audit_logprobs`.
        engine_records: What the engine's side recorded before training. A sample whose rollout log-probs are not those
            of its record is INVALID.
        control: A run of the same code in which the engines must differ. If they do not, the audit is INVALID.
        train_weight_version: Stands for samples whose file names none.

    Raises:
        OSError: A file cannot be opened.
        ValueError: The content of a file is not known, or a record of the engine is none.
    """
    records = None if engine_records is None else _EngineRecords(engine_records)
    part = _examine(dumps, records, train_weight_version)
    judged = None if control is None else _judge_control(join([_examine(control, None, None)]))
    if isinstance(judged, Problem):
        part.problems.append(judged)
    evidence = Evidence(None if records is None else records.shown, judged if isinstance(judged, str) else None)
    return make_report([part._replace(provenance=provenance, evidence=evidence)], skipped=dumps.skipped)


def _examine(dumps: Dumps, records: _EngineRecords | None, version: Version | None) -> Part:
    for dtype in (None, torch.float64):
        if records is not None:
            records.num_found = records.num_missing = 0
        rows = _rows(dumps, records, version, dtype)
        part = examine_rows(rows, provenance="unknown", evidence=Evidence())
        dtypes = ({found.train_dtype for found in part.facts}, {found.rollout_dtype for found in part.facts})
        if not any("float64" in of_side and len(of_side) > 1 for of_side in dtypes):
            break
        # Of two files of Python floats one may hold float32 numbers only: once more, in float64.
    return part


def _rows(
    dumps: Dumps, records: _EngineRecords | None, version: Version | None, dtype: torch.dtype | None
) -> Iterator[Sample]:
    for sample in dumps:
        train, rollout = sample.proximal_log_probs, sample.behavior_log_probs
        train = train if train is None else train.to(dtype or train.dtype)
        # Two conversions of one tensor would be two.
        rollout = train if sample.is_one_memory else rollout if rollout is None else rollout.to(dtype or rollout.dtype)
        row = Sample(
            train=train,
            rollout=rollout,
            mask=sample.response_mask,
            train_token_ids=sample.response_ids,
            rollout_token_ids=sample.sampled_ids,
            train_version=version if sample.proximal_weight_version is None else sample.proximal_weight_version,
            rollout_versions=sample.behavior_weight_versions,
            name=sample.name,
            problem=sample.problem,
        )
        record = None if records is None else records.find(sample)
        if record is not None:
            row = row._replace(
                rollout_versions=row.rollout_versions or record.behavior_weight_versions,
                problem=row.problem or _record_problem(sample, record),
                recorded=record.behavior_log_probs,
                recorded_in=record.name,
            )
        yield row


class _EngineRecords:
    """What the engine's side recorded, by rollout and number of the sample, and by ids where there is no number.

    Raises:
        ValueError: A record has trainer log-probs: then it was written after the trainer got the data.
    """

    def __init__(self, records: Iterable[DumpedSample]) -> None:
        self._records: dict[Any, list[DumpedSample]] = {}
        self.num_found = 0
        self.num_missing = 0
        for record in records:
            if record.proximal_log_probs is not None:
                raise ValueError(
                    f"{record.name}: is no record of the engine, because it has trainer log-probs; give what was "
                    "written before training, such as the file of --save-debug-rollout-data"
                )
            for key in filter(None, (_number(record), _ids(record))):
                self._records.setdefault(key, []).append(record)

    def find(self, sample: DumpedSample) -> DumpedSample | None:
        """The record of a sample; of several with its ids one with its log-probs, if there is one."""
        found = self._records.get(_number(sample)) or self._records.get(_ids(sample)) or []
        self.num_found += bool(found)
        self.num_missing += not found
        return next((record for record in found if _same_log_probs(sample, record)), found[0] if found else None)

    @property
    def shown(self) -> str | None:
        """What they show, if no sample lacked its record; one that differs from its record is INVALID."""
        if self.num_missing or not self.num_found:
            return None
        return (
            f"the log-probs of all {self.num_found} samples are those that the engine's side recorded before training"
        )


def _record_problem(sample: DumpedSample, record: DumpedSample) -> str | None:
    """Why the record of a sample says nothing about its log-probs."""
    if record.behavior_log_probs is None:
        return f"the engine's record has no log-probs ({record.name})"
    ids, recorded = _ids(sample), _ids(record)
    if ids is not None and recorded is not None and ids != recorded:
        return f"the token ids are not those of the engine's record ({record.name})"
    return None


def _judge_control(control: Part) -> str | Problem:
    """What a control shows about both streams, or why it shows nothing."""
    if control.problems:
        return Problem(f"the control could not be compared: {control.problems[0]}")
    num_nonzero = sum(found.num_nonzero for found in control.facts)
    if not num_nonzero:
        return Problem(
            "the control is equal too: either the engines agree in it, and it is no control, or one stream is filled "
            "in from the other"
        )
    for suspicion in filled_in(control.facts):
        return Problem(f"the control: {suspicion}")
    return f"in the control {num_nonzero} of {sum(found.num_active for found in control.facts)} tokens differ"


def _same_log_probs(sample: DumpedSample, record: DumpedSample) -> bool:
    given, recorded = sample.behavior_log_probs, record.behavior_log_probs
    return given is not None and recorded is not None and torch.equal(given, recorded.to(given.dtype))


def _number(sample: DumpedSample) -> tuple[int, int] | None:
    if sample.rollout_id is None or sample.sample_index is None:
        return None
    return sample.rollout_id, sample.sample_index


def _ids(sample: DumpedSample) -> tuple[str, ...] | None:
    """As text, because a file can hold anything."""
    ids = sample.token_ids
    return None if ids is None else tuple(map(str, ids.tolist() if isinstance(ids, Tensor) else ids))
