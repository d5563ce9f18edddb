# SPDX-License-Identifier: Apache-2.0
"""Packed parts of a run: samples of one step that fit into memory; and splitting a stream of samples into parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.correction.tokens import Tokens, bounded_exp
from mis_ext.hosts.packing import MASK
from mis_ext.tools.diagnosis.evidence import Evidence, Origin, versions_behind
from mis_ext.tools.dumps import DumpedSample
from mis_ext.tools.dumps.stream import fingerprint

MAX_TOKENS = 1 << 18
"""The largest number of tokens of a part, unless one sample has more: intermediate results stay in CPU caches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """``S`` whole responses of one step with ``T`` tokens.

    Attributes:
        step: Name of the step.
        streams: Log-probs and mask, in nats.
        advantages_T: NaN without an advantage.
        origins: One per sample.
    """

    step: str
    streams: PackedStreams
    advantages_T: Tensor
    origins: Sequence[Origin] = field(repr=False)

    @classmethod
    def of_lists(
        cls,
        *,
        proximal: Sequence[Tensor],
        behavior: Sequence[Tensor],
        masks: Sequence[Tensor] | None = None,
        advantages: Sequence[Tensor | None] | None = None,
        origins: Sequence[Origin] | None = None,
        step: str = "0",
    ) -> Part:
        """Make a part from one 1-D tensor or array per sample: log-probs in nats; masks nonzero for trained tokens.

        Raises:
            ValueError: If the lists or the lengths of a sample differ, or a mask is below 0 or not finite.
        """
        proximal, behavior = ([torch.as_tensor(each).detach().cpu() for each in side] for side in (proximal, behavior))
        lengths = [len(each) for each in proximal]
        masks = [torch.ones(length, dtype=torch.bool) for length in lengths] if masks is None else masks
        masks = [torch.as_tensor(mask).cpu() for mask in masks]
        for mask in masks:
            MASK.check(mask)
        origins = [Origin()] * len(lengths) if origins is None else origins
        advantages = [None] * len(lengths) if advantages is None else advantages
        for name, column in (("behavior", behavior), ("masks", masks)):
            if [len(each) for each in column] != lengths:
                raise ValueError(f"{name} and proximal must have the same numbers of samples and tokens")
        if not len(origins) == len(advantages) == len(lengths):
            raise ValueError("origins and advantages must have one entry per sample")
        spread = [_spread(each, length) for each, length in zip(advantages, lengths, strict=True)]
        columns = (_cat(proximal), _cat(behavior), _cat([mask != 0 for mask in masks]))
        streams = PackedStreams(*columns, PackedLayout.whole(lengths))
        return cls(step=step, streams=streams, advantages_T=_cat(spread), origins=origins)

    @cached_property
    def tokens(self) -> Tokens:
        """Log-ratios and masks ``[T]`` of the correction."""
        return self.streams.tokens

    @cached_property
    def _valid_N(self) -> Tensor | None:
        """Indices of the valid tokens; None if all are valid, so that no copy is needed."""
        valid_T = self.tokens.valid
        return None if bool(valid_T.all()) else valid_T.nonzero().flatten()

    def of_valid(self, values_T: Tensor) -> Tensor:
        """The values of valid tokens."""
        return values_T if self._valid_N is None else values_T.index_select(0, self._valid_N)

    @cached_property
    def ratio_T(self) -> Tensor:
        """Ratios ``[T]``, clamped as in the correction."""
        return bounded_exp(self.tokens.d)

    @cached_property
    def no_ratio_T(self) -> Tensor:
        """Trained tokens without finite log-probs on both sides."""
        return self.tokens.generated & ~self.tokens.valid

    @cached_property
    def advantage_T(self) -> Tensor:
        """Advantages ``[T]`` of trained tokens, 0 if unknown."""
        return torch.where(self.tokens.generated & ~self.advantages_T.isnan(), self.advantages_T, 0.0)

    @cached_property
    def advantage_sums(self) -> dict[str, float]:
        """Reference for all configurations: number of tokens of each sign, and the sum of squares."""
        return {
            "positive": float((self.advantage_T > 0.0).sum()),
            "negative": float((self.advantage_T < 0.0).sum()),
            "squared_advantage": float(self.advantage_T.square().sum(dtype=torch.float64)),
        }

    @cached_property
    def has_advantages(self) -> bool:
        """True if the advantage of any token is known."""
        return not bool(self.advantages_T.isnan().all())

    @cached_property
    def evidence(self) -> Evidence:
        """The valid tokens with the data that the diagnosis needs."""
        given = self.streams[:2]
        return Evidence.of(self.tokens, self.streams.layout, self.origins, step=self.step, given=given)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([*tensors]) if tensors else torch.empty(0)


