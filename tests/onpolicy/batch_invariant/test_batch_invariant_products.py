# SPDX-License-Identifier: Apache-2.0
"""Products and norms of the batch-invariant mode: a row has the same bits in any batch, and is right."""

import math

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import DTYPES, equal_bits, exact_attention, packed, randn, tolerance
from hypothesis import given
from hypothesis import strategies as st
from searching import searching

from mis_ext.onpolicy.batch_invariant import attention, batch_invariant_mode, rms_norm

PRODUCTS = {
    "linear": lambda x, w, bias: F.linear(x, w, bias),
    "linear without bias": lambda x, w, bias: F.linear(x, w),
    "matmul of a batch of sequences": lambda x, w, bias: (x.unsqueeze(1) @ w.t()).squeeze(1),
    "a long sum": lambda x, w, bias: F.linear(x.repeat(1, 12), w.repeat(1, 12)),
    "einsum": lambda x, w, bias: torch.einsum("tk,nk->tn", x, w),
    "addmm with factors": lambda x, w, bias: torch.addmm(bias, x, w.t(), beta=0.5, alpha=2.0),
    "baddbmm": lambda x, w, bias: torch.baddbmm(bias.expand(1, 1, -1), x.unsqueeze(0), w.t().unsqueeze(0)).squeeze(0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_has_the_same_bits_in_any_batch_and_is_right(name, dtype):
    product = PRODUCTS[name]
    x, w, bias = randn(37, 100, dtype=dtype), randn(70, 100, dtype=dtype, seed=1), randn(70, dtype=dtype, seed=2)
    with batch_invariant_mode():
        together = product(x, w, bias)
        for size in (1, 2, 3, 16, 17):
            assert equal_bits(torch.cat([product(part, w, bias) for part in x.split(size)]), together)
        order = torch.randperm(37, generator=torch.Generator().manual_seed(3))
        assert equal_bits(product(x[order], w, bias), together[order])
        beside_nan = torch.cat([x, torch.full_like(x, math.nan)])
        assert equal_bits(product(beside_nan, w, bias)[:37], together)
    exact = product(x.double(), w.double(), bias.double())
    assert (together.double() - exact).abs().max() <= tolerance(dtype, 100) * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_rounded_once_at_the_end(dtype):
    x, w = randn(20, 1200, dtype=dtype), randn(70, 1200, dtype=dtype, seed=1)
    query, key, value, bounds = packed([70], [70], dtype=dtype)
    with batch_invariant_mode():
        product = F.linear(x, w)
        attended = attention(query, key, value, **bounds)
    for output, exact in (
        (product, x.double() @ w.double().t()),
        (attended, exact_attention(query, key, value, offset=0)),
    ):
        assert (output == exact.to(dtype)).float().mean() > 0.99


def test_the_number_of_threads_changes_no_bit():
    x, w = randn(33, 3000), randn(40, 3000, seed=1)
    query, key, value, bounds = packed([70, 3], [70, 90])
    num_threads, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with batch_invariant_mode():
                results.append((F.linear(x, w), F.linear(x[:1], w), attention(query, key, value, **bounds)))
    finally:
        torch.set_num_threads(num_threads)
    for product, first_row, attended in results:
        assert equal_bits(product, results[0][0])
        assert equal_bits(first_row, product[:1])
        assert equal_bits(attended, results[0][2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_and_separate_projections_agree_whatever_the_strides_of_the_weight(dtype):
    x, w = randn(20, 1024, dtype=dtype), randn(300, 1024, dtype=dtype, seed=1)
    with batch_invariant_mode():
        fused = F.linear(x, w)
        assert equal_bits(torch.cat([F.linear(x, part) for part in w.split([1, 7, 292])], dim=-1), fused)
        assert equal_bits(x @ w.t().contiguous(), fused)


def test_adding_the_bias_in_the_product_or_after_it_is_the_same():
    x, w, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((9, 64), (32, 64), (32,)))
    with batch_invariant_mode():
        assert equal_bits(F.linear(x, w, bias), F.linear(x, w) + bias)


def test_a_bias_with_factor_zero_counts_for_nothing():
    x, w = randn(5, 8), randn(8, 6, seed=1)
    with batch_invariant_mode():
        assert torch.equal(torch.addmm(torch.full((6,), math.nan), x, w, beta=0), x @ w)


def test_integers_and_empty_batches_pass():
    integers = torch.arange(6).reshape(2, 3)
    large = torch.tensor([[2**40 + 1]])
    with batch_invariant_mode():
        assert torch.equal(integers @ integers.t(), torch.tensor([[5, 14], [14, 50]]))
        assert torch.equal(large @ torch.tensor([[1]]), large)
        assert F.linear(torch.zeros(0, 8), randn(4, 8)).shape == (0, 4)
        assert torch.bmm(torch.zeros(3, 0, 8), torch.zeros(3, 8, 5)).shape == (3, 0, 5)
        assert torch.equal(torch.zeros(4, 0) @ torch.zeros(0, 3), torch.zeros(4, 3))


NOT_PRODUCTS = {
    "mm": lambda: randn(2, 64) @ randn(128, 5),
    "Linear": lambda: torch.nn.Linear(128, 64)(randn(4, 64)),
    "bmm": lambda: torch.bmm(randn(2, 3, 16), randn(2, 32, 5)),
    "bmm of other batches": lambda: torch.bmm(randn(2, 3, 4), randn(4, 4, 128)),
    "mv": lambda: torch.mv(randn(2, 3), randn(4)),
    "bfloat16 times float32": lambda: randn(2, 3).bfloat16() @ randn(3, 5),
    "float32 times complex": lambda: randn(2, 3) @ randn(3, 5).to(torch.complex64),
    "mv of two dtypes": lambda: torch.mv(randn(2, 3), randn(3).bfloat16()),
    "a bias of another dtype": lambda: F.linear(randn(2, 3), randn(5, 3), randn(5).bfloat16()),
    "a bias with more rows": lambda: torch.addmm(randn(10, 4), randn(1, 3), randn(3, 4)),
    "a bias with more dimensions": lambda: torch.addmm(randn(2, 1, 4), randn(2, 3), randn(3, 4)),
    "a bias with factor zero": lambda: torch.addmm(randn(7, 9), randn(2, 3), randn(3, 4), beta=0),
    "a bias of more products": lambda: torch.baddbmm(randn(5, 2, 4), randn(1, 2, 3), randn(1, 3, 4)),
    "a product as large as the bias": lambda: torch.baddbmm(randn(1, 2, 4), randn(1, 2, 3), randn(1, 5, 4)),
}


@pytest.mark.parametrize("name", NOT_PRODUCTS)
def test_what_torch_does_not_multiply_is_an_error_in_the_mode_too(name):
    with pytest.raises(RuntimeError):
        NOT_PRODUCTS[name]()
    with pytest.raises(RuntimeError), batch_invariant_mode():
        NOT_PRODUCTS[name]()


def test_a_softmax_of_one_number_is_one():
    with batch_invariant_mode():
        assert torch.softmax(torch.tensor(3.0), 0) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_plain_ones_within_rounding(dtype):
    x, w, bias = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(40, 64), (24, 64), (24,)]))
    leaves = [tensor.requires_grad_() for tensor in (x, w, bias)]

    def gradients():
        return torch.autograd.grad(F.linear(x, w, bias).float().square().sum(), leaves)

    plain = gradients()
    with batch_invariant_mode():
        ours = gradients()
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine - theirs).abs().max() <= 4 * tolerance(dtype, 64) * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_before_the_weight(dtype):
    x, weight = randn(7, 100, dtype=dtype) * 3, randn(100, dtype=dtype, seed=1)
    x.requires_grad_()
    normalized = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = weight.double() * normalized.to(dtype).double()
    output = rms_norm(x, weight, 1e-6)
    assert (output.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    if dtype == torch.bfloat16:
        late = (weight.double() * normalized).to(dtype)
        assert (output == expected.to(dtype)).float().mean() > 0.99 > (late == expected.to(dtype)).float().mean()
    output.sum().backward()
    assert x.grad.isfinite().all()


@searching(10)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    length=st.integers(1, 600),
    cut=st.integers(0, 70),
    batch=st.integers(1, 3),
)
def test_products_of_any_shape_do_not_depend_on_where_the_batch_is_cut(rows, columns, length, cut, batch):
    a, b = randn(batch, rows, length), randn(batch, length, columns, seed=1)
    with batch_invariant_mode():
        whole = torch.bmm(a, b)
        cut_there = torch.cat([torch.bmm(a[:, :cut], b), torch.bmm(a[:, cut:], b)], dim=1)
        one_by_one = torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    assert equal_bits(cut_there, whole)
    assert equal_bits(one_by_one, whole)
    assert (whole - (a.double() @ b.double())).abs().max() <= tolerance(torch.float32, length) * math.sqrt(length)


@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 128, 128), (1, 1, 1), (20, 300, 129)])
def test_a_product_has_memory_of_its_own_and_can_be_viewed(shape):
    M, K, N = shape
    with batch_invariant_mode():
        for product in (randn(M, K) @ randn(K, N), randn(2, M, K) @ randn(2, K, N), F.linear(randn(M, K), randn(N, K))):
            assert product.is_contiguous()
            assert product.untyped_storage().nbytes() == 4 * product.numel()
            product.view(-1)
