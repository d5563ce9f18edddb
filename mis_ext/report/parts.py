"""Samples of dumps into parts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import torch

from mis_ext.diagnosis.measuring import versions_behind
from mis_ext.dumps import DumpedSample
from mis_ext.dumps.joining import fingerprint
from mis_ext.report.part import Origin, Part

MAX_TOKENS = 1 << 18
"""Most tokens of a part, unless one sample has more: so many that what is computed of them stays in the caches."""


class Unusable(NamedTuple):
    """Samples that were read and could not be used."""

    num_samples: int
    reason: str
    first: str


class Parts:
    """The parts of a stream of samples; what could not be used is counted by its reason.

    Args:
        samples: From :class:`~mis_ext.dumps.Dumps`.
        max_tokens: Of a part.
    """

    def __init__(self, samples: Iterable[DumpedSample], *, max_tokens: int = MAX_TOKENS) -> None:
        self._samples = samples
        self._max_tokens = max_tokens
        self._unusable: dict[str, tuple[int, str]] = {}
        self._unnumbered: dict[str, None] = {}

    @property
    def unusable(self) -> list[Unusable]:
        """Samples that the last iteration left out: how many, why, and the first of them."""
        return [Unusable(count, reason, first) for reason, (count, first) in self._unusable.items()]

    @property
    def merged(self) -> list[str]:
        """That several files say no rollout, so that their samples are one step."""
        if len(self._unnumbered) < 2:
            return []
        first = next(iter(self._unnumbered))
        return [f"{len(self._unnumbered)} files, the first {first}: no rollout_id, so all their samples are step 0"]

    def __iter__(self) -> Iterator[Part]:
        """Parts of one step each, in the order of the samples."""
        self._unusable, self._unnumbered = {}, {}
        waiting: list[DumpedSample] = []
        num_tokens = 0
        for sample in self._samples:
            reason = _obstacle(sample)
            if reason is not None:
                count, first = self._unusable.get(reason, (0, sample.name))
                self._unusable[reason] = (count + 1, first)
                continue
            if sample.rollout_id is None:
                self._unnumbered[sample.path] = None
            if waiting and (_step(waiting[0]) != _step(sample) or num_tokens >= self._max_tokens):
                yield _part(waiting)
                waiting, num_tokens = [], 0
            waiting.append(sample)
            num_tokens += len(sample.proximal_log_probs)  # type: ignore[arg-type]
        if waiting:
            yield _part(waiting)


def _obstacle(sample: DumpedSample) -> str | None:
    proximal, behavior = sample.proximal_log_probs, sample.behavior_log_probs
    if sample.problem is not None:
        return sample.problem
    if proximal is None or behavior is None:
        return f"no log-probs of the {'trainer' if proximal is None else 'engine'}"
    lengths = {len(proximal), len(behavior)}
    if sample.response_mask is not None:
        lengths.add(len(sample.response_mask))
    return None if len(lengths) == 1 else "lists of other lengths: log-probs of both sides and mask must be one each"


def _step(sample: DumpedSample) -> str:
    return "0" if sample.rollout_id is None else str(sample.rollout_id)


def _part(samples: list[DumpedSample]) -> Part:
    proximal = [torch.as_tensor(each.proximal_log_probs) for each in samples]
    lengths = [len(each) for each in proximal]
    advantages = [each.advantages for each in samples]
    return Part.of_lists(
        proximal=proximal,
        behavior=[torch.as_tensor(each.behavior_log_probs) for each in samples],
        masks=[
            torch.ones(length) if each.response_mask is None else torch.as_tensor(each.response_mask)
            for each, length in zip(samples, lengths, strict=True)
        ],
        advantages=[
            None if values is None or values.numel() not in (1, length) else values
            for values, length in zip(advantages, lengths, strict=True)
        ],
        origins=[_origin(each) for each in samples],
        step=_step(samples[0]),
    )


def _origin(sample: DumpedSample) -> Origin:
    return Origin(
        name=sample.name,
        sample_index=sample.sample_index,
        reward=math.nan if sample.reward is None else sample.reward,
        versions_behind=versions_behind(sample.proximal_weight_version, sample.behavior_weight_versions),
        token_ids=sample.response_ids,
        has_other_ids=_has_other_ids(sample),
        group=_group(sample),
    )


def _group(sample: DumpedSample) -> Hashable:
    if sample.group_index is not None:
        return str(sample.group_index)
    if sample.token_ids is None or sample.response_ids is None:
        return None
    prompt = sample.token_ids[: len(sample.token_ids) - len(sample.response_ids)]
    return fingerprint(prompt) if len(prompt) else None


def _has_other_ids(sample: DumpedSample) -> bool | None:
    if sample.response_ids is None or sample.sampled_ids is None:
        return None
    return not torch.equal(torch.as_tensor(sample.response_ids), torch.as_tensor(sample.sampled_ids))
