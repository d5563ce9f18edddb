# SPDX-License-Identifier: Apache-2.0
"""Differences of two recordings of one module: rows that differ in any bit, the size of differences, and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.onpolicy.bits import FLOAT_DTYPES, as_real, same_bits, ulp_distance
from mis_ext.onpolicy.recording.rows import PlacedRows

# Elements compared at a time; each needs about 50 bytes.
_CHUNK = 2**20


class Row(NamedTuple):
    """A token: its sequence and its absolute position."""

    sequence: int
    position: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDifference:
    """Bitwise comparison of the common rows of two entries.

    Attributes:
        sequence_N: The common rows, sorted by sequence, then position.
        position_N: Likewise.
        differs_N: bool, whether any bit differs.
        num_only_a: Number of rows without a counterpart.
        num_only_b: Likewise.
        max_abs: Largest absolute difference; NaN if only one side is NaN.
        max_ulp: Largest distance in units in the last place, without NaNs; 0 for integers and 8-bit floats.
        num_nan: Elements that are NaN on either side; real and imaginary parts count separately.
    """

    sequence_N: Tensor
    position_N: Tensor
    differs_N: Tensor
    num_only_a: int
    num_only_b: int
    max_abs: float
    max_ulp: int
    num_nan: int


def row_difference(a: PlacedRows, b: PlacedRows) -> RowDifference:
    """Compare common rows bitwise after flattening; their shapes may differ if the size is equal.

    Different dtypes are converted to one that represents both exactly. For integers and floating point it is float64,
    which represents integers up to 2**53.
    """
    index_a, index_b = _common(a, b)
    size = max(1, _CHUNK // max(1, row_size(a)))
    chunks = zip(torch.split(index_a, size), torch.split(index_b, size), strict=True)
    differs, max_abs, max_ulp, num_nan = zip(*(_compare_rows(a.values[i], b.values[j]) for i, j in chunks), strict=True)
    return RowDifference(
        sequence_N=a.sequence_N[index_a],
        position_N=a.position_N[index_a],
        differs_N=torch.cat(differs),
        num_only_a=len(a.values) - len(index_a),
        num_only_b=len(b.values) - len(index_b),
        # Unlike the built-in max, the tensor's max keeps NaN.
        max_abs=torch.tensor(max_abs, dtype=torch.float64).max().item(),
        max_ulp=max(max_ulp),
        num_nan=sum(num_nan),
    )


def row_size(entry: PlacedRows) -> int:
    """Number of elements per token in this tensor."""
    return entry.values.shape[1:].numel()


def _compare_rows(rows_a: Tensor, rows_b: Tensor) -> tuple[Tensor, float, int, int]:
    """Return the rows that differ, the largest difference, also in ULPs, and the number of NaN elements."""
    dtype = _common_dtype(rows_a.dtype, rows_b.dtype)
    # Real and imaginary parts come last. Sizes are explicit, because -1 is ambiguous without rows.
    rows_a, rows_b = (as_real(rows.to(dtype)) for rows in (rows_a, rows_b))
    rows_a, rows_b = (rows.reshape(len(rows), rows.shape[1:].numel()) for rows in (rows_a, rows_b))
    differs_NE = ~same_bits(rows_a, rows_b)
    element_a, element_b = rows_a[differs_NE], rows_b[differs_NE]
    is_nan = element_a.isnan() | element_b.isnan()
    max_abs = _largest((element_a.double() - element_b.double()).abs())
    has_ulp = rows_a.dtype in FLOAT_DTYPES
    max_ulp = int(_largest(ulp_distance(element_a, element_b)[~is_nan])) if has_ulp else 0
    return differs_NE.any(1), max_abs, max_ulp, int((rows_a.isnan() | rows_b.isnan()).sum())


def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    if a == b:
        return a
    if a in FLOAT_DTYPES and b in FLOAT_DTYPES:
        return torch.promote_types(a, b)
    if a.is_complex or b.is_complex:
        return torch.complex128
    return torch.float64 if a.is_floating_point or b.is_floating_point else torch.int64


def _common(a: PlacedRows, b: PlacedRows) -> tuple[Tensor, Tensor]:
    """Indices of the common rows; both inputs are sorted and unique."""
    if not len(a.values) or not len(b.values):
        none = torch.empty(0, dtype=torch.long)
        return none, none
    stride = 1 + torch.cat([a.position_N, b.position_N]).max()
    key_a, key_b = (entry.sequence_N * stride + entry.position_N for entry in (a, b))
    index_b = torch.searchsorted(key_b, key_a).clamp_max(len(key_b) - 1)
    index_a = (key_b[index_b] == key_a).nonzero()[:, 0]
    return index_a, index_b[index_a]


def _largest(values: Tensor) -> float:
    return values.max().item() if len(values) else 0


class InputDifference:
    """Bitwise comparison of the per-token inputs of one pair of modules.

    Inputs are paired by label. For inputs without a counterpart, the first is paired with the first, because parameter
    names differ between engines, and an input with a number as label (a positional argument without a name) with the
    next one. In both cases the row sizes must be equal.
    """

    def __init__(self, a: Mapping[str, PlacedRows], b: Mapping[str, PlacedRows], *, any_dtype: bool) -> None:
        pairs = _paired(a, b)
        self.compared, others = tuple(label for label, _ in pairs), {label for _, label in pairs}
        self.unpaired = (*(x for x in a if x not in self.compared), *(x for x in b if x not in others))
        self._compared = [_compare_inputs(a[x], b[y], any_dtype=any_dtype) for x, y in pairs]
        self.differ = any(bool(compared.values.any()) for compared in self._compared)

    def up_to(self, sequence_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Whether all inputs have each of N rows, and whether they differ in its sequence up to (and in) the row."""
        is_there_N = torch.full_like(position_N, bool(self.compared), dtype=torch.bool)
        differs_N = torch.zeros_like(is_there_N)
        for compared in self._compared:
            stride = 1 + int(torch.cat([compared.position_N, position_N, position_N.new_zeros(1)]).max())
            key_N, asked_N = (x * stride + y for x, y in (compared[1:3], (sequence_N, position_N)))
            first_N, index_N, stop_N = (
                torch.searchsorted(key_N, sequence_N * stride),
                torch.searchsorted(key_N, asked_N),
                torch.searchsorted(key_N, asked_N, right=True),
            )
            num_different = torch.cat([position_N.new_zeros(1), compared.values.cumsum(0)])
            is_there_N &= index_N < stop_N
            differs_N |= num_different[stop_N] > num_different[first_N]
        return is_there_N, differs_N


