# SPDX-License-Identifier: Apache-2.0
"""Inputs of the benchmark: shapes, random micro-batches, and the ranks that share them."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from host_baseline import response_pieces
from torch import Tensor

MASKED_SHARE = 0.1
LENGTH_SIGMA = 0.5
MISMATCH = 0.02
OUTLIER_SHARE, OUTLIER = 0.0005, 1.0
FAR_SHARE, FAR_SHIFT = 0.1, 0.02
# Log-probs are multiples of this: sums of differences are exact in float32, and no decision hangs on their order.
QUANTUM = 2.0**-14
# Input sets rotate, so that where memory allows it a set has left the cache before its next turn.
ROTATED_BYTES = 256 * 2**20
MIN_SETS, MAX_SETS = 4, 16

Item = dict[str, Any]
"""Keyword arguments of a call."""
GATED_MIS = {
    "use_tis": True,
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_upper_bound": 2.0,
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": 0.99,
    "rs_upper_bound": 1.01,
    "rs_veto_threshold": 1e-4,
    "tis_batch_normalize": True,
    "mis_guard": "warn",
    "mis_max_reject_fraction": 1.0,
}
"""The default of version 0.1: all parts of a correction at once."""


@dataclass(frozen=True)
class Shape:
    """Samples and their mean number of response tokens."""

    samples: int
    mean_length: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``64x2048``."""
        samples, _, mean_length = text.partition("x")
        return cls(int(samples), int(mean_length))

    def __str__(self) -> str:
        return f"{self.samples}x{self.mean_length}"

    def scaled(self, max_tokens: int) -> Shape:
        """The same number of samples where possible, shorter, and about ``max_tokens`` in all at most."""
        samples = min(self.samples, max(max_tokens // 8, 1))
        return Shape(samples, min(self.mean_length, max(max_tokens // samples, 1)))


def _own_group(groups: list[list[int]], rank: int) -> Any:
    """Make every group on every rank, and return this rank's; None where it would be alone."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups if len(ranks) > 1]
    return next((group for ranks, group in made if rank in ranks), None)


@dataclass(frozen=True)
class World:
    """The ranks of this process; groups as Miles passes them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_group: Any = None
    dp_group: Any = None

    @classmethod
    def join(cls, device_type: str, cp_size: int, *, tp_size: int = 1) -> World:
        """One process, or what torchrun started, in Megatron-Core's order.

        Neighboring ranks share a vocabulary (``tp_size``), then sequences (``cp_size``); the rest is data-parallel.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size % (cp_size * tp_size):
            raise SystemExit(
                f"--tp {tp_size} --cp {cp_size}: their product does not divide {size} processes; start them with "
                "torchrun"
            )
        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if size == 1:
            return cls(device)
        if not dist.is_initialized():
            on_gpu = device.type == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        rank, dp_size = dist.get_rank(), size // (cp_size * tp_size)
        rank_DCT = torch.arange(size).view(dp_size, cp_size, tp_size)
        ((dp_rank, cp_rank, _),) = (rank_DCT == rank).nonzero().tolist()
        by_dp, by_cp = (rank_DCT.movedim(axis, -1).flatten(0, 1).tolist() for axis in (0, 1))
        dp = {"dp_rank": dp_rank, "dp_size": dp_size, "dp_group": _own_group(by_dp, rank)}
        cp = {"cp_rank": cp_rank, "cp_size": cp_size, "cp_group": _own_group(by_cp, rank)}
        return cls(device, rank, size, **cp, **dp)

    @property
    def parallel_state(self) -> SimpleNamespace:
        """The arguments that Miles passes to the hook."""
        cp = SimpleNamespace(rank=self.cp_rank, size=self.cp_size, group=self.cp_group)
        dp = SimpleNamespace(rank=self.dp_rank, size=self.dp_size, group=self.dp_group)
        return SimpleNamespace(cp=cp, intra_dp=dp, effective_dp=dp)

    def synchronize(self) -> None:
        """Wait until this device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for every rank and its device."""
        if self.size > 1:
            dist.barrier()
        self.synchronize()

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Per position the largest of all ranks: what they agree on."""
        if self.size == 1:
            return list(values)
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        return row.tolist()


@dataclass(frozen=True)
class Responses:
    """Whole responses, packed: ``[R]`` on the CPU or on the device."""

    response_lengths: list[int]
    total_lengths: list[int]
    train: Tensor
    rollout: Tensor
    mask: Tensor
    pg_loss: Tensor

    def to(self, device: torch.device) -> Responses:
        """A copy of the tensors elsewhere."""
        tensors = (x.to(device) for x in (self.train, self.rollout, self.mask, self.pg_loss))
        return Responses(self.response_lengths, self.total_lengths, *tensors)

    def relaid(self, response_lengths: list[int]) -> Responses:
        """The same prompts and, as many as are needed, the same tokens, split into other lengths."""
        prompts = [t - r for t, r in zip(self.total_lengths, self.response_lengths, strict=True)]
        totals = [p + r for p, r in zip(prompts, response_lengths, strict=True)]
        size = sum(response_lengths)
        tensors = (x[:size] for x in (self.train, self.rollout, self.mask, self.pg_loss))
        return Responses(response_lengths, totals, *tensors)

    def split(self, values: Tensor) -> list[Tensor]:
        """One tensor per sample."""
        return list(values.split(self.response_lengths))


def draw(shape: Shape, *, seed: int) -> Responses:
    """Log-normal lengths with the mean of the shape, close engines, some outliers and some far-off sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(shape.samples, generator=generator) * LENGTH_SIGMA).exp()
    lengths = (lengths * shape.samples * shape.mean_length / lengths.sum()).round().long().clamp_min(1)
    # Give the rounding error to the longest, so that the mean is that of the shape.
    lost = shape.samples * shape.mean_length - int(lengths.sum())
    lengths[lengths.argsort(descending=True)[: abs(lost)]] += 1 if lost > 0 else -1
    # Shorter than the responses, so that context-parallel ranks share them.
    prompts = torch.randint(1, max(shape.mean_length // 4, 2), (shape.samples,), generator=generator)
    size = int(lengths.sum())
    far = (torch.rand(shape.samples, generator=generator) < FAR_SHARE).float() * FAR_SHIFT
    difference = torch.randn(size, generator=generator) * MISMATCH + far.repeat_interleave(lengths)
    sign = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
    difference += (torch.rand(size, generator=generator) < OUTLIER_SHARE) * sign * OUTLIER
    train = (-4.0 * torch.rand(size, generator=generator) / QUANTUM).round() * QUANTUM
    return Responses(
        response_lengths=lengths.tolist(),
        total_lengths=(lengths + prompts).tolist(),
        train=train,
        rollout=train - (difference / QUANTUM).round() * QUANTUM,
        mask=(torch.rand(size, generator=generator) >= MASKED_SHARE).int(),
        pg_loss=torch.randn(size, generator=generator),
    )


def hook_item(responses: Responses, world: World) -> Item:
    """Arguments of a hook call on this rank: separate tensors per sample, and a loss with gradient."""
    train, rollout, pg_loss = (
        local_part(responses, values, world) for values in (responses.train, responses.rollout, responses.pg_loss)
    )
    return {
        "pg_loss": torch.cat(pg_loss).requires_grad_(),
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "loss_masks": [mask.clone() for mask in responses.split(responses.mask)],
        "total_lengths": responses.total_lengths,
        "response_lengths": responses.response_lengths,
        "parallel_state": world.parallel_state,
        "max_seq_lens": None,
    }


def local_part(responses: Responses, values: Tensor, world: World) -> list[Tensor]:
    """Copies of this rank's tokens, one tensor per sample."""
    whole = responses.split(values)
    if world.cp_size == 1:
        return [x.clone() for x in whole]
    out = []
    for x, total in zip(whole, responses.total_lengths, strict=True):
        pieces = response_pieces(total, len(x), padded_length=None, cp_rank=world.cp_rank, cp_size=world.cp_size)
        out.append(torch.cat([x[begin:end] for begin, end in pieces]))
    return out


class Workload:
    """Micro-batches of one shape on this rank: the same lengths over and over, or never the same twice."""

    def __init__(self, shape: Shape, *, world: World, seed: int) -> None:
        self.shape, self.world = shape, world
        seeds = [seed + world.dp_rank + world.dp_size * index for index in range(self._num_sets(shape, world))]
        first = draw(shape, seed=seeds[0])
        self.sets = [first.to(world.device)]
        for other in seeds[1:]:
            # Other tokens and masks, but the lengths of the first set.
            values = draw(shape, seed=other)
            index = torch.arange(len(first.train)) % len(values.train)
            tensors = (x[index] for x in (values.train, values.rollout, values.mask, values.pg_loss))
            moved = Responses(first.response_lengths, first.total_lengths, *tensors).to(world.device)
            self.sets.append(moved)
        self._items = [hook_item(responses, world) for responses in self.sets]
        self._turn, self._layouts = 0, 0
        self._generator = torch.Generator().manual_seed(seed + 1 + world.dp_rank)

    @staticmethod
    def _num_sets(shape: Shape, world: World) -> int:
        # Three streams and the loss, and about as much again that a call writes.
        bytes_per_set = 32 * shape.samples * shape.mean_length // world.cp_size
        wanted = math.ceil(ROTATED_BYTES / bytes_per_set) if world.device.type == "cuda" else MIN_SETS
        return min(max(wanted, MIN_SETS), MAX_SETS)

    @property
    def num_local_tokens(self) -> int:
        """``T``."""
        return len(self._items[0]["pg_loss"])

    def same_layout(self) -> Item:
        """The next set; every set has the same lengths."""
        self._turn += 1
        return self._items[self._turn % len(self._items)]

    def new_layout(self) -> Item:
        """The next set cut into lengths that no call has seen, as in training, where each micro-batch has its own."""
        self._turn += 1
        self._layouts += 1
        responses = self.sets[self._turn % len(self.sets)]
        order = torch.randperm(self.shape.samples, generator=self._generator).tolist()
        lengths = [responses.response_lengths[index] for index in order]
        # A total that was not there before makes the lengths new, however few samples there are to permute.
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= self._layouts % lengths[longest]
        return hook_item(responses.relaid(lengths), self.world)


def settings(keys: dict[str, Any]) -> Namespace:
    """The frameworks' ``args`` with the keys of a YAML file set on it."""
    host = {"get_mismatch_metrics": True, "qkv_format": "thd", "calculate_per_token_loss": False}
    return Namespace(**host, use_rollout_logprobs=False, **keys)
