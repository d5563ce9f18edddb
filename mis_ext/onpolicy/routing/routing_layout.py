# SPDX-License-Identifier: Apache-2.0
"""The order of a micro-batch's tokens in a trainer's routers, and the recorded experts in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mis_ext.correction.layout import owned_chunks
from mis_ext.onpolicy.routing.experts import NOT_RECORDED, RoutedExperts
from mis_ext.validation import check_choice, check_integer, check_lengths

MissingPolicy = Literal["error", "own"]
PackedPartition = Literal["zigzag", "stream"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRouting:
    """The experts of one micro-batch in the order of a rank's router rows.

    Attributes:
        experts_TLK: int32, on the CPU; -1 for the trainer's own choice: padding, last tokens, and tokens that were not
            recorded.
        num_experts: Experts per layer.
        num_missing: Number of tokens that the engine did not record, without the last token of each sample.
    """

    experts_TLK: Tensor
    num_experts: int
    num_missing: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingLayout:
    """Map the rows of a rank's routers to tokens.

    Attributes:
        lengths: Tokens of each sample, prompt and response.
        sample_T: Sample of each row; -1 for padding. int64.
        position_T: Position in the sample. int64.
    """

    lengths: tuple[int, ...]
    sample_T: Tensor
    position_T: Tensor

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        tp_rank: int = 0,
        tp_size: int = 1,
        num_local_tokens: int | None = None,
        partition: PackedPartition = "zigzag",
    ) -> RoutingLayout:
        """Packed samples (``thd``).

        Args:
            lengths: Tokens of each sample.
            cp_rank: Rank ``r`` in the context-parallel group.
            cp_size: Ranks in the context-parallel group.
            tp_rank: Rank in the tensor-parallel group that splits the rows; only with sequence parallelism.
            tp_size: Ranks in that group; 1 without sequence parallelism.
            num_local_tokens: Rows of a context-parallel rank if the framework pads the packed micro-batch at its end.
            partition: With ``zigzag`` rank ``r`` holds chunks ``r`` and ``2 * cp_size - 1 - r`` of each sample, which
                is padded to ``2 * cp_size`` equal chunks. With ``stream``, slime's and Miles' ``--allgather-cp``, it
                holds part ``r`` of ``cp_size`` equal parts of all concatenated samples, padded at the end.

        Raises:
            ValueError: A rank, length or partition is illegal, or the rows cannot be split equally among the
                tensor-parallel ranks.
        """
        _check_rank("cp", cp_rank, cp_size)
        is_stream = check_choice("partition", partition, ("zigzag", "stream")) == "stream"
        ranks = {"cp_rank": 0, "cp_size": 1} if is_stream else {"cp_rank": cp_rank, "cp_size": cp_size}
        lengths = _checked(lengths)
        parts = [_local_positions(length, **ranks) for length in lengths]
        position_T = torch.cat(parts)
        sample_T = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
        needed = -(-len(position_T) // cp_size) if is_stream else len(position_T)
        rows = needed if num_local_tokens is None else check_integer("num_local_tokens", num_local_tokens)
        if rows < needed:
            raise ValueError(f"num_local_tokens = {num_local_tokens} is less than the {needed} needed")
        extra = rows * (cp_size if is_stream else 1) - len(position_T)
        position_T = torch.nn.functional.pad(position_T, (0, extra))
        sample_T = torch.nn.functional.pad(sample_T, (0, extra), value=-1)
        if is_stream:
            position_T, sample_T = position_T.chunk(cp_size)[cp_rank], sample_T.chunk(cp_size)[cp_rank]
        return cls._build(lengths, sample_T, position_T, tp_rank=tp_rank, tp_size=tp_size)

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int],
        *,
        padded_length: int,
        cp_rank: int = 0,
        cp_size: int = 1,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> RoutingLayout:
        """Samples padded at the right to the same length (``bshd``): Megatron's routers see one position after another.

        ``padded_length``: this length, over all context-parallel ranks. For other arguments see :meth:`packed`.

        Raises:
            ValueError: See :meth:`packed`; or a sample is longer than ``padded_length``.
        """
        lengths = _checked(lengths)
        if max(lengths) > check_integer("padded_length", padded_length):
            raise ValueError(f"padded_length = {padded_length} is less than the longest sample, {max(lengths)}")
        local = _local_positions(padded_length, cp_rank=cp_rank, cp_size=cp_size)
        if len(local) % tp_size:
            raise ValueError(f"{len(local)} positions do not divide among tp_size = {tp_size} ranks")
        sample_T = torch.arange(len(lengths)).repeat(len(local))
        return cls._build(lengths, sample_T, local.repeat_interleave(len(lengths)), tp_rank=tp_rank, tp_size=tp_size)

    @classmethod
    def _build(
        cls, lengths: tuple[int, ...], sample_T: Tensor, position_T: Tensor, *, tp_rank: int, tp_size: int
    ) -> RoutingLayout:
        _check_rank("tp", tp_rank, tp_size)
        if len(sample_T) % tp_size:
            raise ValueError(f"{len(sample_T)} rows do not divide among tp_size = {tp_size} ranks")
        is_token_T = (sample_T >= 0) & (position_T < torch.tensor(lengths)[sample_T])
        sample_T = torch.where(is_token_T, sample_T, -1)
        return cls(
            lengths=lengths,
            sample_T=sample_T.chunk(tp_size)[tp_rank],
            position_T=position_T.chunk(tp_size)[tp_rank],
        )

    def local(self, samples: Sequence[RoutedExperts], *, missing: MissingPolicy = "error") -> LocalRouting:
        """The experts of this rank's tokens, in the order of the routers' rows.

        Args:
            samples: The experts of each sample, in the order of ``lengths``.
            missing: The action for a token that the engine did not record: ``error``, or ``own`` to use and count the
                trainer's choice. The last token of a sample has no forward pass in the engine and is always ``own``.

        Raises:
            ValueError: A sample has a wrong number of tokens, samples differ in layers, top-k or experts, or a token
                was not recorded.
        """
        check_choice("missing", missing, ("error", "own"))
        self._check(samples)
        stacked = torch.cat([sample.experts_TLK.int().cpu() for sample in samples])
        is_token_T = self.sample_T >= 0
        first_S = torch.tensor([0, *self.lengths]).cumsum(0)
        token_T = torch.where(is_token_T, first_S[self.sample_T] + self.position_T, 0)
        experts_TLK = torch.where(is_token_T[:, None, None], stacked[token_T], NOT_RECORDED)
        recorded_T = experts_TLK[:, 0, 0] != NOT_RECORDED
        is_last_T = self.position_T == torch.tensor(self.lengths)[self.sample_T] - 1
        missing_T = is_token_T & ~recorded_T & ~is_last_T
        if missing == "error" and missing_T.any():
            row = int(missing_T.nonzero()[0])
            raise ValueError(
                f"{int(missing_T.sum())} tokens have no recorded experts, the first at position "
                f"{int(self.position_T[row])} of sample {int(self.sample_T[row])}: missing='own' uses the trainer's "
                "choice for them"
            )
        return LocalRouting(
            experts_TLK=experts_TLK,
            num_experts=samples[0].num_experts,
            num_missing=int(missing_T.sum()),
        )

    def _check(self, samples: Sequence[RoutedExperts]) -> None:
        if len(samples) != len(self.lengths):
            raise ValueError(f"got experts of {len(samples)} samples, but the layout has {len(self.lengths)}")
        kinds = {(*sample.experts_TLK.shape[1:], sample.num_experts) for sample in samples}
        if len(kinds) > 1:
            raise ValueError(f"samples differ in (layers, topk, num_experts): {sorted(kinds)}")
        for index, (sample, length) in enumerate(zip(samples, self.lengths, strict=True)):
            if sample.num_tokens != length:
                raise ValueError(f"sample {index} has experts of {sample.num_tokens} tokens, but needs {length}")


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    found = check_lengths("lengths", lengths)
    if min(found, default=0) < 1:
        raise ValueError(f"lengths must be positive, one per sample, got {[*found]}")
    return found


def _check_rank(name: str, rank: int, size: int) -> None:
    rank, size = check_integer(f"{name}_rank", rank), check_integer(f"{name}_size", size)
    if not 0 <= rank < size:
        raise ValueError(f"{name}_rank must be in [0, {name}_size = {size}), got {rank}")


def _local_positions(length: int, *, cp_rank: int, cp_size: int) -> Tensor:
    """The positions of one sequence on a context-parallel rank."""
    _check_rank("cp", cp_rank, cp_size)
    runs = owned_chunks(cp_rank=cp_rank, cp_size=cp_size).ranges(length)
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])
