# SPDX-License-Identifier: Apache-2.0
"""Logits and micro-batches as input of the frameworks' losses, with new lengths at every call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from host_baseline import response_pieces
from torch import Tensor
from workload import QUANTUM, Responses, Shape, World, draw, local_part

from mis_ext.scoring import score_tokens

SPREAD, PEAK, LIKELY = 2.0, 8.0, 0.6
"""Standard deviation of a logit, the value added to one logit per row, and how often that one is the token."""
PROMPT_SHARE = 0.1
LOG_RATIO_STEP, LOG_RATIO_STEPS = 0.01, 15.0
"""Log-ratios of current and old are about multiples of this: none is so close to a clip bound that rounding decides."""

Item = dict[str, Any]


class Part(NamedTuple):
    """This rank's columns of the vocabulary."""

    rank: int = 0
    size: int = 1
    group: Any = None


WHOLE = Part()


class Logits:
    """One buffer for logits of every length: nothing of this size is allocated between calls."""

    def __init__(
        self, rows: int, vocabulary: int, *, dtype: torch.dtype, device: torch.device, seed: int, part: Part = WHOLE
    ) -> None:
        self.vocabulary, self._part, self._seed = vocabulary, part, seed
        self.buffer = torch.empty(rows, vocabulary // part.size, dtype=dtype, device=device)
        # Every rank has other noise, and the same likely columns.
        self._generators = [torch.Generator(device) for _ in range(2)]
        self.fill()

    def fill(self) -> None:
        """The same numbers every time: noise, and one likely column a row."""
        noise, shared = self._generators
        noise.manual_seed(1000 * self._seed + self._part.rank)
        shared.manual_seed(self._seed)
        self.buffer.normal_(0.0, SPREAD, generator=noise)
        rows, columns = self.buffer.shape
        device = self.buffer.device
        self.likely = torch.randint(self.vocabulary, (rows,), device=device, generator=shared)
        column = self.likely - self._part.rank * columns
        is_here = (column >= 0) & (column < columns)
        self.buffer[torch.arange(rows, device=device), column.clamp(0, columns - 1)] += PEAK * is_here.to(
            self.buffer.dtype
        )

    def first(self, rows: int) -> Tensor:
        """``[1, rows, V]`` with gradient and not a leaf: a view, which takes no additional memory."""
        return self.buffer.detach().requires_grad_()[:rows].unsqueeze(0)

    def tokens(self, rows: int, generator: torch.Generator) -> Tensor:
        """``[rows]``: what each row predicts."""
        device = self.buffer.device
        others = torch.randint(self.vocabulary, (rows,), generator=generator).to(device)
        is_likely = (torch.rand(rows, generator=generator) < LIKELY).to(device)
        return torch.where(is_likely, self.likely[:rows], others)


def drawn(shape: Shape, *, seed: int) -> Responses:
    """Log-normal responses as in ``workload``, and prompts of two tokens to a tenth of the mean response."""
    responses = draw(shape, seed=seed)
    longest = max(int(PROMPT_SHARE * shape.mean_length), 3)
    prompts = torch.randint(2, longest, (shape.samples,), generator=torch.Generator().manual_seed(seed)).tolist()
    totals = [p + r for p, r in zip(prompts, responses.response_lengths, strict=True)]
    return Responses(**{**vars(responses), "total_lengths": totals})


class Rows(NamedTuple):
    """How many rows of logits a rank has, and ``[T]``, which of them predict its response tokens."""

    count: int
    at_T: Tensor

    @classmethod
    def of(cls, total_lengths: list[int], response_lengths: list[int], *, cp_rank: int = 0, cp_size: int = 1) -> Rows:
        """Packed; over context-parallel ranks each sample in chunks r and 2n - 1 - r, padded to a whole number."""
        found, end = [], 0
        for total, response in zip(total_lengths, response_lengths, strict=True):
            first = total - response - 1
            if cp_size == 1:
                found.append(torch.arange(end + first, end + total - 1))
                end += total
                continue
            chunk = math.ceil(total / (2 * cp_size))
            pieces = response_pieces(total, response, padded_length=None, cp_rank=cp_rank, cp_size=cp_size)
            for number, (begin, stop) in zip((cp_rank, 2 * cp_size - 1 - cp_rank), pieces, strict=True):
                found.append(torch.arange(begin, stop) + (end + first - number * chunk))
                end += chunk
        return cls(end, torch.cat(found))


class Batches:
    """Micro-batches of one shape over one buffer of logits: the same samples on all ranks but data-parallel ones."""

    def __init__(
        self, shape: Shape, vocabulary: int, *, dtype: torch.dtype, world: World, seed: int, part: Part = WHOLE
    ) -> None:
        # No seed of a rank's rows is that of another's.
        seed += 1000 * world.dp_rank
        responses = drawn(shape, seed=seed)
        self.world, self._part = world, part
        # Padding to chunks adds at most this to what the longest micro-batch has.
        rows = self._rows(responses).count + 2 * world.cp_size * shape.samples * (world.cp_size > 1)
        seed_of_rows = seed + world.cp_rank
        self.logits = Logits(rows, vocabulary, dtype=dtype, device=world.device, seed=seed_of_rows, part=part)
        self._responses = responses.to(world.device)
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

    def _rows(self, responses: Responses) -> Rows:
        world = self.world
        totals, lengths = responses.total_lengths, responses.response_lengths
        return Rows.of(totals, lengths, cp_rank=world.cp_rank, cp_size=world.cp_size)

    def _tokens(self, responses: Responses) -> Tensor:
        """``[sum of total lengths]``."""
        size = sum(responses.total_lengths)
        if self.world.cp_size > 1:
            # Only the rank with the row knows the probable token.
            return torch.randint(self.logits.vocabulary, (size,), generator=self._generator).to(self.world.device)
        # A row predicts the next token; what the last row of a sample predicts is not in the sample.
        return self.logits.tokens(size, self._generator).roll(1)

    def _batch(self, responses: Responses) -> Item:
        totals, lengths = responses.total_lengths, responses.response_lengths
        rows = self._rows(responses)
        logits, tokens = self.logits.first(rows.count), self._tokens(responses)
        is_response = torch.cat([torch.arange(t) >= t - r for t, r in zip(totals, lengths, strict=True)])

        def local(values_R: Tensor) -> Tensor:
            return torch.cat(local_part(responses, values_R, self.world))

        def noise(scale: float) -> Tensor:
            drawn_R = torch.randn(sum(lengths), generator=self._generator) * scale
            return local(drawn_R.to(self.world.device))

        with torch.no_grad():
            current = score_tokens(
                logits,
                local(tokens[is_response.to(tokens.device)]),
                row_T=rows.at_T.to(logits.device),
                entropy="none",
                tp_group=self._part.group,
                tp_rank=self._part.rank,
            ).log_prob_T
        steps = noise(LOG_RATIO_STEPS).round() * LOG_RATIO_STEP
        # No log-prob is above 0.
        steps = torch.where(current - steps > 0.0, steps.abs(), steps)
        old = ((current - steps) / QUANTUM).floor() * QUANTUM
        columns = {
            "advantages": noise(1.0),
            "log_probs": old,
            "rollout_log_probs": (old - local(responses.train - responses.rollout)).clamp(max=0.0),
            "ref_log_probs": (current + noise(0.1)).clamp(max=0.0),
        }
        local_lengths = [len(x) for x in local_part(responses, responses.train, self.world)]
        item: Item = {name: [*map(Tensor.clone, x.split(local_lengths))] for name, x in columns.items()}
        masks = [*map(Tensor.clone, responses.split(responses.mask))]
        return item | {
            "logits": logits,
            "loss_masks": masks,
            "unconcat_tokens": [*tokens.split(totals)],
            "total_lengths": totals,
            "response_lengths": lengths,
            "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]).float(),
        }
