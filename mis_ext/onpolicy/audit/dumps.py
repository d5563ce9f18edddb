"""The audit of dumped samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mis_ext.dumps import DumpedSample, Dumps
from mis_ext.onpolicy.audit.audit_report import AuditReport
from mis_ext.onpolicy.audit.checks import Sample
from mis_ext.onpolicy.audit.evidence import EngineRecords, judge_control, problem_of_record
from mis_ext.onpolicy.audit.findings import Evidence, Problem, Provenance
from mis_ext.onpolicy.audit.log_probs import Version, report_of
from mis_ext.onpolicy.audit.parts import Part, examine_rows, join


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
        provenance: What is stated about the rollout log-probs, as in
            :func:`mis_ext.onpolicy.audit.log_probs.audit_logprobs`.
        engine_records: What the engine's side recorded before training. A sample whose rollout log-probs are not those
            of its record is INVALID.
        control: A run of the same code in which the engines must differ. If they do not, the audit is INVALID.
        train_weight_version: Stands for samples whose file names none.

    Raises:
        OSError: A file cannot be opened.
        ValueError: The content of a file is not known, or a record of the engine is none.
    """
    records = None if engine_records is None else EngineRecords(engine_records)
    part = _examine(dumps, records, train_weight_version)
    judged = None if control is None else judge_control(join([_examine(control, None, None)]))
    if isinstance(judged, Problem):
        part.problems.append(judged)
    evidence = Evidence(None if records is None else records.shown, judged if isinstance(judged, str) else None)
    return report_of([part._replace(provenance=provenance, evidence=evidence)], skipped=dumps.skipped)


def _examine(dumps: Dumps, records: EngineRecords | None, version: Version | None) -> Part:
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
    dumps: Dumps, records: EngineRecords | None, version: Version | None, dtype: torch.dtype | None
) -> Iterator[Sample]:
    for sample in dumps:
        row = _row(sample, version, dtype)
        record = None if records is None else records.find(sample)
        yield row if record is None else _with_record(row, sample, record)


def _row(sample: DumpedSample, version: Version | None, dtype: torch.dtype | None) -> Sample:
    train, rollout = sample.proximal_log_probs, sample.behavior_log_probs
    train = train if train is None else train.to(dtype or train.dtype)
    # Two conversions of one tensor would be two.
    rollout = train if sample.is_one_memory else rollout if rollout is None else rollout.to(dtype or rollout.dtype)
    return Sample(
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


def _with_record(row: Sample, sample: DumpedSample, record: DumpedSample) -> Sample:
    return row._replace(
        rollout_versions=row.rollout_versions or record.behavior_weight_versions,
        problem=row.problem or problem_of_record(sample, record),
        recorded=record.behavior_log_probs,
        recorded_in=record.name,
    )
