# SPDX-License-Identifier: Apache-2.0
"""The audit of dumped samples, and the files that show where their streams came from.

Equal bits cannot tell two engines that agree from one stream that was copied. Two kinds of file can:

- What the engine's side recorded before the trainer got the data, such as both hosts' ``--save-debug-rollout-data``.
- A control: a run of the same code in which the engines must differ, such as one with a forgotten weight sync. A
  pipeline that fills one stream in from the other is equal there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mis_ext.onpolicy.audit.audit_report import AuditReport, Evidence, Problem, Provenance
from mis_ext.onpolicy.audit.examination import Part, Sample, examine_rows, join
from mis_ext.onpolicy.audit.log_probs import Version, filled_in, make_report
from mis_ext.tools.dumps import DumpedSample, Dumps


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
