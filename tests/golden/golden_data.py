"""Log-probs, masks and losses of the golden cases.

Only whole random numbers and exact arithmetic make them, so that every machine and every torch draws the same bits.
"""

import math
from typing import NamedTuple

import torch

KINDS = ("clean", "poison", "few poisoned tokens", "masked poison", "far", "bfloat16", "any float32")
FINE = ("any float32", "bfloat16")
"""Their log-probs are no multiples of 1/64."""
SPECIALS = (math.nan, math.inf, -math.inf, -1e4)
MASKED_SAMPLE = 5
"""This sample, where there is one, has no trainable token."""


class Batch(NamedTuple):
    """Whole responses, one tensor per sample."""

    train: list[torch.Tensor]
    rollout: list[torch.Tensor]
    masks: list[torch.Tensor]
    losses: list[torch.Tensor]


def draw(kind: str, lengths: tuple[int, ...], *, seed: int) -> Batch:
    """The samples of one micro-batch: quiet, normal and wild ones in turn."""
    generator = torch.Generator().manual_seed(seed)
    samples = [_sample(index, length, generator, is_fine=kind in FINE) for index, length in enumerate(lengths)]
    batch = Batch(*map(list, zip(*samples, strict=True)))
    generator.manual_seed(seed + 1000)
    if kind == "poison":
        _poison(batch, generator)
    elif kind == "few poisoned tokens":
        _poison_few(batch, generator)
    elif kind == "masked poison":
        _poison_masked(batch, generator)
    elif kind == "far":
        _move_far(batch, generator)
    elif kind == "bfloat16":
        return batch._replace(train=[t.bfloat16() for t in batch.train], rollout=[r.bfloat16() for r in batch.rollout])
    return batch


def _whole(low: int, high: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers in [low, high] as float32."""
    return torch.randint(low, high + 1, (length,), generator=generator).float()


def _sample(index: int, length: int, generator: torch.Generator, *, is_fine: bool) -> tuple[torch.Tensor, ...]:
    is_quiet = index % 3 == 0
    # The quiet ones have no improbable token either.
    train = -_whole(1, 200 if is_quiet else 255, length, generator) / 64
    quiet = _whole(-15, 15, length, generator).div(15).trunc()
    normal = sum(_whole(-7, 7, length, generator) for _ in range(4))
    outlier = torch.where(_whole(1, 12, length, generator) == 1, _whole(-400, 400, length, generator), normal)
    difference = (quiet, normal, outlier)[index % 3] / 64
    if is_fine:
        train = train - _whole(0, 2**20, length, generator) / 2**24 / 3
        difference = difference * 0.7 + _whole(-(2**10), 2**10, length, generator) / 2**20 / 3
    mask = (_whole(1, 5, length, generator) > 1).int()
    mask[:1] = 1
    if index == MASKED_SAMPLE:
        mask.zero_()
    return train, train - difference, mask, _whole(-(2**12), 2**12, length, generator) / 2**10


def _specials(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (length,), generator=generator)]


def _poison(batch: Batch, generator: torch.Generator) -> None:
    """Every second sample loses tokens of either engine; the first loses all that it has."""
    for index, mask in enumerate(batch.masks):
        for stream in (batch.train[index], batch.rollout[index]):
            hit = (_whole(1, 25, mask.numel(), generator) == 1) & (mask != 0)
            values = _specials(mask.numel(), generator)
            if index % 2 == 0:
                stream[hit] = values[hit]
    batch.train[0].fill_(math.nan)


def _poison_few(batch: Batch, generator: torch.Generator) -> None:
    """NaN and infinities in every second sample, whose first token stays: no sample is without a ratio."""
    for index, mask in enumerate(batch.masks):
        hit = (_whole(1, 25, mask.numel(), generator) == 1) & (mask != 0) & (index % 2 == 1)
        hit[:1] = False
        values = _specials(mask.numel(), generator)
        batch.rollout[index][hit] = values.where(values.abs() == math.inf, math.nan)[hit]


def _poison_masked(batch: Batch, generator: torch.Generator) -> None:
    """NaN and infinities under the mask: in both streams, and in the loss."""
    for index, mask in enumerate(batch.masks):
        for stream in (batch.train[index], batch.rollout[index], batch.losses[index]):
            hit = (_whole(1, 2, mask.numel(), generator) == 1) & (mask == 0)
            stream[hit] = _specials(mask.numel(), generator)[hit]


def _move_far(batch: Batch, generator: torch.Generator) -> None:
    """One token in ten of every second sample differs by up to 60 nats."""
    for index, mask in enumerate(batch.masks):
        hit = (_whole(1, 10, mask.numel(), generator) == 1) & (index % 2 == 0)
        far = _whole(-60 * 64, 60 * 64, mask.numel(), generator) / 64
        batch.rollout[index][hit] = batch.train[index][hit] - far[hit]
