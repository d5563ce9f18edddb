# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of both passes: targets, sums over rows of logits, and coefficients of the gradient.

Also the interface of a backend, and the computation between the two passes, which all backends share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mis_ext.validation import check_instance, check_tensors

BITS = 32


class KeptColumns(NamedTuple):
    """Sampling support: the columns of the vocabulary from which each token was sampled.

    ``id_N``: the kept ids of all tokens, in any order. ``token_N``: the index of the token of each id, below ``T``.
    ``is_recorded_T``: False for a token without a record; then all columns are kept. A token is always among its own
    kept columns, with or without a record.
    """

    id_N: Tensor
    token_N: Tensor
    is_recorded_T: Tensor

    def bits(self, *, first: int, num_columns: int) -> Tensor:
        """``[T, ceil(num_columns / 32)]``, int32: one bit per column starting at id ``first``, lowest bit first."""
        tokens = slice(0, len(self.is_recorded_T))
        return self.sorted().bits(first=first, num_columns=num_columns, tokens=tokens)

    def sorted(self) -> SortedColumns:
        """Sort the ids to find duplicates, whose bits would carry over in sums."""
        key_N, _ = torch.sort(self.token_N.long() << BITS | self.id_N.long())
        is_new_N = torch.ones_like(key_N, dtype=torch.bool)
        is_new_N[1:] = key_N[1:] != key_N[:-1]
        return SortedColumns(key_N & ((1 << BITS) - 1), key_N >> BITS, is_new_N, self.is_recorded_T)


class SortedColumns(NamedTuple):
    """Kept columns sorted by token and id; ``is_new_N``: False for a duplicate id of the same token."""

    id_N: Tensor
    token_N: Tensor
    is_new_N: Tensor
    is_recorded_T: Tensor

    def bits(self, *, first: int, num_columns: int, tokens: slice) -> Tensor:
        """``[T, ceil(num_columns / 32)]``, int32: one bit per column starting at id ``first``, for these tokens."""
        num_words, num_tokens = -(-num_columns // BITS), tokens.stop - tokens.start
        column_N, token_N = self.id_N - first, self.token_N - tokens.start
        is_here_N = self.is_new_N & (column_N >= 0) & (column_N < num_columns)
        is_here_N = is_here_N & (token_N >= 0) & (token_N < num_tokens)
        bit_N = torch.where(is_here_N, 1 << (column_N % BITS), 0).int()
        word_N = torch.where(is_here_N, token_N * num_words + column_N // BITS, 0)
        bits_TC = torch.zeros(num_tokens * num_words, dtype=torch.int32, device=self.id_N.device)
        if num_tokens * num_words > 0:
            bits_TC.index_add_(0, word_N, bit_N)
        return torch.where(self.is_recorded_T[tokens].unsqueeze(-1), bits_TC.view(num_tokens, num_words), -1)


def unpacked(bits_TC: Tensor, num_columns: int) -> Tensor:
    """``[T, num_columns]``, bool: the columns whose bits are set."""
    bit_E = torch.arange(BITS, dtype=torch.int32, device=bits_TC.device)
    return (bits_TC.unsqueeze(-1) >> bit_E & 1).bool().flatten(1)[:, :num_columns]


class Targets(NamedTuple):
    """Selection of the logits.

    ``token_T``: ids in the whole vocabulary. ``row_T``: the row of each; None for every row in order. ``first``: the id
    of this rank's first column. ``num_columns``: the number of its columns without padding. ``bits_TC``: the kept
    columns, 32 per word; None for all.
    """

    token_T: Tensor
    row_T: Tensor | None
    first: int
    num_columns: int
    bits_TC: Tensor | None = None

    @classmethod
    def of_rank(
        cls, token_T: Tensor, row_T: Tensor | None, *, width: int, tp_rank: int, vocab_size: int | None
    ) -> Targets:
        """The targets of a tensor-parallel rank with ``width`` columns; ids starting at ``vocab_size`` are padding."""
        first = tp_rank * width
        num_columns = width if vocab_size is None else min(max(vocab_size - first, 0), width)
        return cls(token_T.contiguous(), None if row_T is None else row_T.contiguous(), first, num_columns)

    def token_of_rows(self, num_rows: int) -> Tensor:
        """``[N]``: the index of the token that each row scores, -1 for none.

        Raises:
            RuntimeError: A row scores two tokens; on a GPU an asynchronous device assertion.
        """
        token_T = torch.arange(len(self.token_T), device=self.token_T.device)
        if self.row_T is None:
            return token_T
        row_T = self.row_T.long()
        token_N = token_T.new_full((num_rows,), -1).scatter_(0, row_T, token_T)
        torch._assert_async(
            (token_N[row_T] == token_T).all(), "row_T has a row twice, and only one token's gradient fits"
        )
        return token_N


def check_targets(
    token_T: Tensor, row_T: Tensor | None, kept: KeptColumns | None, *, num_rows: int, rows: str, device: torch.device
) -> None:
    """Raise an error if tokens do not fit the rows, ``rows of logits`` or ``hidden states``, that score them."""
    check_tensors({"token_T": token_T} if row_T is None else {"token_T": token_T, "row_T": row_T})
    for name, values in (("token_T", token_T), ("row_T", row_T)):
        if values is not None and values.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} must be int64 or int32, got {values.dtype}")
        if values is not None and values.device != device:
            raise ValueError(f"{name} is on {values.device}, but the {rows} are on {device}")
    if row_T is None and token_T.shape != (num_rows,):
        raise ValueError(f"token_T has shape {list(token_T.shape)}, but there are {num_rows} {rows}")
    if row_T is not None and (token_T.ndim != 1 or row_T.shape != token_T.shape):
        raise ValueError(
            f"row_T has shape {list(row_T.shape)}, and token_T has {list(token_T.shape)}; both must be [T]"
        )
    if num_rows == 0 < len(token_T):
        raise ValueError(f"token_T has {len(token_T)} tokens, but there are no {rows}")
    if kept is not None:
        _check_kept(check_instance("kept", kept, KeptColumns), token_T)


def _check_kept(kept: KeptColumns, token_T: Tensor) -> None:
    check_tensors({f"kept.{name}": values for name, values in kept._asdict().items()})
    if kept.is_recorded_T.shape != token_T.shape:
        recorded = list(kept.is_recorded_T.shape)
        raise ValueError(
            f"kept.is_recorded_T has shape {recorded}, and token_T has {list(token_T.shape)}; both must be [T]"
        )
    if kept.is_recorded_T.dtype != torch.bool:
        raise TypeError(f"kept.is_recorded_T must be bool, got {kept.is_recorded_T.dtype}")
    if kept.id_N.ndim != 1 or kept.token_N.shape != kept.id_N.shape:
        shapes = f"{list(kept.id_N.shape)}, and kept.token_N has {list(kept.token_N.shape)}"
        raise ValueError(f"kept.id_N has shape {shapes}; both must be [N]")
    for name, values in (("id_N", kept.id_N), ("token_N", kept.token_N)):
        if values.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"kept.{name} must be int64 or int32, got {values.dtype}")


