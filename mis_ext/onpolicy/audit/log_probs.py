# SPDX-License-Identifier: Apache-2.0
"""Exactness audit: are the trainer's log-probs the bits that the inference engine sampled with?

Equal bits cannot tell two engines that agree from one stream that was copied. What the engine returned, recorded before
the trainer got the data, can: such as both frameworks' ``--save-debug-rollout-data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mis_ext.onpolicy.audit.audit_report import AuditReport, Problem, Verdict
from mis_ext.onpolicy.audit.examination import Found, examine_rows, ids_of
from mis_ext.tools.diagnosis.cause import Diagnosis
from mis_ext.tools.diagnosis.evidence import Gathering
from mis_ext.tools.diagnosis.table import diagnose
from mis_ext.tools.dumps.formats import DumpedSample
from mis_ext.validation import errors_of

if TYPE_CHECKING:
    from mis_ext.tools.dumps import Dumps

Version = str | int


def audit_logprobs(
    train_log_probs: Sequence[Tensor | None],
    rollout_log_probs: Sequence[Tensor | None],
    *,
    masks: Sequence[Tensor | None] | None = None,
    train_token_ids: Sequence[Tensor | None] | None = None,
    rollout_token_ids: Sequence[Tensor | None] | None = None,
    engine_records: Sequence[Tensor | None] | None = None,
    train_weight_version: Version | Sequence[Version | None] | None = None,
    rollout_weight_versions: Sequence[Version | Sequence[Version] | None] | None = None,
) -> AuditReport:
    """Verdict and numbers of a bitwise comparison of two streams of log-probs; what cannot be compared never passes.

    INVALID are: a sample that is missing, lengths or token ids that differ (masked tokens included, being the context
    of others), NaN or infinity on an active token (the same NaN on both sides too, as in
    :func:`mis_ext.onpolicy.compare`), a dtype that is not floating point, both sides being the same memory, and no
    active token at all. What lies under the mask is otherwise ignored.

    Two dtypes are compared in the narrowest that holds the numbers of both exactly (float32 for float32 against
    bfloat16): the verdict is about the numbers that were given, and ULPs are those of that dtype. Rounding the wider
    side first would hide differences.

    Args:
        train_log_probs: Of each sample the trainer's log-probs, ``[T]``, in nats; None means that they are missing.
        rollout_log_probs: Of each sample the inference engine's, ``[T]``.
        masks: Of each sample ``[T]``, nonzero where a token is active; None where all are.
        train_token_ids: Of each sample the ids ``[T]`` that the trainer scored; None where unknown.
        rollout_token_ids: Of each sample the ids ``[T]`` that the engine sampled.
        engine_records: Of each sample what the engine returned, ``[T]``, recorded before the trainer got the data. A
            sample whose rollout log-probs are others is INVALID. A copy has the same bits as two engines that agree, so
            equal streams of which a sample has no record are UNPROVED.
        train_weight_version: Version of the weights that the trainer scored with, one for all samples or one each.
        rollout_weight_versions: Of each sample the version, or all versions, that its tokens were sampled with.

    Raises:
        TypeError: An argument is no list.
    """
    versions = train_weight_version
    columns = {
        "train_log_probs": train_log_probs,
        "rollout_log_probs": rollout_log_probs,
        "masks": masks,
        "train_token_ids": train_token_ids,
        "rollout_token_ids": rollout_token_ids,
        "train_weight_version": versions if isinstance(versions, (list, tuple)) else None,
        "rollout_weight_versions": rollout_weight_versions,
        "engine_records": engine_records,
    }
    lists = dict[str, list[Any]]()
    for key, column in columns.items():
        with errors_of(key):
            lists |= {} if column is None else {key: list(column)}
    num_samples = max(map(len, lists.values()), default=0)
    if any(len(column) < num_samples for column in lists.values()):
        listed = ", ".join(f"{len(column)} of {key}" for key, column in lists.items())
        return _report(Found(num_samples, [Problem(f"lists of different lengths: {listed}")], []))
    one = {"train_weight_version": versions}
    return _report(examine_rows(_samples({key: lists.get(key, [one.get(key)] * num_samples) for key in columns})))


_FIELDS = (
    *("proximal_log_probs", "behavior_log_probs", "response_mask", "response_ids", "sampled_ids"),
    *("proximal_weight_version", "behavior_weight_versions"),
)
"""Of a sample from a file, in the order of the arguments."""


def _samples(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[DumpedSample, DumpedSample | None]]:
    for *given, record in zip(*columns.values(), strict=True):
        sample = DumpedSample(**dict(zip(_FIELDS, given, strict=True)))
        yield sample, None if record is None else DumpedSample(proximal_log_probs=None, behavior_log_probs=record)


def audit_dumps(dumps: Dumps, *, engine_records: Dumps | None = None) -> AuditReport:
    """The audit of samples from files, which are in memory one file after the other.

    Args:
        dumps: What is audited.
        engine_records: What the engine's side recorded before training, as in :func:`audit_logprobs`. A sample is found
            by rollout and number, or by its ids where there is no number.

    Raises:
        OSError: A file cannot be opened.
        ValueError: The content of a file is not known, or a record of the engine is none.
    """
    records = _by_sample(() if engine_records is None else engine_records)
    return _report(examine_rows(_rows(dumps, records)), skipped=dumps.skipped)


def _by_sample(records: Iterable[DumpedSample]) -> dict[Any, list[DumpedSample]]:
    by_sample: dict[Any, list[DumpedSample]] = {}
    for record in records:
        if record.proximal_log_probs is not None:
            raise ValueError(
                f"{record.name}: is no record of the engine, because it has trainer log-probs; give what was written "
                "before training, such as the file of --save-debug-rollout-data"
            )
        for key in filter(None, (_number(record), ids_of(record))):
            by_sample.setdefault(key, []).append(record)
    return by_sample


def _number(sample: DumpedSample) -> tuple[int, int] | None:
    if sample.rollout_id is None or sample.sample_index is None:
        return None
    return sample.rollout_id, sample.sample_index


def _rows(dumps: Dumps, records: dict[Any, list[DumpedSample]]) -> Iterator[tuple[DumpedSample, DumpedSample | None]]:
    for sample in dumps:
        found: Sequence[DumpedSample | None] = records.get(_number(sample)) or records.get(ids_of(sample)) or [None]
        # Of several with its ids one with its log-probs, if there is one.
        given, recorded = sample.behavior_log_probs, [None if x is None else x.behavior_log_probs for x in found]
        same = [x is not None and given is not None and torch.equal(given, x.to(given.dtype)) for x in recorded]
        yield sample, found[same.index(True) if any(same) else 0]


def _report(found: Found, *, skipped: Sequence[object] = ()) -> AuditReport:
    facts = found.facts
    num_active, num_nonzero = sum(each.num_active for each in facts), sum(each.num_nonzero for each in facts)
    num_recorded = sum(each.is_recorded for each in facts)
    if found.problems:
        verdict = Verdict.INVALID
    elif num_nonzero:
        verdict = Verdict.DIFFERENT
    else:
        verdict = Verdict.EXACT if num_recorded == len(facts) else Verdict.UNPROVED
    return AuditReport(
        verdict=verdict,
        num_samples=found.num_samples,
        num_recorded=num_recorded,
        num_active_tokens=num_active,
        num_nonzero=num_nonzero,
        mean_abs_diff=sum(each.sum_abs_diff for each in facts) / num_active if num_active else None,
        max_abs_diff=max((each.max_abs_diff for each in facts), default=None),
        max_ulp=max((each.max_ulp for each in facts), default=None),
        first_divergence=next((each.first_divergence for each in facts if each.first_divergence is not None), None),
        train_dtype=", ".join(sorted({each.train_dtype for each in facts})) or None,
        rollout_dtype=", ".join(sorted({each.rollout_dtype for each in facts})) or None,
        problems=tuple(found.problems),
        diagnoses=tuple(_diagnoses(found, verdict)),
        skipped=tuple(str(one) for one in skipped),
    )


def _diagnoses(found: Found, verdict: Verdict) -> list[Diagnosis]:
    """Causes of a difference; of streams that are equal, or cannot be compared, only mistakes in them."""
    gathering = Gathering()
    for fact in found.facts:
        gathering.add(fact.shown)
    return [each for each in diagnose(gathering.evidence) if each.is_fault or verdict is Verdict.DIFFERENT]
