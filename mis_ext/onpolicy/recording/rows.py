# SPDX-License-Identifier: Apache-2.0
"""Map rows of a tensor to tokens (sequence, absolute position), in any order of the dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.validation import check_tensors

Layout = Literal["bsh", "sbh"]
LAYOUTS: tuple[Layout, ...] = ("bsh", "sbh")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The tokens of one forward call, as a grid ``[b, s]``; packed tokens are a grid ``[1, T]``.

    Attributes:
        sequence: Integers of at least 0: the sequence of each token, equal in both engines. ``[b, s]``, or a shape that
            broadcasts with ``position``; one dimension means packed.
        position: Absolute positions in the sequence, from 0; below 0 marks padding, which is never recorded.
        kept: If the model computes logits only for some tokens: their indices into the flattened grid, ``[K]``, or
            ``[b, K]`` if the logits keep a batch dimension.

    Raises:
        ValueError: The shapes do not broadcast, a sequence is negative, a token occurs twice, or ``kept`` is outside
            the grid.
        TypeError: A tensor is not of integers.
    """

    sequence: Tensor
    position: Tensor
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        sequence, position = (_grid(name, getattr(self, name)) for name in ("sequence", "position"))
        try:
            shape = torch.broadcast_shapes(sequence.shape, position.shape)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ValueError(
                f"sequence {[*sequence.shape]} and position {[*position.shape]} must broadcast to one [b, s]"
            ) from error
        sequence, position = sequence.expand(shape), position.expand(shape)
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "position", position)
        sequence_N, position_N = sequence[position >= 0], position[position >= 0]
        if (sequence_N < 0).any():
            raise ValueError(f"sequence must be at least 0 where position is, got {int(sequence_N.min())}")
        stride = int(position_N.max()) + 1 if len(position_N) else 1
        key_N = (sequence_N * stride + position_N).sort().values
        twice = key_N[1:][key_N[1:] == key_N[:-1]]
        if len(twice):
            raise ValueError(f"(sequence, position) {divmod(int(twice[0]), stride)} occurs twice")
        if self.kept is not None:
            kept = _grid("kept", self.kept)
            if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < position.numel():
                raise ValueError(f"kept must be in [0, {position.numel() - 1}], got {kept.tolist()}")
            object.__setattr__(self, "kept", kept)

    @classmethod
    def padded(cls, mask: Tensor) -> Rows:
        """Rows of padded sequences 0, 1, 2, ..., each starting at position 0.

        Args:
            mask: ``[b, s]``, nonzero at tokens; the padding may be on either side.
        """
        check_tensors({"mask": mask})
        is_token = mask.bool()
        position = torch.where(is_token, is_token.long().cumsum(1) - 1, -1)
        return cls(sequence=torch.arange(len(mask))[:, None], position=position)

    @classmethod
    def packed(
        cls, lengths: Sequence[int], *, sequences: Sequence[int] | None = None, starts: Sequence[int] | None = None
    ) -> Rows:
        """Rows of concatenated sequences, or of pieces of them.

        Args:
            lengths: Tokens of each piece.
            sequences: The sequence of each piece; by default 0, 1, 2, ...
            starts: The position of each piece's first token; by default 0.
        """
        sequences = range(len(lengths)) if sequences is None else sequences
        starts = [0] * len(lengths) if starts is None else starts
        pieces = [*zip(sequences, starts, lengths, strict=True)]
        none = torch.empty(0, dtype=torch.long)
        return cls(
            sequence=torch.cat([none, *(torch.full((length,), sequence) for sequence, _, length in pieces)]),
            position=torch.cat([none, *(torch.arange(start, start + length) for _, start, length in pieces)]),
        )

    def grids(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every possible ``(sequence, position)`` grid of a tensor of this forward."""
        yield self.sequence, self.position
        if self.kept is not None:
            yield self.sequence.flatten()[self.kept], self.position.flatten()[self.kept]

    @cached_property
    def _readings(self) -> tuple[_Reading, ...]:
        """Every grid in every order. Computed once for all tensors of the forward."""
        readings: list[_Reading] = []
        for index, (sequence, position) in enumerate(self.grids()):
            by_row = _tokens(sequence, position)
            # With one sequence, or one token per sequence, the two orders are equal.
            by_column = by_row if 1 in position.shape else _tokens(sequence.T, position.T)
            readings.append(_Reading("bsh", position.shape, by_row, holds_all=index == 0))
            readings.append(_Reading("sbh", position.T.shape, by_column, holds_all=index == 0))
        return tuple(readings)


class PlacedRows(NamedTuple):
    """One tensor by token, on the CPU: an input or output of a module.

    Attributes:
        values: ``[N, ...]`` for N tokens, in the dtype of the model.
        sequence_N: int64.
        position_N: int64, absolute.
        order: Index of the tensor in the order of execution, among tensors of its kind.
    """

    values: Tensor
    sequence_N: Tensor
    position_N: Tensor
    order: int = 0


class _Tokens(NamedTuple):
    """The tokens of a flattened grid without its padding, sorted, and their indices in it."""

    sequence_N: Tensor
    position_N: Tensor
    index_N: Tensor

    def same(self, other: _Tokens) -> bool:
        return self is other or all(torch.equal(x, y) for x, y in zip(self, other, strict=True))


class _Reading(NamedTuple):
    layout: Layout
    shape: torch.Size
    tokens: _Tokens
    holds_all: bool


def place_rows(tensor: Tensor, rows: Rows, *, where: str, layout: Layout | None = None) -> PlacedRows | None:
    """The tensor's values by token, or None if its leading dimensions are not token dimensions.

    The layout may be ``[b, s, ...]``, ``[s, b, ...]``, or flattened in either order. Otherwise a tensor with ``b`` of
    1, such as a table of positions, applies to each sequence, if its layout is that of the forward. An integer tensor
    with only these two dimensions is treated as token ids, which every engine has as ``[b, s]``.
    """
    is_ids = tensor.dim() == 2 and not tensor.is_floating_point()
    lies_as, fits = _readings_of(tensor, rows, table_layout="bsh" if is_ids else layout)
    if not fits:
        return None
    if not all(reading.tokens.same(fits[0].tokens) for reading in fits):
        chosen = "bsh" if is_ids and lies_as != "flat" else layout
        fits = [reading for reading in fits if reading.layout == chosen]
    if not fits or not all(reading.tokens.same(fits[0].tokens) for reading in fits):
        grids = " or ".join(f"[b, s] = {[*position.shape]}" for _, position in rows.grids())
        raise ValueError(
            f"{where}: {[*tensor.shape]} can be read in more than one way with the tokens {grids}; pass layout "
            f"({' | '.join(LAYOUTS)}), another number of sequences, or exclude this module"
        )
    tokens, values = fits[0].tokens, tensor.detach()
    if lies_as == "table":
        values = values.expand(*fits[0].shape, *values.shape[2:])
    values = values.flatten(0, 0 if lies_as == "flat" else 1)
    # Indexing copies.
    values = values[tokens.index_N.to(values.device)].cpu()
    return PlacedRows(values, tokens.sequence_N, tokens.position_N)


def _readings_of(
    tensor: Tensor, rows: Rows, table_layout: Layout | None
) -> tuple[Literal["grid", "flat", "table"], list[_Reading]]:
    """All ways to read the tensor; flattened tokens only if no two dimensions fit, because many tensors start with 1.

    Tables of positions for each sequence come last, for the same reason. With as many sequences as tokens, a mask
    ``[b, 1, s, keys]`` has the shape of such a table ``[s, 1, ...]``.
    """
    num_sequences, num_tokens = rows.position.shape
    is_mask = num_sequences == num_tokens > 1 and tensor.dim() == 4 and tensor.shape[1:3] == (1, num_tokens)
    grids: list[_Reading] = []
    flat: list[_Reading] = []
    tables: list[_Reading] = []
    for reading in rows._readings:
        table_shape = (1, reading.shape[1]) if reading.layout == "bsh" else (reading.shape[0], 1)
        # Only logits are computed for kept tokens, [K, V] if they are flattened.
        may_be_flat = reading.holds_all or tensor.dim() <= 2
        may_be_table = reading.holds_all and table_layout in (None, reading.layout) and not is_mask
        if tensor.shape[:2] == reading.shape:
            grids.append(reading)
        elif may_be_flat and tensor.shape[:1] == (reading.shape.numel(),):
            flat.append(reading)
        elif may_be_table and tensor.shape[:2] == table_shape:
            tables.append(reading)
    if grids:
        return "grid", grids
    return ("flat", flat) if flat else ("table", tables)


def _tokens(sequence: Tensor, position: Tensor) -> _Tokens:
    sequence, position = sequence.flatten(), position.flatten()
    index_N = (position >= 0).nonzero()[:, 0]
    index_N = index_N[position[index_N].argsort(stable=True)]
    index_N = index_N[sequence[index_N].argsort(stable=True)]
    return _Tokens(sequence[index_N], position[index_N], index_N)


def _grid(name: str, tensor: Tensor) -> Tensor:
    check_tensors({name: tensor})
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
    if tensor.dim() not in (1, 2):
        raise ValueError(f"{name} must have one or two dimensions, got {[*tensor.shape]}")
    # A copy: engines reuse the buffers of their inputs.
    return (tensor if tensor.dim() == 2 else tensor[None]).to("cpu", torch.long, copy=True)
