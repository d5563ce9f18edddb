# SPDX-License-Identifier: Apache-2.0
"""Exactness audit: are the trainer's log-probs bitwise equal to those of the inference engine at sampling?

Equal bits do not distinguish two engines that agree from a copy. A record of the engine's output from before the
trainer received the data does, such as ``--save-debug-rollout-data`` of both frameworks.
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
    """Compare two lists of log-probs bitwise. Log-probs that cannot be compared never pass.

    The verdict is INVALID for: a missing sample, different lengths or token ids (also of masked tokens, which are the
    context of other tokens), NaN or infinity on an active token (also the same NaN on both sides, as in
    :func:`mis_ext.onpolicy.compare`), a dtype that is not floating point, both sides in the same memory, or no active
    token. Other values at masked positions are ignored.

    Two dtypes are compared in the narrowest dtype that represents both exactly (float32 for float32 and bfloat16), so
    the verdict is about the given values, and ULPs are in this dtype. Rounding the wider side first would hide
    differences.

    Args:
        train_log_probs: Per sample the trainer's log-probs, ``[T]``, in nats; None if they are missing.
        rollout_log_probs: Per sample the inference engine's log-probs, ``[T]``.
        masks: Per sample ``[T]``, nonzero for active tokens; None if all are active.
        train_token_ids: Per sample the ids ``[T]`` that the trainer scored; None if unknown.
        rollout_token_ids: Per sample the ids ``[T]`` that the engine sampled.
        engine_records: Per sample the engine's log-probs, ``[T]``, recorded before the trainer received the data. A
            sample with different rollout log-probs is INVALID. A copy has the same bits as two engines that agree. So
            equal log-probs are UNPROVED if a sample has no record.
        train_weight_version: Version of the weights that the trainer scored with, one for all samples or one per
            sample.
        rollout_weight_versions: Per sample the version, or all versions, of the weights that sampled its tokens.

    Raises:
        TypeError: An argument is not a list.
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
"""Fields of a sample from a file, in the order of the arguments."""


def _samples(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[DumpedSample, DumpedSample | None]]:
    for *given, record in zip(*columns.values(), strict=True):
        sample = DumpedSample(**dict(zip(_FIELDS, given, strict=True)))
        yield sample, None if record is None else DumpedSample(proximal_log_probs=None, behavior_log_probs=record)


def audit_dumps(dumps: Dumps, *, engine_records: Dumps | None = None) -> AuditReport:
    """Audit samples from files; one file is in memory at a time.

    Args:
        dumps: The dumps to audit.
        engine_records: Records of the engine from before training, as in :func:`audit_logprobs`. A sample is found by
            rollout and number, or by its ids if it has no number.

    Raises:
        OSError: A file cannot be opened.
        ValueError: The format of a file is unknown, or an engine record is not valid.
    """
    records = _by_sample(() if engine_records is None else engine_records)
    return _report(examine_rows(_rows(dumps, records)), skipped=dumps.skipped)


def _by_sample(records: Iterable[DumpedSample]) -> dict[Any, list[DumpedSample]]:
    by_sample: dict[Any, list[DumpedSample]] = {}
    for record in records:
        if record.proximal_log_probs is not None:
            raise ValueError(
                f"{record.name}: is not a record of the engine, because it has trainer log-probs; pass a file from "
                "before training, such as that of --save-debug-rollout-data"
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
        # Of several records with its ids, prefer one with its log-probs.
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
    """Causes of a difference. For log-probs that are equal or cannot be compared, only mistakes."""
    gathering = Gathering()
    for fact in found.facts:
        gathering.add(fact.shown)
    return [each for each in diagnose(gathering.evidence) if each.is_fault or verdict is Verdict.DIFFERENT]
