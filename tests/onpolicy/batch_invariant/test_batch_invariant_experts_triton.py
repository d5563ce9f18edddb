# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under a mixture of experts: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from batch_invariant_support import assert_same_bits
from torch import Tensor
from triton_support import (
    DEVICE,
    HAS_GPU,
    MARKS,
    each_dtype,
    each_dtype_of_a_gpu,
    random,
    rows_of_a_dot_do_not_meet,  # noqa: F401
)

from mis_ext.onpolicy.batch_invariant import cpu
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing

pytest.importorskip("triton")
products = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_products")
attention = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_attention")

pytestmark = MARKS
K, N = (520, 1000) if HAS_GPU else (34, 66)
# No rows, one row more than a tile, a whole tile.
SIZES = [[0, 3, 129, 0, 1], [128], [0, 0]] + ([[700, 0, 1, 3000] * 16] if HAS_GPU else [])


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=DEVICE)


@each_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_of_a_group_have_the_bits_of_their_own_product(sizes, dtype) -> None:
    rows = sum(sizes)
    a = random(rows + 4, K, dtype=dtype)
    b = random(len(sizes), N, K, dtype=dtype, seed=1).transpose(1, 2)
    b = b.contiguous() if len(sizes) % 2 else b
    a[rows:] = float("nan")
    output = products.grouped_rows(a, b, ends_of(sizes))
    assert_same_bits(output[rows:], torch.zeros_like(output[rows:]))
    expected = [products.mm(x, y) for x, y in zip(a[:rows].split(sizes), b, strict=True)]
    assert_same_bits(output[:rows], torch.cat(expected))


@each_dtype_of_a_gpu
def test_a_row_has_its_bits_in_a_group_of_any_size(dtype) -> None:
    a, b = random(131, K, dtype=dtype), random(2, K, N, dtype=dtype, seed=1)
    whole = products.grouped_rows(a, b, ends_of([2, 129]))
    alone = torch.cat([a[:1], a[130:]])
    assert_same_bits(products.grouped_rows(alone, b, ends_of([1, 1])), whole[[0, 130]])
    order = torch.randperm(129, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 2
    assert_same_bits(products.grouped_rows(torch.cat([a[:2], a[order]]), b, ends_of([2, 129]))[2:], whole[order])
    broken = a.clone()
    broken[:2], broken[3::2] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(products.grouped_rows(broken, b, ends_of([2, 129]))[2::2], whole[2::2])


def test_groups_of_nothing_are_empty_or_zeros() -> None:
    assert products.grouped_rows(random(0, 3), random(2, 3, 5), ends_of([0, 0])).shape == (0, 5)
    assert products.grouped_rows(random(4, 3), random(2, 3, 0), ends_of([1, 3])).shape == (4, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_ends_beyond_the_rows_read_nothing_that_is_not_there() -> None:
    a, b = random(100, K), random(2, K, N, seed=1)
    assert_same_bits(products.grouped_rows(a, b, ends_of([60, 9_000])), products.grouped_rows(a, b, ends_of([60, 40])))


@each_dtype
@pytest.mark.parametrize("columns", [1, 40, 600])
def test_rows_of_one_destination_are_added_in_their_order(columns, dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = 5_000 if HAS_GPU else 300 // columns + 9
    index = torch.randint(0, max(rows // 3, 2), (rows,), generator=generator)
    out, source = random(rows, columns, dtype=dtype), random(columns, rows, dtype=dtype, seed=1).t()
    out[1] = -0.0
    source[index == 1] = -0.0
    total = out.float().cpu().clone()
    for row, values in zip(index.tolist(), source.float().cpu(), strict=True):
        total[row] += values
    products.add_rows_(out, index.to(DEVICE), source)
    assert_same_bits(out.cpu(), total.to(dtype))


def test_adding_nothing_changes_nothing() -> None:
    out = random(4, 3)
    before = out.clone()
    products.add_rows_(out, torch.zeros(0, dtype=torch.long, device=DEVICE), random(0, 3))
    assert_same_bits(out, before)


@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (16, 16)])
def test_values_may_be_narrower_or_wider_than_keys(widths) -> None:
    key_width, value_width = widths
    query, key, value = (
        random(9, heads, width, seed=i)
        for i, (heads, width) in enumerate([(2, key_width), (1, key_width), (1, value_width)])
    )
    bounds = torch.tensor([0, 2, 9], dtype=torch.int32, device=DEVICE)
    packing = Packing(bounds, bounds, 7, 7, scale=0.3, is_causal=True)
    output = attention.attention_forward(query, key, value, packing)
    on_cpu = [x.cpu() for x in (query, key, value)]
    packing_on_cpu = packing._replace(cu_seqlens_q=bounds.cpu(), cu_seqlens_k=bounds.cpu())
    expected = cpu.attention_forward(*on_cpu, packing_on_cpu)
    assert output.is_contiguous()
    torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=1e-5)
    two = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    first = attention.attention_forward(query[:2], key[:2], value[:2], Packing(two, two, 2, 2, 0.3, True))
    assert_same_bits(first, output[:2])