@contextmanager
def rows_named(num_rows: int, rows: str) -> Iterator[None]:
    """Name ``row_T`` in the index error of a CPU. A GPU raises an assertion instead."""
    try:
        yield
    except IndexError as error:
        raise ValueError(f"row_T must be below {num_rows}, the number of {rows} ({error})") from error


class RowSums(NamedTuple):
    """``[T]`` each: sums over the row of a token, over one rank's columns ``v``.

    In float64, so that results are rounded only once. With the inverse temperature ``s``: ``highest_T``: the largest
    logit ``m``, -inf without columns. ``total_T``: the sum of ``exp(s (x_v - m))``. ``target_T``: the token's own
    logit, -inf if it is on another rank. ``product_T``: the sum of ``exp(s (x_v - m)) (x_v - m)``. ``kept_highest_T``,
    ``kept_total_T``: the first two over the kept columns only.
    """

    highest_T: Tensor
    total_T: Tensor
    target_T: Tensor
    product_T: Tensor | None = None
    kept_highest_T: Tensor | None = None
    kept_total_T: Tensor | None = None

    @classmethod
    def of(cls, numbers: Tensor, *, with_product: bool, is_kept: bool) -> RowSums:
        """Create the sums from the ``[6, ...]`` values that a pass wrote."""
        highest, total, target, product, *kept = numbers.unbind()
        return cls(highest, total, target, product if with_product else None, *(kept if is_kept else (None, None)))


