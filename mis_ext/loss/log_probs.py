"""Log-probs and entropy of response tokens from logits whose vocabulary may be split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mis_ext.correction.collectives import Group, gather_rows
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.token_index import runs, to_device
from mis_ext.correction.zigzag import owned_chunks


class Places(NamedTuple):
    """``[T]`` each: which local row of logits scores a response token, and which of all tokens it is."""

    row_T: Tensor
    token_T: Tensor


def response_places(
    layout: PackedLayout,
    *,
    total_lengths: Sequence[int],
    padded_lengths: Sequence[int] | None,
    cp_rank: int,
    cp_size: int,
) -> Places:
    """Where the local response tokens of a zigzag or whole layout stand.

    Args:
        layout: The local tokens.
        total_lengths: Tokens per prompt and response; the rows of a sample without padding.
        padded_lengths: Rows per sample of ``[B, L, V]`` logits; None for packed ones.
        cp_rank: This rank within the context-parallel group.
        cp_size: Ranks in the context-parallel group.
    """
    chunks = owned_chunks(cp_rank=cp_rank, cp_size=cp_size)
    rows: list[int] = []
    tokens: list[int] = []
    row = token = whole = 0
    pieces = iter(zip(layout.pieces.lengths, layout.pieces.whole_starts, strict=True))
    for index, (response, total) in enumerate(zip(layout.response_lengths, total_lengths, strict=True)):
        length = total if padded_lengths is None else padded_lengths[index]
        chunk = chunks.padded(length) // chunks.num_chunks
        for place, number in enumerate(chunks.owned):
            _, whole_start = next(pieces)
            position = total - response + whole_start - whole
            # The logits of the token before it, counted from where this chunk begins among the local rows.
            rows.append(row + place * chunk + position - 1 - number * chunk)
            tokens.append(token + position)
        row, token, whole = row + len(chunks.owned) * chunk, token + total, whole + response
    row_P, token_P, length_P = torch.tensor([rows, tokens, layout.pieces.lengths], dtype=torch.int64)
    return Places(to_device(runs(row_P, length_P), layout.device), to_device(runs(token_P, length_P), layout.device))


def score_tokens(
    logits_TV: Tensor, token_T: Tensor, *, tp_group: Group | None = None, tp_rank: int = 0, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``[T]`` each, nats: log-probs of the tokens, and the entropy of the distributions; both carry gradient.

    One all-gather of four numbers per token; the same bits on every rank.

    Args:
        logits_TV: ``[T, V]``, on each tensor-parallel rank its equal part of the vocabulary, in rank order.
        token_T: ``[T]``, ids in the whole vocabulary.
        tp_group: The tensor-parallel ranks; None for one.
        tp_rank: This rank among them.
        with_entropy: Whether the entropy is wanted.
    """
    log_prob_T, entropy_T = _VocabularyParallel.apply(logits_TV, token_T, tp_group, tp_rank)  # type: ignore[no-untyped-call]
    return log_prob_T, entropy_T if with_entropy else None


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, token_T: Tensor, tp_group: Group | None, tp_rank: int
    ) -> tuple[Tensor, Tensor]:
        highest_T = logits_TV.amax(-1)
        shifted_TV = logits_TV - highest_T.unsqueeze(-1)
        size = logits_TV.shape[-1]
        place_T = token_T - tp_rank * size
        is_mine_T = (place_T >= 0) & (place_T < size)
        place_T = torch.where(is_mine_T, place_T, 0).unsqueeze(-1)
        chosen_T = torch.where(is_mine_T, shifted_TV.gather(-1, place_T).squeeze(-1), -torch.inf)
        exp_TV = shifted_TV.exp_()
        # The entropy of what is not normalised: 0 log 0 is 0, also where a logit is -inf.
        parts = torch.stack([highest_T, chosen_T, exp_TV.sum(-1), -torch.special.entr(exp_TV).sum(-1)])
        highest_WT, chosen_WT, sum_WT, product_WT = gather_rows(parts, tp_group).unbind(1)
        shift_WT = highest_WT - highest_WT.amax(0)
        scale_WT = shift_WT.exp()
        total_T = (sum_WT * scale_WT).sum(0)
        mean_T = ((product_WT + sum_WT * shift_WT) * scale_WT).sum(0) / total_T
        probability_TV = exp_TV.mul_(((highest_T - highest_WT.amax(0)).exp() / total_T).unsqueeze(-1))
        log_total_T = total_T.log()
        entropy_T = log_total_T - mean_T
        ctx.save_for_backward(probability_TV, entropy_T, place_T, is_mine_T)
        ctx.set_materialize_grads(False)
        return (chosen_WT + shift_WT).amax(0) - log_total_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor | None, entropy_grad_T: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        probability_TV, entropy_T, place_T, is_mine_T = ctx.saved_tensors
        found_TV: Tensor | None = None
        if grad_T is not None:
            found_TV = probability_TV * -grad_T.unsqueeze(-1)
            chosen_T = found_TV.gather(-1, place_T) + torch.where(is_mine_T, grad_T, 0.0).unsqueeze(-1)
            # Not scatter_add_, which deterministic mode forbids on a GPU.
            found_TV.scatter_(-1, place_T, chosen_T)
        if entropy_grad_T is not None:
            of_entropy_TV = torch.special.entr(probability_TV) - probability_TV * entropy_T.unsqueeze(-1)
            of_entropy_TV.mul_(entropy_grad_T.unsqueeze(-1))
            found_TV = of_entropy_TV if found_TV is None else found_TV.add_(of_entropy_TV)
        return found_TV, None, None, None
