"""Which token a row of a tensor belongs to: (sequence, absolute position), whatever the order of the dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["bsh", "sbh"]
LAYOUTS: tuple[Layout, ...] = ("bsh", "sbh")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The tokens that one forward call holds, as a grid ``[b, s]``; packed tokens are a grid ``[1, T]``.

    Attributes:
        sequence: Integers, at least 0: which sequence a token belongs to, equal in both engines. ``[b, s]``, or
            anything that broadcasts against ``position``; one dimension counts as packed.
        position: Absolute positions in the sequence, from 0; below 0 marks padding, which is never recorded.
        kept: Where the model computes its logits for some tokens only: their indices into the flattened grid, ``[K]``,
            or ``[b, K]`` where the logits keep a batch dimension.

    Raises:
        ValueError: The shapes do not broadcast, a sequence is negative, a token is there twice, or ``kept`` leaves the
            grid.
        TypeError: A tensor does not hold integers.
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
        tokens = torch.stack([sequence[position >= 0], position[position >= 0]])
        if (tokens < 0).any():
            raise ValueError(f"sequence must be at least 0 where position is, got {int(tokens.min())}")
        twice, count = torch.unique(tokens, dim=1, return_counts=True)
        if (count > 1).any():
            raise ValueError(f"(sequence, position) {tuple(twice[:, count > 1][:, 0].tolist())} is there twice")
        if self.kept is not None:
            kept = _grid("kept", self.kept)
            if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < position.numel():
                raise ValueError(f"kept must be in [0, {position.numel() - 1}], got {kept.tolist()}")
            object.__setattr__(self, "kept", kept)

    @classmethod
    def padded(cls, mask: Tensor, *, sequences: Sequence[int] | None = None) -> Rows:
        """Rows of padded sequences, each from its position 0 on.

        Args:
            mask: ``[b, s]``, nonzero at tokens; the padding may be on either side.
            sequences: The sequence of each batch row; by default 0, 1, 2, ...
        """
        is_token = mask.bool()
        sequence = torch.arange(len(mask)) if sequences is None else torch.tensor([*sequences])
        position = torch.where(is_token, is_token.long().cumsum(1) - 1, -1)
        return cls(sequence=sequence[:, None], position=position)

    @classmethod
    def packed(
        cls, lengths: Sequence[int], *, sequences: Sequence[int] | None = None, starts: Sequence[int] | None = None
    ) -> Rows:
        """Rows of sequences, or of pieces of them, laid end to end.

        Args:
            lengths: Tokens of each piece.
            sequences: The sequence of each piece; by default 0, 1, 2, ...
            starts: The position of each piece's first token; by default 0.
        """
        sequences = range(len(lengths)) if sequences is None else sequences
        starts = [0] * len(lengths) if starts is None else starts
        pieces = [*zip(sequences, starts, lengths, strict=True)]
        return cls(
            sequence=torch.tensor(
                [sequence for sequence, _, length in pieces for _ in range(length)], dtype=torch.long
            ),
            position=torch.tensor([start + i for _, start, length in pieces for i in range(length)], dtype=torch.long),
        )

    def grids(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every ``(sequence, position)`` grid that a tensor of this forward may hold."""
        yield self.sequence, self.position
        if self.kept is not None:
            yield self.sequence.flatten()[self.kept], self.position.flatten()[self.kept]


class PlacedRows(NamedTuple):
    """Values ``[N, ...]`` of N tokens, on the CPU, and which tokens they are."""

    values: Tensor
    sequence_N: Tensor
    position_N: Tensor


class _Fit(NamedTuple):
    layout: Layout
    dimensions: int
    sequence_N: Tensor
    position_N: Tensor

    def same_tokens(self, other: _Fit) -> bool:
        return torch.equal(self.sequence_N, other.sequence_N) and torch.equal(self.position_N, other.position_N)


def place_rows(
    tensor: Tensor, rows: Rows, *, where: str, layout: Layout | None = None, forced: Layout | None = None
) -> PlacedRows | None:
    """The tensor's values by token, or None where its leading dimensions are no token dimensions.

    Tokens may lie as ``[b, s, ...]``, ``[s, b, ...]``, or flattened in either order. An integer tensor of two
    dimensions is taken for token ids, which every engine has as ``[b, s]``.

    Args:
        tensor: Any tensor of the forward.
        rows: The tokens of the forward.
        where: What an error calls the tensor.
        layout: Decides where the shape fits both orders.
        forced: The only order to try.

    Raises:
        ValueError: The shape fits both orders and nothing decides; or it fits an order, but not the forced one.
    """
    every = _fits(tensor, rows)
    fits = [fit for fit in every if forced in (None, fit.layout)]
    if every and not fits:
        raise ValueError(f"{where}: {[*tensor.shape]} does not hold the tokens {_shapes(rows)} in layout {forced!r}")
    if not fits:
        return None
    if not all(fit.same_tokens(fits[0]) for fit in fits):
        is_ids = tensor.dim() == 2 and not tensor.is_floating_point()
        fits = [fit for fit in fits if fit.layout == ("bsh" if is_ids else layout)]
    if not fits or not all(fit.same_tokens(fits[0]) for fit in fits):
        raise ValueError(
            f"{where}: {[*tensor.shape]} can be read in more than one way with the tokens {_shapes(rows)}; "
            f"give layout, or layouts for this module ({' | '.join(LAYOUTS)})"
        )
    fit = fits[0]
    is_token = fit.position_N >= 0
    values = tensor.detach().flatten(0, fit.dimensions - 1)
    # Indexing copies.
    values = values[is_token.nonzero()[:, 0].to(values.device)].cpu()
    return PlacedRows(values, fit.sequence_N[is_token], fit.position_N[is_token])


def _fits(tensor: Tensor, rows: Rows) -> list[_Fit]:
    """All ways to read the tensor; flattened tokens only where no two dimensions fit, as many tensors start with 1."""
    grids: list[_Fit] = []
    flat: list[_Fit] = []
    for index, (sequence, position) in enumerate(rows.grids()):
        # Of the kept tokens only logits are computed, [K, V] where they are flattened.
        may_be_flat = index == 0 or tensor.dim() <= 2
        for layout in LAYOUTS:
            if layout == "sbh":
                sequence, position = sequence.T, position.T
            if tensor.shape[:2] == position.shape:
                grids.append(_Fit(layout, 2, sequence.flatten(), position.flatten()))
            elif may_be_flat and tensor.shape[:1] == (position.numel(),):
                flat.append(_Fit(layout, 1, sequence.flatten(), position.flatten()))
    return grids or flat


def _shapes(rows: Rows) -> str:
    return " or ".join(f"[b, s] = {[*position.shape]}" for _, position in rows.grids())


def _grid(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
    if tensor.dim() not in (1, 2):
        raise ValueError(f"{name} must have one or two dimensions, got {[*tensor.shape]}")
    # A copy: engines reuse the buffers of their inputs.
    return (tensor if tensor.dim() == 2 else tensor[None]).to("cpu", torch.long, copy=True)