class Coefficients(NamedTuple):
    """``[T]`` each: normalization of the distribution of a token, its entropy, and the incoming gradients.

    The log of a probability is ``s (x - highest_T) - log_total_T`` over all columns, and the same with ``kept_...``
    over the kept columns. Both are equal if all are kept. A gradient that is None is 0.
    """

    highest_T: Tensor
    log_total_T: Tensor
    kept_highest_T: Tensor
    kept_log_total_T: Tensor
    entropy_T: Tensor | None
    log_prob_grad_T: Tensor | None = None
    entropy_grad_T: Tensor | None = None

    def of_tokens(self, token_T: Tensor | slice) -> Coefficients:
        """The coefficients of some tokens."""
        return Coefficients(*(None if x_T is None else x_T[token_T] for x_T in self))  # type: ignore[arg-type]

    def is_wanted(self) -> Tensor:
        """``[T]``, bool: an incoming gradient is not 0. At least one gradient must be given."""
        first_T, *more = (grad_T != 0.0 for grad_T in self[-2:] if grad_T is not None)
        return first_T | more[0] if more else first_T


def finish(parts: RowSums, *, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Coefficients]:
    """``[T]``: log-probs and their normalization, from the sums ``[W, T]`` of all tensor-parallel ranks or tiles.

    The computation is in float64 and rounds once. The entropy is None without products.
    """
    sums = merged(parts, temperature=temperature)
    log_total_T, entropy_T = sums.total_T.log(), None
    kept_highest_T, kept_log_total_T = sums.highest_T, log_total_T
    if sums.kept_highest_T is not None and sums.kept_total_T is not None:
        kept_highest_T, kept_log_total_T = sums.kept_highest_T, sums.kept_total_T.log()
    log_prob_T = (sums.target_T - kept_highest_T) / temperature - kept_log_total_T
    if sums.product_T is not None:
        entropy_T = (log_total_T - sums.product_T / temperature / sums.total_T).to(dtype)
    numbers = (sums.highest_T, log_total_T, kept_highest_T, kept_log_total_T)
    highest_T, log_total_T, kept_highest_T, kept_log_total_T = (x_T.to(dtype) for x_T in numbers)
    return log_prob_T.to(dtype), Coefficients(highest_T, log_total_T, kept_highest_T, kept_log_total_T, entropy_T)


def merged(parts: RowSums, *, temperature: float) -> RowSums:
    """``[T]`` each: the sums over a row, from those ``[W, T]`` over ``W`` parts of its columns."""
    if len(parts.highest_T) == 1:
        return RowSums(*(None if x_T is None else x_T[0] for x_T in parts))  # type: ignore[arg-type]
    highest_T, shift_WT, share_WT = _shares(parts.highest_T, temperature)
    product_T = kept_highest_T = kept_total_T = None
    if parts.product_T is not None:
        # A part without a finite logit adds nothing; this avoids 0 times infinity.
        moved_WT = (parts.product_T + parts.total_T * shift_WT) * share_WT
        product_T = torch.where(share_WT > 0.0, moved_WT, 0.0).sum(0)
    if parts.kept_highest_T is not None and parts.kept_total_T is not None:
        kept_highest_T, _, kept_share_WT = _shares(parts.kept_highest_T, temperature)
        kept_total_T = (parts.kept_total_T * kept_share_WT).sum(0)
    total_T = (parts.total_T * share_WT).sum(0)
    return RowSums(highest_T, total_T, parts.target_T.amax(0), product_T, kept_highest_T, kept_total_T)


def _shares(highest_WT: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The highest logit of all parts, each part's own relative to it, and the resulting factor of its sums."""
    highest_T = highest_WT.amax(0)
    # Without a finite logit in any part there is no reference.
    shift_WT = highest_WT - torch.where(highest_T == -torch.inf, 0.0, highest_T)
    return highest_T, shift_WT, (shift_WT / temperature).exp()


class Backend(Protocol):
    """Two passes over logits ``[N, V]`` with contiguous columns: a module with these functions."""

    def row_sums(self, logits_NV: Tensor, targets: Targets, out: Tensor, *, scale: float, with_product: bool) -> None:
        """Read the rows of the tokens once and write the required :class:`RowSums` into ``out`` ``[6, T]``."""

    def gradient(
        self, logits_NV: Tensor, targets: Targets, coefficients: Coefficients, out_NV: Tensor, *, scale: float
    ) -> None:
        """Write every row of the gradient of the logits; ``out_NV`` may be the logits."""