def _spread(advantage: Tensor | None, length: int) -> Tensor:
    if advantage is None:
        return torch.full((length,), math.nan)
    values = torch.as_tensor(advantage).detach().float().cpu()
    return values if len(values.shape) == 1 and len(values) == length else values.reshape(()).expand(length)


class Parts:
    """The parts of a stream of samples. Unusable samples are counted by reason.

    Args:
        samples: From :class:`~mis_ext.tools.dumps.Dumps`.
        max_tokens: Largest number of tokens of a part.
    """

    def __init__(self, samples: Iterable[DumpedSample], *, max_tokens: int = MAX_TOKENS) -> None:
        self._samples = samples
        self._max_tokens = max_tokens
        self._unusable: dict[str, tuple[str, list[str]]] = {}
        self._unnumbered: dict[str, None] = {}

    @property
    def skipped(self) -> list[str]:
        """Samples that the last iteration omitted, and files without a rollout number, which count as one step."""
        said = [f"{len(names)} samples, the first {names[0]}: {reason}" for reason, names in self._unusable.values()]
        if len(self._unnumbered) > 1:
            said.append(
                f"{len(self._unnumbered)} files, the first {next(iter(self._unnumbered))}: no rollout_id, so all their "
                "samples are step 0"
            )
        return said

    def __iter__(self) -> Iterator[Part]:
        """Yield parts of one step each, in the order of the samples."""
        self._unusable, self._unnumbered = {}, {}
        waiting: list[DumpedSample] = []
        num_tokens = 0
        for sample in self._samples:
            reason = sample.obstacle
            if reason is not None:
                self._unusable.setdefault(reason.partition(":")[0], (reason, []))[1].append(sample.name)
                continue
            if sample.rollout_id is None:
                self._unnumbered[sample.path] = None
            if waiting and (waiting[0].step != sample.step or num_tokens >= self._max_tokens):
                yield _part(waiting)
                waiting, num_tokens = [], 0
            waiting.append(sample)
            num_tokens += len(sample.proximal_log_probs)  # type: ignore[arg-type]
        if waiting:
            yield _part(waiting)


def _part(samples: list[DumpedSample]) -> Part:
    proximal = [torch.as_tensor(each.proximal_log_probs) for each in samples]
    advantages = [
        None if each.advantages is None or each.advantages.numel() not in (1, len(values)) else each.advantages
        for each, values in zip(samples, proximal, strict=True)
    ]
    return Part.of_lists(
        proximal=proximal,
        behavior=[torch.as_tensor(each.behavior_log_probs) for each in samples],
        masks=[
            torch.ones(len(values)) if each.response_mask is None else torch.as_tensor(each.response_mask)
            for each, values in zip(samples, proximal, strict=True)
        ],
        advantages=advantages,
        origins=[*map(_origin, samples)],
        step=samples[0].step,
    )


def _origin(sample: DumpedSample) -> Origin:
    ids, sampled, group = sample.response_ids, sample.sampled_ids, sample.group_index
    if group is not None:
        group = str(group)
    elif sample.token_ids is not None and ids is not None:
        prompt = sample.token_ids[: len(sample.token_ids) - len(ids)]
        group = fingerprint(prompt) if len(prompt) else None
    is_known = ids is not None and sampled is not None
    return Origin(
        name=sample.name,
        sample_index=sample.sample_index,
        reward=math.nan if sample.reward is None else sample.reward,
        versions_behind=versions_behind(sample.proximal_weight_version, sample.behavior_weight_versions),
        token_ids=ids,
        has_other_ids=not torch.equal(torch.as_tensor(ids), torch.as_tensor(sampled)) if is_known else None,
        group=group,
        has_old_weights=None if sample.canary is None else sample.canary == "old",
        source=sample.path,
    )
