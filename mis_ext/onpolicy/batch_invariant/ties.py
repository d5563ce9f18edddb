"""Equal numbers are ordered by their place in the row: the first comes first, in any batch and on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def sort(
    func: Any, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = True
) -> tuple[Tensor, Tensor]:
    """Stands in for ``aten.sort``: always stable, so the first of equal values comes first."""
    return x.sort(dim=dim, descending=descending, stable=True)


def topk(
    func: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """``aten.topk``, always sorted: of equal numbers at the border, those with the lowest places are taken.

    A row with equal numbers is one in which torch may choose by the other rows, and two engines differently.
    """
    if x.dim() == 0:
        return func(x, k, dim, largest, sorted)  # type: ignore[no-any-return]
    if not 0 <= k <= x.shape[dim]:
        raise RuntimeError(f"topk takes k in [0, {x.shape[dim]}], got {k}")
    ordered, places = x.sort(dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


OVERRIDES: dict[Any, Callable[..., Any]] = {aten.topk.default: topk, aten.sort.default: sort, aten.sort.stable: sort}