def _compare_inputs(a: PlacedRows, b: PlacedRows, *, any_dtype: bool) -> PlacedRows:
    """The common rows of one pair of inputs; ``values``: whether they differ."""
    if row_size(a) != row_size(b):
        return a._replace(values=torch.ones(len(a.values), dtype=torch.bool))
    found = row_difference(a, b)
    dtypes = {entry.values.dtype for entry in (a, b)}
    is_other_float = len(dtypes) > 1 and any(dtype.is_floating_point for dtype in dtypes)
    differs_N = found.differs_N | (is_other_float and not any_dtype)
    return PlacedRows(differs_N, found.sequence_N, found.position_N)


def _paired(a: Mapping[str, PlacedRows], b: Mapping[str, PlacedRows]) -> list[tuple[str, str]]:
    pairs = [(label, label) for label in a if label in b]
    rest = [label for label in b if label not in a]
    for label in (label for label in a if label not in b):
        for other in rest:
            are_first = (label, other) == (next(iter(a)), next(iter(b)))
            if (are_first or _is_number(label) or _is_number(other)) and row_size(a[label]) == row_size(b[other]):
                pairs.append((label, other))
                rest.remove(other)
                break
    return pairs


def _is_number(label: str) -> bool:
    return label.partition(".")[0].isdigit()
