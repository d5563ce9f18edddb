"""Logits and micro-batches as the hosts hand them to a loss, of new lengths at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from workload import QUANTUM, Responses, Shape, draw

from mis_ext.scoring import score_tokens

SPREAD, PEAK, LIKELY = 2.0, 8.0, 0.6
"""Standard deviation of a logit, what is added to one per row, and how often that one is the token."""
PROMPT_SHARE = 0.1
LOG_RATIO_STEP, LOG_RATIO_STEPS = 0.01, 15.0
"""Log-ratios of current and old are about multiples of this: none is so close to a clip bound that rounding decides."""

Item = dict[str, Any]


class Logits:
    """One buffer for logits of every length: nothing of this size is allocated between calls."""

    def __init__(self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.buffer = torch.empty(rows, columns, dtype=dtype, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._seed = seed
        self.fill()

    def fill(self) -> None:
        """The same numbers every time: noise, and one likely column a row."""
        self._generator.manual_seed(self._seed)
        self.buffer.normal_(0.0, SPREAD, generator=self._generator)
        rows, columns = self.buffer.shape
        device = self.buffer.device
        self.likely = torch.randint(columns, (rows,), device=device, generator=self._generator)
        self.buffer[torch.arange(rows, device=device), self.likely] += PEAK

    def first(self, rows: int) -> Tensor:
        """``[1, rows, V]`` with gradient and no leaf: a view, so that nothing beside it takes memory."""
        return self.buffer.detach().requires_grad_()[:rows].unsqueeze(0)

    def tokens(self, rows: int, generator: torch.Generator) -> Tensor:
        """``[rows]``: what each row predicts."""
        device, columns = self.buffer.device, self.buffer.shape[1]
        others = torch.randint(columns, (rows,), generator=generator).to(device)
        is_likely = (torch.rand(rows, generator=generator) < LIKELY).to(device)
        return torch.where(is_likely, self.likely[:rows], others)


@dataclass(frozen=True)
class Lengths:
    """Responses of one micro-batch and their prompts."""

    responses: Responses

    @classmethod
    def drawn(cls, shape: Shape, *, seed: int) -> Lengths:
        """Log-normal responses as in ``workload``, and prompts of two tokens to a tenth of the mean response."""
        responses = draw(shape, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        longest = max(int(PROMPT_SHARE * shape.mean_length), 3)
        prompts = torch.randint(2, longest, (shape.samples,), generator=generator).tolist()
        totals = [p + r for p, r in zip(prompts, responses.response_lengths, strict=True)]
        fields = {**vars(responses), "total_lengths": totals}
        return cls(Responses(**fields))

    @property
    def rows(self) -> int:
        """Prompts and responses."""
        return sum(self.responses.total_lengths)


class Batches:
    """Micro-batches of one shape over one buffer of logits."""

    def __init__(self, shape: Shape, columns: int, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        lengths = Lengths.drawn(shape, seed=seed)
        self.logits = Logits(lengths.rows, columns, dtype=dtype, device=device, seed=seed)
        self.device = device
        self._responses = lengths.responses.to(device)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._turn = 0

    def new(self) -> Item:
        """A micro-batch whose lengths no call has seen; fresh logits if somebody has written over them."""
        self._turn += 1
        order = torch.randperm(len(self._responses.response_lengths), generator=self._generator).tolist()
        lengths = [self._responses.response_lengths[index] for index in order]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= self._turn % max(lengths[longest] // 2, 1)
        return self._batch(self._responses.relaid(lengths))

    def refilled(self) -> Item:
        """The same after a call that has taken the place of the logits."""
        self.logits.fill()
        return self.new()

    def _batch(self, responses: Responses) -> Item:
        totals, lengths = responses.total_lengths, responses.response_lengths
        rows = sum(totals)
        logits = self.logits.first(rows)
        predicted = self.logits.tokens(rows, self._generator)
        # A row predicts the next token; what the last row of a sample predicts is not in the sample.
        tokens = predicted.roll(1)
        at = response_rows(totals, lengths).to(self.device)
        with torch.no_grad():
            current = score_tokens(logits, predicted[at], row_T=at, entropy="none").log_prob_T
        size = len(current)

        def noise(scale: float) -> Tensor:
            return (torch.randn(size, generator=self._generator) * scale).to(self.device)

        steps = noise(LOG_RATIO_STEPS).round() * LOG_RATIO_STEP
        # No log-prob is above 0.
        steps = torch.where(current - steps > 0.0, steps.abs(), steps)
        old = ((current - steps) / QUANTUM).floor() * QUANTUM
        columns = {
            "advantages": noise(1.0),
            "log_probs": old,
            "rollout_log_probs": (old - (responses.train - responses.rollout)).clamp(max=0.0),
            "ref_log_probs": (current + noise(0.1)).clamp(max=0.0),
            "loss_masks": responses.mask,
        }
        item: Item = {name: [*map(Tensor.clone, x.split(lengths))] for name, x in columns.items()}
        return item | {
            "logits": logits,
            "unconcat_tokens": [*tokens.split(totals)],
            "total_lengths": totals,
            "response_lengths": lengths,
            "rollout_mask_sums": torch.stack([mask.sum() for mask in item["loss_masks"]]).float(),
        }


def response_rows(total_lengths: list[int], response_lengths: list[int]) -> Tensor:
    """``[R]``: the packed rows that predict response tokens."""
    starts, end = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        starts.append(torch.arange(end - response - 1, end - 1))
    return torch.cat(starts)
