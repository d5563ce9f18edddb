# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of batch-invariant execution: values against float64, and bits that depend on nothing but the row.

On a GPU where there is one; elsewhere Triton's interpreter runs the same kernels on small shapes, without bfloat16.
"""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from batch_invariant_support import assert_same_bits
from torch import Tensor
from triton_support import (
    DEVICE,
    HAS_GPU,
    MARKS,
    UNIT,
    each_dtype,
    each_dtype_of_a_gpu,
    random,
    rows_of_a_dot_do_not_meet,  # noqa: F401
)

from mis_ext.onpolicy.batch_invariant import rms_norm
from mis_ext.onpolicy.bits import same_bits, ulp_distance

pytest.importorskip("triton")
matmul = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_products")
reductions = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_reductions")

pytestmark = MARKS


def assert_close(actual: Tensor, exact: Tensor, *, scale: Tensor | float = 0.0, factor: float = 4.0) -> None:
    """Within one rounding to the dtype, and float32 sums whose terms add up to ``scale`` in absolute value."""
    bound = 1.01 * UNIT[actual.dtype] * exact.abs() + factor * UNIT[torch.float32] * torch.as_tensor(scale)
    error = (actual.double() - exact).abs()
    assert (error <= bound + 1e-7).all(), f"largest excess {float((error - bound).max())}"


MM_SHAPE = (300, 1000, 520) if HAS_GPU else (130, 40, 66)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    M, K, N = MM_SHAPE
    return random(M, K, dtype=dtype), random(N, K, dtype=dtype, seed=1).t()


@each_dtype
def test_a_product_is_the_exact_one_rounded_once(dtype) -> None:
    a, b = operands(dtype)
    assert_close(matmul.mm(a, b), a.double() @ b.double(), scale=a.double().abs() @ b.double().abs(), factor=30)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="on a CPU there is one tile")
@each_dtype
@pytest.mark.parametrize("seed", range(24))
def test_the_tiles_of_a_decode_have_the_bits_of_the_others(dtype, seed) -> None:
    draw = Random(seed).randrange
    few, K, N = draw(1, 65), draw(1, 9000), draw(1, 20000)
    scale = torch.logspace(-3, 3, 200, device=DEVICE)[:, None]
    a = (random(200, K, seed=seed) * scale).to(dtype)
    b = random(K, N, dtype=dtype, seed=seed + 1) if draw(2) else random(N, K, dtype=dtype, seed=seed + 1).t()
    start = draw(0, 200 - few)
    rows = a[start : start + few]
    assert matmul.choose_tile(rows, N) != matmul.choose_tile(a, N) or torch.cuda.get_device_capability() != (9, 0)
    assert_same_bits(matmul.mm(rows, b), matmul.mm(a, b)[start : start + few])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="on a CPU there is one tile")
@each_dtype
@pytest.mark.parametrize("shape", [(8192, 2048), (2048, 8192), (8256, 2048), (256, 4000), (64, 33), (300, 33)])
def test_any_few_rows_have_the_bits_of_many(dtype, shape) -> None:
    K, N = shape
    a = (random(200, K) * torch.logspace(-3, 3, K, device=DEVICE)).to(dtype)
    a[12, 3], a[14, 5], a[1] = float("inf"), float("nan"), -0.0
    b = random(N, K, dtype=dtype, seed=1).t()
    many = matmul.mm(a, b)
    for few in (1, 15, 16, 17, 64, 65):
        for start in (0, 12, 100):
            # Of a NaN the bits say nothing.
            some, same = (x.nan_to_num(nan=7.0) for x in (matmul.mm(a[start : start + few], b), many[start:][:few]))
            assert_same_bits(some, same)


@pytest.mark.skipif(HAS_GPU, reason="takes the tiles of a GPU in the interpreter")
@each_dtype
@pytest.mark.parametrize("K", [512, 320])
def test_the_tiles_of_few_rows_give_the_product(dtype, K, monkeypatch) -> None:
    a, b = random(65, K, dtype=dtype), random(40, K, dtype=dtype, seed=1).t()
    exact, many = a.double() @ b.double(), matmul.mm(a, b)
    monkeypatch.setattr(matmul, "_is_hopper", lambda device: True)
    for few in (1, 16, 17, 64):
        product = matmul.mm(a[:few], b)
        assert_close(product, exact[:few], scale=K**0.5, factor=30)
        # The interpreter adds up a block first, the tensor cores of half dtypes do not.
        if dtype == torch.float32:
            assert_same_bits(product, many[:few])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [1, 2048, 8192, 150_000])
def test_the_tiles_of_few_rows_fit_into_shared_memory_and_k(dtype, num_columns, monkeypatch) -> None:
    monkeypatch.setattr(matmul, "_is_hopper", lambda device: True)
    for rows in (1, 15, 16, 17, 64, 65):
        for K in (1, 64, 256, 320, 4096):
            tile = matmul.choose_tile(torch.empty(rows, K, dtype=dtype), num_columns)
            block_bytes = (tile.BLOCK_M + tile.BLOCK_N) * tile.BLOCK_K * dtype.itemsize
            # What a program on Hopper may have.
            assert tile.num_stages * block_bytes <= 227 * 1024
            assert tile.BLOCK_K == matmul.TILES[dtype].BLOCK_K or K % tile.BLOCK_K == 0
            assert min(rows, 65) <= tile.BLOCK_M


@each_dtype_of_a_gpu
def test_a_row_of_a_product_has_its_bits_in_every_batch(dtype) -> None:
    a, b = operands(dtype)
    M = a.shape[0]
    whole = matmul.mm(a, b)
    for row in (0, 1, 15, 127, 128, M - 1) if HAS_GPU else (1, 127, M - 1):
        assert_same_bits(matmul.mm(a[row : row + 1], b), whole[row : row + 1])
    for size in (2, 16, 65, 129) if HAS_GPU else (65, 129):
        assert_same_bits(torch.cat([matmul.mm(chunk, b) for chunk in a.split(size)]), whole)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert_same_bits(matmul.mm(a[order], b), whole[order])


@each_dtype_of_a_gpu
def test_broken_and_huge_rows_leave_the_rows_beside_them_alone(dtype) -> None:
    a, b = operands(dtype)
    whole = matmul.mm(a, b)
    broken = a.clone()
    broken[1::3], broken[2::3] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(matmul.mm(broken, b)[::3], whole[::3])


@each_dtype_of_a_gpu
def test_strides_and_alignment_change_no_bit_of_a_product(dtype) -> None:
    a, b = operands(dtype)
    a = a[:9]
    whole = matmul.mm(a, b)
    shifted = torch.zeros(a.shape[0], a.shape[1] + 3, dtype=dtype, device=DEVICE)
    shifted[:, 1:-2] = a
    for same_a in (a.t().contiguous().t(), shifted[:, 1:-2]):
        assert_same_bits(matmul.mm(same_a, b), whole)
    assert_same_bits(matmul.mm(a, b.contiguous()), whole)


@each_dtype
def test_a_batched_product_is_the_product_of_each(dtype) -> None:
    a, b = operands(dtype)
    a = torch.stack([a[:9], a[9:18]])
    each = torch.stack([matmul.mm(x, b) for x in a])
    assert_same_bits(matmul.bmm(a, b.expand(2, -1, -1)), each)
    b = torch.stack([b, b.flip(0)])
    assert_same_bits(matmul.bmm(a, b), torch.stack([matmul.mm(x, y) for x, y in zip(a, b, strict=True)]))


@each_dtype
def test_an_outer_product_is_rounded_once(dtype) -> None:
    a, b = random(9, 1, dtype=dtype), random(1, 70, dtype=dtype, seed=1)
    # A sum that starts at 0 would not keep the sign.
    a[3] = -0.0
    product = matmul.mm(a.t().contiguous().t(), b)
    assert_same_bits(product, a * b)
    # torch lays an elementwise product out as its operands lie.
    batched = torch.stack([a, -a], dim=1).transpose(0, 1), torch.stack([b, b])
    assert not (batched[0] * batched[1]).is_contiguous()
    assert matmul.bmm(*batched).is_contiguous()


@each_dtype
@pytest.mark.parametrize("num_keys", [2, 33])
def test_the_value_of_the_only_key_has_the_bits_of_the_first_among_keys_without_a_share(dtype, num_keys) -> None:
    shares = torch.zeros(5, 1, num_keys, dtype=dtype, device=DEVICE)
    shares[:, :, 0] = random(5, 1).sigmoid().to(dtype)
    values = random(5, num_keys, 70, dtype=dtype)
    alone = matmul.bmm(shares[..., :1].contiguous(), values[:, :1].contiguous())
    assert_same_bits(alone, matmul.bmm(shares, values))


def test_products_of_nothing_are_zeros_or_empty() -> None:
    a, b = random(5, 0), random(0, 4)
    assert_same_bits(matmul.mm(a, b), torch.zeros(5, 4, device=DEVICE))
    assert matmul.mm(random(0, 3), random(3, 4)).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_product_of_more_than_2_31_elements_ends_as_it_should() -> None:
    a, b = random(50_000, 64, dtype=torch.bfloat16), random(64, 43_008, dtype=torch.bfloat16, seed=1)
    assert_same_bits(matmul.mm(a, b)[-3:], matmul.mm(a[-3:], b))


WIDTH = 151_937 if HAS_GPU else 2_100
"""More than one block, and a row that does not begin where a vector of 16 bytes could."""
SOFTMAXES = {"log_softmax": torch.log_softmax, "softmax": torch.softmax}
each_softmax = pytest.mark.parametrize("name", SOFTMAXES)


def softmax_of(name: str, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return reductions.softmax(x.contiguous(), dtype or x.dtype, is_log=name == "log_softmax")


@each_dtype
@each_softmax
def test_a_softmax_is_the_exact_one_rounded_once(name, dtype) -> None:
    x = 5 * random(2, WIDTH, dtype=dtype)
    exact = SOFTMAXES[name](x.double(), 1)
    scale = 30.0 if name == "log_softmax" else 30.0 * exact
    for to in (dtype, torch.float32):
        out = softmax_of(name, x, to)
        assert out.dtype == to
        assert_close(out, exact, scale=scale)


@each_dtype_of_a_gpu
@each_softmax
def test_a_row_of_a_softmax_has_its_bits_in_every_batch(name, dtype) -> None:
    x = random(3, WIDTH, dtype=dtype)
    row = softmax_of(name, x[1:2])
    broken = x.clone()
    broken[0], broken[2] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(softmax_of(name, broken)[1:2], row)
    shifted = torch.zeros(1, WIDTH + 1, dtype=dtype, device=DEVICE)
    shifted[:, 1:] = x[1]
    assert_same_bits(softmax_of(name, shifted[:, 1:]), row)


@each_dtype_of_a_gpu
@each_softmax
@pytest.mark.parametrize("width", [48, 1_024, 2_112, 151_936] if HAS_GPU else [48])
def test_no_alignment_changes_a_bit_of_a_softmax(name, width, dtype) -> None:
    # Multiples of 16: all rows begin where a vector may.
    x = random(3, width, dtype=dtype)
    # Where one column has most of the share, log_softmax shows the last bits of the sum.
    x[1:, 5] += 16
    for start in (1, 4):
        moved = torch.cat([x.new_zeros(start), x.flatten()])[start:].view(x.shape)
        # float32, whose last bits bfloat16 does not show.
        assert_same_bits(*(softmax_of(name, each, torch.float32) for each in (moved, x)))


@each_softmax
@pytest.mark.parametrize("length", [90, 3_000])
def test_columns_at_minus_infinity_change_no_bit_of_a_softmax_wherever_they_are(name, length) -> None:
    x = random(3, length)
    # So that the sum is of a size at which log_softmax shows its last bits.
    x[:, 5] += 8
    expected = softmax_of(name, x)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        # More than the widest block.
        places = torch.randperm(17_000, generator=generator)[:length].sort().values.to(DEVICE)
        wide = torch.full((3, 17_000), float("-inf"), device=DEVICE)
        wide[:, places] = x
        out = softmax_of(name, wide)
        assert_same_bits(out[:, places], expected)
        assert (out[wide.isinf()] == {"log_softmax": float("-inf"), "softmax": 0.0}[name]).all()


@each_softmax
def test_a_row_without_a_finite_entry_or_with_a_nan_is_all_nan_as_in_torch(name) -> None:
    for width in (40, 17_000):
        x = random(3, width)
        x[0], x[1, width - 3], x[2, 9] = float("-inf"), float("nan"), float("inf")
        assert softmax_of(name, x).isnan().all()
        assert SOFTMAXES[name](x, 1).isnan().all()


@each_dtype_of_a_gpu
@pytest.mark.parametrize("is_mean", [True, False])
def test_a_row_of_a_mean_has_its_bits_in_every_batch(is_mean, dtype) -> None:
    x, reduce = random(4, WIDTH, dtype=dtype), partial(reductions.sum, is_mean=is_mean)
    whole, exact = reduce(x), x.double().mean(1) if is_mean else x.double().sum(1)
    assert_close(whole, exact, scale=x.double().abs().sum(1) / (WIDTH if is_mean else 1))
    broken = x.clone()
    broken[0], broken[3] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(reduce(broken)[1:3], whole[1:3])
    assert_same_bits(reduce(x[1:2]), whole[1:2])


@each_dtype
def test_an_rms_norm_is_rounded_before_the_weight(dtype) -> None:
    x, weight = random(3, WIDTH, dtype=dtype), random(WIDTH, dtype=dtype, seed=1)
    x[1] *= 1e-3
    out = reductions.rms_norm(x, weight, 1e-5)
    scale = torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5)
    expected = weight * (x.double() * scale).float().to(dtype)
    assert int(ulp_distance(out, expected).max()) <= (8 if dtype == torch.float32 else 1)
    # In the other order a fourth of the numbers would differ, here those at the border of a rounding.
    assert dtype == torch.float32 or same_bits(out, expected).double().mean() > 0.99
    assert_same_bits(reductions.rms_norm(x[2], weight, 1e-5), out[2])
    assert reductions.rms_norm(x, weight.float(), 1e-5).dtype == torch.float32


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
def test_the_gradient_of_an_rms_norm_is_that_of_autograd_in_float64(shape) -> None:
    x, weight = random(*shape).requires_grad_(), random(5, seed=1).requires_grad_()
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    reductions.rms_norm(x, weight, 1e-5).backward(random(*shape, seed=2))
    torch.nn.functional.rms_norm(wide_x, (5,), wide_weight, 1e-5).backward(random(*shape, seed=2).double())
    for actual, exact in ((x, wide_x), (weight, wide_weight)):
        torch.testing.assert_close(actual.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_not_of_the_rows_is_an_error() -> None:
    x = random(2, 3)
    with pytest.raises(ValueError, match=r"weight must be \[D\] for x \[\.\.\., D\], got \[2\] and \[2, 3\]"):
        rms_norm(x, x[:, 0], 1e-6)
