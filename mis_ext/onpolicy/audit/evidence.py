"""Files that show where the streams of an audit came from.

Equal bits cannot tell two engines that agree from one stream that was copied. Two kinds of file can:

- What the engine's side recorded before the trainer got the data, such as both hosts' ``--save-debug-rollout-data``.
- A control: a run of the same code in which the engines must differ, such as one with a forgotten weight sync. A
  pipeline that fills one stream in from the other is equal there too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mis_ext.dumps import DumpedSample
from mis_ext.onpolicy.audit.report import AuditReport, Problem, Verdict
from mis_ext.onpolicy.bits import same_bits


class EngineRecords:
    """What the engine's side recorded, by rollout and number of the sample, and by ids where there is no number.

    Raises:
        ValueError: A record has trainer log-probs: then it was written after the trainer got the data.
    """

    def __init__(self, records: Iterable[DumpedSample]) -> None:
        self._records: dict[Any, DumpedSample] = {}
        self.num_found = 0
        self.num_missing = 0
        for record in records:
            if record.proximal_log_probs is not None:
                raise ValueError(
                    f"{record.name}: is no record of the engine, because it has trainer log-probs; give what was "
                    "written before training, such as the file of --save-debug-rollout-data"
                )
            for key in _keys(record):
                self._records[key] = record

    def find(self, sample: DumpedSample) -> DumpedSample | None:
        """The record of a sample."""
        record = next((self._records[key] for key in _keys(sample) if key in self._records), None)
        self.num_found += record is not None
        self.num_missing += record is None
        return record

    @property
    def shown(self) -> str | None:
        """What they show, if no sample lacked its record and none differed from it."""
        if self.num_missing or not self.num_found:
            return None
        return (
            f"the log-probs of all {self.num_found} samples are those that the engine's side recorded before training"
        )


def difference(sample: DumpedSample, record: DumpedSample) -> str | None:
    """How the rollout log-probs or the ids of a sample are not those of its record."""
    given, recorded = sample.behavior_log_probs, record.behavior_log_probs
    if given is None:
        return None
    if recorded is None:
        return f"the engine's record has no log-probs ({record.name})"
    if _ids(sample) is not None and _ids(record) is not None and _ids(sample) != _ids(record):
        return f"the token ids are not those of the engine's record ({record.name})"
    if given.shape != recorded.shape:
        return f"{len(given)} rollout log-probs, but {len(recorded)} in the engine's record ({record.name})"
    # A host may round what the engine returned to the trainer's dtype.
    differs = ~same_bits(given.detach().cpu(), recorded.to(given.dtype))
    if sample.response_mask is not None:
        differs &= torch.as_tensor(sample.response_mask).cpu() != 0
    if not differs.any():
        return None
    position = int(differs.nonzero()[0])
    return (
        f"the rollout log-prob at position {position} is {given[position].item()!r}, in the engine's record "
        f"{recorded[position].item()!r} ({record.name}): it was changed or filled in on the way"
    )


def judge_control(control: AuditReport) -> str | Problem:
    """What a control shows about the trainer's stream, or why it shows nothing."""
    if control.verdict is Verdict.DIFFERENT:
        return f"in the control {control.num_nonzero} of {control.num_active_tokens} tokens differ"
    if control.verdict is Verdict.INVALID:
        return Problem(f"the control could not be compared: {control.problems[0]}")
    return Problem(
        "the control is equal too: either the engines agree in it, and it is no control, or one stream is filled in "
        "from the other"
    )


def _keys(sample: DumpedSample) -> list[Any]:
    keys: list[Any] = []
    if sample.rollout_id is not None and sample.sample_index is not None:
        keys.append((sample.rollout_id, sample.sample_index))
    ids = _ids(sample)
    return [*keys, ids] if ids is not None and not keys else keys


def _ids(sample: DumpedSample) -> tuple[int, ...] | None:
    ids = sample.token_ids
    return None if ids is None else tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
