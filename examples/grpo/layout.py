# SPDX-License-Identifier: Apache-2.0
"""Token positions of a context-parallel rank, and the tensors of a micro-batch for Megatron."""

from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mis_ext.correction.layout import owned_chunks

from .transfer import moved


def zigzag_positions(lengths_S: Tensor, *, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """Return the sequence and the position of every token of a rank, sequence after sequence.

    Args:
        lengths_S: Length of each sequence, padded to whole chunks. ``[S]``, integer.
        cp_rank: The rank.
        cp_size: Number of context-parallel ranks.

    Returns:
        Sequence index and position, both ``[T]``, int64.
    """
    chunks, device = owned_chunks(cp_rank=cp_rank, cp_size=cp_size), lengths_S.device
    runs = [torch.arange(run.start, run.stop) for length in lengths_S.tolist() for run in chunks.ranges(length)]
    sequence_T = torch.repeat_interleave(lengths_S.long() // cp_size)
    return sequence_T, torch.cat(runs).to(device)


@dataclass(frozen=True, kw_only=True)
class ResponsePart:
    """The response tokens whose log-probs one rank computes.

    The logits at position ``p - 1`` give the log-prob of the token at ``p``, so a token belongs to the rank with the
    position before it.

    Attributes:
        logit_index_R: Row of each token in the rank's logits. ``[R]``, int64.
        response_index_R: Its position in the whole response. ``[R]``, int64.
    """

    logit_index_R: Tensor
    response_index_R: Tensor

    @classmethod
    def build(
        cls, *, total_length: int, response_length: int, padded_to: int, cp_rank: int, cp_size: int
    ) -> "ResponsePart":
        """Select a rank's part of a response; rows are counted from the sample's first.

        Args:
            total_length: Tokens of prompt and response.
            response_length: Tokens of the response.
            padded_to: Length of the sample in the layout, whole chunks.
            cp_rank: The rank.
            cp_size: Number of context-parallel ranks.
        """
        _, position_T = zigzag_positions(torch.tensor([padded_to]), cp_rank=cp_rank, cp_size=cp_size)
        first = total_length - response_length - 1
        logit_index_R = torch.nonzero((position_T >= first) & (position_T < total_length - 1)).squeeze(1)
        return cls(logit_index_R=logit_index_R, response_index_R=position_T[logit_index_R] - first)


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Input of ``GPTModel`` for a micro-batch on this rank, and the map from its logits to response tokens.

    Attributes:
        tokens: Token ids, ``[1, T]`` (thd) or ``[B, S]`` (bshd).
        positions: Positions in the whole sequence, same shape.
        packed_seq_params: Sequence boundaries, thd only.
        logit_index_R: Row of each local response token in the flattened logits. ``[R]``.
        target_R: Its token id. ``[R]``.
        response_indices: For each sample, the indices of its response tokens on this rank.
    """

    tokens: Tensor
    positions: Tensor
    packed_seq_params: PackedSeqParams | None
    logit_index_R: Tensor
    target_R: Tensor
    response_indices: list[Tensor]


def build_inputs(
    tokens: list[Tensor],
    response_lengths: list[int],
    *,
    max_seq_lens: list[int] | None,
    cp_rank: int,
    cp_size: int,
    device: torch.device,
) -> ModelInputs:
    """Lay out a micro-batch for one context-parallel rank.

    Args:
        tokens: Prompt and response of every sample, each ``[L]``.
        response_lengths: Tokens of each response.
        max_seq_lens: The common padded length, repeated per sample (bshd). None packs samples (thd).
        cp_rank: The rank.
        cp_size: Number of context-parallel ranks.
        device: Device of the model.
    """
    layout_lengths = [len(sample) for sample in tokens] if max_seq_lens is None else max_seq_lens
    chunks = owned_chunks(cp_rank=cp_rank, cp_size=cp_size)
    lengths = [chunks.padded(length) for length in layout_lengths]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    padded = torch.nn.functional.pad(padded, (0, max(lengths) - padded.size(1)))
    sequence_T, position_T = zigzag_positions(torch.tensor(lengths), cp_rank=cp_rank, cp_size=cp_size)

    parts, target, first_row = [], [], 0
    for sample, response_length, length in zip(tokens, response_lengths, lengths, strict=True):
        part = ResponsePart.build(
            total_length=len(sample),
            response_length=response_length,
            padded_to=length,
            cp_rank=cp_rank,
            cp_size=cp_size,
        )
        parts.append(replace(part, logit_index_R=part.logit_index_R + first_row))
        target.append(sample[len(sample) - response_length + part.response_index_R])
        first_row += length // cp_size

    shape = (1, -1) if max_seq_lens is None else (len(tokens), -1)
    return ModelInputs(
        tokens=padded[sequence_T, position_T].view(shape).to(device),
        positions=position_T.view(shape).to(device),
        packed_seq_params=_packed_seq_params(lengths, device=device) if max_seq_lens is None else None,
        logit_index_R=torch.cat([part.logit_index_R for part in parts]).to(device),
        target_R=torch.cat(target).to(device),
        response_indices=moved([part.response_index_R for part in parts], device),
    )


def _packed_seq_params(lengths: list[int], *, device: torch.device) -> PackedSeqParams:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
