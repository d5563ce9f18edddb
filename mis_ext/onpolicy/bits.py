# SPDX-License-Identifier: Apache-2.0
"""Floating-point numbers as bits: equality without tolerance, and distance in units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_OF: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
FLOAT_DTYPES = tuple(_INTEGER_OF)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, bool: the same bit pattern. A NaN equals itself, +0 and -0 differ."""
    _check_pair(a, b)
    if a.is_complex():
        return same_bits(as_real(a), as_real(b)).all(-1)
    if not a.is_floating_point():
        return a == b
    # Every other floating-point dtype has a byte.
    integer = _INTEGER_OF.get(a.dtype, torch.uint8)
    return a.contiguous().view(integer) == b.contiguous().view(integer)


def as_real(x: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, ``[..., 2]``; any other tensor unchanged."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, int64: the number of representable values between ``a`` and ``b``, plus one; 0 if equal.

    +0 and -0 are equal here. The distance to a NaN is meaningless, but not an error. A distance of float64 values
    beyond int64 is the largest int64.
    """
    _check_pair(a, b)
    if a.dtype not in _INTEGER_OF:
        raise TypeError(f"a distance in ULPs needs a floating-point dtype, got {a.dtype}")
    low, high = _ordinal(a), _ordinal(b)
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    distance = high - low
    return torch.where(distance < 0, torch.iinfo(torch.int64).max, distance)


def _ordinal(x: Tensor) -> Tensor:
    """Integers in the order of the floats: neighbors differ by one, and both zeros are 0."""
    integer = _INTEGER_OF[x.dtype]
    bits = x.contiguous().view(integer).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)


def _check_pair(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise TypeError(f"cannot compare bits of {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"cannot compare bits of shapes {[*a.shape]} and {[*b.shape]}")
