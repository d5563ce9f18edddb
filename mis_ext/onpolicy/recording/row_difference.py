"""Two recordings of one tensor: which of their common rows differ in any bit, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.onpolicy.bits import FLOAT_DTYPES, as_real, same_bits, ulp_distance
from mis_ext.onpolicy.recording.recordings import Entry

# Elements compared at a time, each of which takes some 50 bytes meanwhile.
_CHUNK = 2**20


class Row(NamedTuple):
    """A token: its sequence and its absolute position."""

    sequence: int
    position: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDifference:
    """Bitwise comparison of the rows that two entries have in common.

    Attributes:
        sequence_N: The common rows, sorted by sequence, then position.
        position_N: Likewise.
        differs_N: Where any bit differs.
        num_only_a: Rows without a counterpart.
        num_only_b: Likewise.
        max_abs: Largest absolute difference; NaN where a number stands against a NaN.
        max_ulp: Largest distance in units in the last place, NaNs left aside; 0 for integers and 8-bit floats.
        num_nan: Elements that are NaN on either side; the parts of a complex number are elements.
    """

    sequence_N: Tensor
    position_N: Tensor
    differs_N: Tensor
    num_only_a: int
    num_only_b: int
    max_abs: float
    max_ulp: int
    num_nan: int


def row_difference(a: Entry, b: Entry) -> RowDifference:
    """Compare common rows bit for bit; rows of different shape but equal size are compared flat.

    Different dtypes are compared after a conversion to one that holds both exactly; for integers against floating
    point it is float64, which holds integers up to 2**53.

    Raises:
        ValueError: The rows differ in size.
    """
    if row_size(a) != row_size(b):
        raise ValueError(f"rows of {row_size(a)} and {row_size(b)} elements cannot be compared")
    index_a, index_b = _common(a, b)
    size = max(1, _CHUNK // max(1, row_size(a)))
    chunks = [
        _compare(a.values[chunk_a], b.values[chunk_b])
        for chunk_a, chunk_b in zip(torch.split(index_a, size), torch.split(index_b, size), strict=True)
    ]
    return RowDifference(
        sequence_N=a.sequence_N[index_a],
        position_N=a.position_N[index_a],
        differs_N=torch.cat([chunk.differs_N for chunk in chunks]),
        num_only_a=len(a.values) - len(index_a),
        num_only_b=len(b.values) - len(index_b),
        # Of a tensor, unlike the built-in one, it keeps NaN.
        max_abs=torch.tensor([chunk.max_abs for chunk in chunks], dtype=torch.float64).max().item(),
        max_ulp=max(chunk.max_ulp for chunk in chunks),
        num_nan=sum(chunk.num_nan for chunk in chunks),
    )


def row_size(entry: Entry) -> int:
    """How many elements a token has in this tensor."""
    return entry.values.shape[1:].numel()


class _Chunk(NamedTuple):
    differs_N: Tensor
    max_abs: float
    max_ulp: int
    num_nan: int


def _compare(rows_a: Tensor, rows_b: Tensor) -> _Chunk:
    dtype = _common_dtype(rows_a.dtype, rows_b.dtype)
    # Parts of complex numbers last; sizes written out: -1 is ambiguous without rows.
    rows_a, rows_b = (as_real(rows.to(dtype)) for rows in (rows_a, rows_b))
    rows_a, rows_b = (rows.reshape(len(rows), rows.shape[1:].numel()) for rows in (rows_a, rows_b))
    differs_NE = ~same_bits(rows_a, rows_b)
    element_a, element_b = rows_a[differs_NE], rows_b[differs_NE]
    is_nan = element_a.isnan() | element_b.isnan()
    has_ulp = rows_a.dtype in FLOAT_DTYPES
    return _Chunk(
        differs_N=differs_NE.any(1),
        max_abs=_largest((element_a.double() - element_b.double()).abs()),
        max_ulp=int(_largest(ulp_distance(element_a, element_b)[~is_nan])) if has_ulp else 0,
        num_nan=int((rows_a.isnan() | rows_b.isnan()).sum()),
    )


def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    if a == b:
        return a
    if a in FLOAT_DTYPES and b in FLOAT_DTYPES:
        return torch.promote_types(a, b)
    if a.is_complex or b.is_complex:
        return torch.complex128
    return torch.float64 if a.is_floating_point or b.is_floating_point else torch.int64


def _common(a: Entry, b: Entry) -> tuple[Tensor, Tensor]:
    """Indices of the rows that both have; both are sorted and without repetitions."""
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
