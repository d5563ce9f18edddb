# SPDX-License-Identifier: Apache-2.0
"""Inputs of the tests of the batch-invariant mode, and their references."""

import math

import pytest
import torch

from mis_ext.onpolicy.bits import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])


def equal_bits(a, b):
    return bool(same_bits(a, b).all())


def assert_same_bits(actual, expected):
    same = same_bits(actual, expected)
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ, first at {(~same).nonzero()[0].tolist()}"


def randn(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def tolerance(dtype, terms):
    """Tolerance relative to the largest number: 16-bit numbers are rounded once or twice, from sums in float32."""
    is_narrow = torch.finfo(dtype).bits == 16
    return torch.finfo(dtype).eps * (2 if is_narrow else 4 * math.sqrt(terms))


def packed(lengths_q, lengths_k, *, heads=4, groups=2, dim=16, dtype=torch.float32):
    query = randn(sum(lengths_q), heads, dim, dtype=dtype)
    key, value = (randn(sum(lengths_k), groups, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    bounds = {
        "cu_seqlens_q": torch.tensor([0, *lengths_q]).cumsum(0).int(),
        "cu_seqlens_k": torch.tensor([0, *lengths_k]).cumsum(0).int(),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return query, key, value, bounds


def exact_attention(query, key, value, *, offset, mask=None):
    """Attention of one sequence, in float64; ``offset`` keys come before the first query."""
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], dim=0) for x in (key, value))
    seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril(offset)
    if mask is not None:
        seen = seen & mask
    scores = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(0, 1)
