"""The Triton kernels of batch-invariant execution: values against float64, and bits that depend on nothing but the row.

On a GPU where there is one; elsewhere Triton's interpreter runs the same kernels on small shapes, without bfloat16.
"""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from torch import Tensor
from triton_support import DEVICE, HAS_GPU, OBSTACLE, dot_of_the_interpreter

from mis_ext.onpolicy.batch_invariant.packing import Packing
from mis_ext.onpolicy.bits import same_bits, ulp_distance

pytest.importorskip("triton")
matmul = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_matmul")
reductions = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_reductions")
attention = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_attention")

pytestmark = [
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
    # NumPy, in which the interpreter computes, warns of every NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([pytest.mark.gpu] if HAS_GPU else []),
]


@pytest.fixture(autouse=True)
def rows_of_a_dot_do_not_meet(monkeypatch) -> None:
    """As on a GPU, whose instruction for a tile rounds all of its rows alike."""
    if not HAS_GPU:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_the_interpreter)


DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance between neighbours, relative: what one rounding may cost."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    same = same_bits(actual, expected)
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ, first at {(~same).nonzero()[0].tolist()}"


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
    bias = random(N, dtype=dtype, seed=seed + 2)
    start = draw(0, 200 - few)
    rows = a[start : start + few]
    assert matmul.tile_of(rows, N) != matmul.tile_of(a, N) or torch.cuda.get_device_capability() != (9, 0)
    assert_same_bits(matmul.mm(rows, b), matmul.mm(a, b)[start : start + few])
    assert_same_bits(matmul.addmm(bias, rows, b), matmul.addmm(bias, a, b)[start : start + few])


@each_dtype
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


@each_dtype
def test_broken_and_huge_rows_leave_the_rows_beside_them_alone(dtype) -> None:
    a, b = operands(dtype)
    whole = matmul.mm(a, b)
    broken = a.clone()
    broken[1::3], broken[2::3] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(matmul.mm(broken, b)[::3], whole[::3])


@each_dtype
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
def test_a_bias_is_added_to_the_rounded_product(dtype) -> None:
    a, b = operands(dtype)
    a = a[:9]
    whole = matmul.mm(a, b)
    for shape in ((b.shape[1],), tuple(whole.shape), (a.shape[0], 1)):
        bias = random(*shape, dtype=dtype, seed=3)
        assert_same_bits(matmul.addmm(bias, a, b), whole + bias)


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
    assert_same_bits(matmul.addmm(b[0], a, b), a * b + b[0])


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


def test_what_a_product_cannot_take_is_named() -> None:
    a = random(4, 3)
    with pytest.raises(ValueError, match=r"\[M, K\] and \[K, N\], got \[4, 3\] and \[4, 3\]"):
        matmul.mm(a, a)
    with pytest.raises(ValueError, match=r"\[B, M, K\]"):
        matmul.bmm(a[None], a.t().expand(2, 3, 4))
    with pytest.raises(TypeError, match=r"b is torch\.float16, a torch\.float32"):
        matmul.mm(a, a.t().half())
    with pytest.raises(TypeError, match="a must be float32, bfloat16 or float16, got"):
        matmul.mm(a.double(), a.t().double())


@pytest.mark.skipif(HAS_GPU, reason="about the interpreter")
def test_the_interpreter_refuses_products_of_bfloat16() -> None:
    with pytest.raises(TypeError, match="interpreter has no products of bfloat16"):
        matmul.mm(random(2, 3).bfloat16(), random(3, 2).bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_product_of_more_than_2_31_elements_ends_as_it_should() -> None:
    a, b = random(50_000, 64, dtype=torch.bfloat16), random(64, 43_008, dtype=torch.bfloat16, seed=1)
    assert_same_bits(matmul.mm(a, b)[-3:], matmul.mm(a[-3:], b))


WIDTH = 151_937 if HAS_GPU else 2_100
"""More than one block, and a row that does not begin where a vector of 16 bytes could."""
SOFTMAXES = {"log_softmax": torch.log_softmax, "softmax": torch.softmax}
each_softmax = pytest.mark.parametrize("name", SOFTMAXES)


@each_dtype
@each_softmax
def test_a_softmax_is_the_exact_one_rounded_once(name, dtype) -> None:
    x = 5 * random(2, WIDTH, dtype=dtype)
    exact = SOFTMAXES[name](x.double(), 1)
    scale = 30.0 if name == "log_softmax" else 30.0 * exact
    assert_close(getattr(reductions, name)(x, 1), exact, scale=scale)
    wide = getattr(reductions, name)(x, -1, half_to_float=True)
    assert wide.dtype == torch.float32
    assert_close(wide, exact, scale=scale)


@each_softmax
def test_a_softmax_over_another_dimension_is_that_of_the_transposed(name) -> None:
    x, softmax = random(2, 3, 2), getattr(reductions, name)
    for dim in (0, 1, -2):
        out = softmax(x, dim)
        assert out.is_contiguous()
        assert_same_bits(out, softmax(x.movedim(dim, -1).contiguous(), 2).movedim(-1, dim))
    assert_close(softmax(x, 1), SOFTMAXES[name](x.double(), 1), scale=4.0)
    assert float(softmax(x[0, 0, 0], 0)) == {"log_softmax": 0.0, "softmax": 1.0}[name]


@each_dtype
@each_softmax
def test_a_row_of_a_softmax_has_its_bits_in_every_batch(name, dtype) -> None:
    x, softmax = random(3, WIDTH, dtype=dtype), getattr(reductions, name)
    row = softmax(x[1:2], 1)
    broken = x.clone()
    broken[0], broken[2] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(softmax(broken, 1)[1:2], row)
    shifted = torch.zeros(1, WIDTH + 1, dtype=dtype, device=DEVICE)
    shifted[:, 1:] = x[1]
    assert_same_bits(softmax(shifted[:, 1:], 1), row)


@each_softmax
def test_a_tail_of_minus_infinities_changes_no_bit_of_a_softmax(name) -> None:
    x, softmax = random(1, 100), getattr(reductions, name)
    infinite = torch.full((1, WIDTH), float("-inf"), device=DEVICE)
    infinite[:, :100] = x
    out = softmax(infinite, 1)
    assert_same_bits(out[:, :100], softmax(x, 1))
    assert (out[:, 100:] == {"log_softmax": float("-inf"), "softmax": 0.0}[name]).all()
    # The first block of a row may be all minus infinities too.
    assert_close(softmax(infinite.flip(1), 1)[:, -100:], SOFTMAXES[name](x.double(), 1).flip(1), scale=8.0)


def test_columns_at_minus_infinity_change_no_bit_of_a_softmax_wherever_they_are() -> None:
    x = 4 * random(2, 90)
    expected = reductions.softmax(x, 1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(WIDTH, generator=generator)[:90].sort().values.to(DEVICE)
        wide = torch.full((2, WIDTH), float("-inf"), device=DEVICE)
        wide[:, places] = x
        assert_same_bits(reductions.softmax(wide, 1)[:, places], expected)


def test_a_logsumexp_is_that_of_float64() -> None:
    x = 5 * random(2, 3, 70)
    x[0, 0] = float("-inf")
    for dim, keepdim in (([2], False), ([1, 2], True)):
        exact = x.double().logsumexp(dim, keepdim)
        torch.testing.assert_close(reductions.logsumexp(x, dim, keepdim).double(), exact, rtol=1e-6, atol=1e-6)


@each_softmax
def test_a_row_without_a_finite_entry_or_with_a_nan_is_all_nan_as_in_torch(name) -> None:
    x = random(3, 40)
    x[0], x[1, 7], x[2, 9] = float("-inf"), float("nan"), float("inf")
    assert getattr(reductions, name)(x, 1).isnan().all()
    assert SOFTMAXES[name](x, 1).isnan().all()


@each_dtype
@each_softmax
def test_the_gradient_of_a_softmax_is_that_of_autograd_in_float64(name, dtype) -> None:
    x = random(2, WIDTH, dtype=dtype).double().requires_grad_()
    output, grad = SOFTMAXES[name](x, 1), random(2, WIDTH, dtype=dtype, seed=1)
    rounded = output.detach().to(dtype)
    backward = getattr(reductions, f"{name}_backward")
    actual = backward(grad, rounded, 1, dtype)
    # By the rounded output, which is what the kernel has.
    g, y = grad.double(), rounded.double()
    exact = g - y.exp() * g.sum(1, keepdim=True) if name == "log_softmax" else (g - (g * y).sum(1, keepdim=True)) * y
    assert_close(actual, exact, scale=g.abs() + y.abs() + 1, factor=8)
    output.backward(g)
    torch.testing.assert_close(actual.double(), x.grad, rtol=0, atol=30 * UNIT[dtype])
    assert_same_bits(backward(grad[1:2], rounded[1:2], 1, dtype), actual[1:2])
    assert backward(grad[:, :9], rounded[:, :9], 1, torch.float32).dtype == torch.float32


@each_dtype
@pytest.mark.parametrize("name", ["mean", "sum"])
def test_a_mean_and_a_sum_have_the_shapes_of_torch_and_the_values_of_float64(name, dtype) -> None:
    x = random(2, 3, 2, dtype=dtype)
    for dim in (-3, [0, 2], (1, 0), None, []):
        for keepdim in (False, True):
            exact = getattr(x.double(), name)(dim, keepdim)
            actual = getattr(reductions, name)(x, dim, keepdim)
            assert actual.shape == exact.shape
            assert_close(actual, exact, scale=12.0)
    assert_close(getattr(reductions, name)(x, 2, dtype=torch.float32), getattr(x.double(), name)(2), scale=4.0)
    assert float(getattr(reductions, name)(x[0, 0, 0])) == float(x[0, 0, 0])


@each_dtype
@pytest.mark.parametrize("name", ["mean", "sum"])
def test_a_row_of_a_mean_has_its_bits_in_every_batch(name, dtype) -> None:
    x, reduce = random(4, WIDTH, dtype=dtype), getattr(reductions, name)
    whole = reduce(x, 1)
    assert_close(whole, getattr(x.double(), name)(1), scale=x.double().abs().sum(1) / (WIDTH if name == "mean" else 1))
    broken = x.clone()
    broken[0], broken[3] = float("nan"), torch.finfo(dtype).max
    assert_same_bits(reduce(broken, [1])[1:3], whole[1:3])
    assert_same_bits(reduce(x[1:2], 1), whole[1:2])
    assert_same_bits(reduce(x.t().contiguous(), 0), whole)


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


def test_what_a_reduction_cannot_take_is_named() -> None:
    x = random(2, 3)
    with pytest.raises(IndexError):
        reductions.softmax(x, 2)
    with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16, got"):
        reductions.mean(x.long(), 1)
    with pytest.raises(ValueError, match=r"weight must be \[D\] for x \[\.\.\., D\], got \[2\] and \[2, 3\]"):
        reductions.rms_norm(x, x[:, 0], 1e-6)
    with pytest.raises(ValueError, match="grad is"):
        reductions.softmax_backward(x, x.t(), 1, torch.float32)


HEADS, GROUPS, HEAD_DIM = (8, 2, 64) if HAS_GPU else (2, 1, 16)
LONGEST = 1_000 if HAS_GPU else 129


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def keywords(lengths_q: list[int], lengths_k: list[int], **more: object) -> dict:
    return {
        "cu_seqlens_q": cu_seqlens(lengths_q),
        "cu_seqlens_k": cu_seqlens(lengths_k),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
        "scale": 0.3,
        "is_causal": True,
        **more,
    }


def streams(tokens_q: int, tokens_k: int, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (tokens_q, HEADS), (tokens_k, GROUPS), (tokens_k, GROUPS)
    return [random(*shape, HEAD_DIM, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def exact_attention(query: Tensor, key: Tensor, value: Tensor, settings: dict) -> tuple[Tensor, Tensor]:
    """In float64, a sequence at a time."""
    outputs, log_totals = [], []
    bounds = (settings[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    spans = [list(itertools.pairwise(b)) for b in bounds]
    for sequence, ((q0, q1), (k0, k1)) in enumerate(zip(*spans, strict=True)):
        repeats = query.shape[1] // key.shape[1]
        k, v = (x[k0:k1].repeat_interleave(repeats, 1) for x in (key, value))
        score = torch.einsum("ihd,jhd->hij", query[q0:q1], k) * settings["scale"]
        allowed = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device)
        if settings["is_causal"]:
            allowed = allowed.tril(k1 - k0 - (q1 - q0))
        if settings.get("mask") is not None:
            allowed = allowed & settings["mask"][sequence, :, : q1 - q0, : k1 - k0]
        score = score.masked_fill(~allowed, float("-inf"))
        sees_none = score.amax(-1, keepdim=True) == float("-inf")
        weight = torch.where(sees_none, 0.0, score.masked_fill(sees_none, 0.0).softmax(-1))
        outputs.append(torch.einsum("hij,jhd->ihd", weight, v))
        log_totals.append(score.logsumexp(-1))
    return torch.cat(outputs), torch.cat(log_totals, 1)


CASES = {
    "causal": ([34, 3], [34, 3], {}),
    "full": ([3, 2], [70, 5], {"is_causal": False}),
    "longer keys": ([2, 17], [3, 70], {}),
    "more queries than keys": ([35, 1], [4, 1], {}),
    "mask": ([17, 2], [66, 2], {"mask": 1}),
    "mask of each head": ([5, 2], [66, 5], {"mask": HEADS, "is_causal": False}),
}
if HAS_GPU:
    CASES["many"] = ([700, 1, 129], [1500, 1, 129], {"mask": 1})
each_case = pytest.mark.parametrize("case", CASES)


def case_of(case: str) -> dict:
    lengths_q, lengths_k, more = CASES[case]
    if "mask" in more:
        shape = (len(lengths_q), more["mask"], max(lengths_q), max(lengths_k))
        mask = random(*shape, seed=7) > -0.5
        mask[:, :, 1] = False
        more = {**more, "mask": mask}
    return keywords(lengths_q, lengths_k, **more)


def tokens_of(settings: dict) -> tuple[int, int]:
    return int(settings["cu_seqlens_q"][-1]), int(settings["cu_seqlens_k"][-1])


@each_case
@each_dtype
def test_attention_is_that_of_float64(case, dtype) -> None:
    settings = case_of(case)
    qkv = streams(*tokens_of(settings), dtype=dtype)
    output, lse = attention.attention_forward(*qkv, Packing(**settings))
    exact, exact_lse = exact_attention(*(x.double() for x in qkv), settings)
    # The weights are rounded to the dtype before they meet the values.
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 8 * UNIT[dtype])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
    sees_none = exact_lse.t() == float("-inf")
    assert sees_none.any() == case.startswith(("more", "ma"))
    assert (output[sees_none] == 0).all()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (8, torch.float32),
        (24, torch.float32),
        *([(80, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)] if HAS_GPU else []),
    ],
)
def test_head_dimensions_that_are_no_power_of_two_are_padded(dim, dtype) -> None:
    settings = keywords([20], [20])
    # Two groups of two heads.
    qkv = [random(20, heads, dim, dtype=dtype, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
    output, lse = attention.attention_forward(*qkv, Packing(**settings))
    exact, _ = exact_attention(*(x.double() for x in qkv), settings)
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 8 * UNIT[dtype])
    grads = attention.attention_backward(output, *qkv, output, lse, Packing(**settings))
    assert_gradients(grads, output, qkv, settings)


def assert_gradients(grads: tuple, slope: Tensor, qkv: list[Tensor], settings: dict) -> None:
    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact_attention(*wide, settings)[0].backward(slope.double())
    tolerance = 1e-5 if slope.dtype == torch.float32 else 8 * UNIT[slope.dtype]
    for actual, exact in zip(grads, wide, strict=True):
        assert actual.dtype == slope.dtype
        error = (actual.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert error < tolerance, float(error)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in DTYPES if HAS_GPU or (dtype == torch.float32) == (case != "mask")],
)
def test_the_gradients_of_attention_are_those_of_autograd_in_float64_on_every_run(case, dtype) -> None:
    settings = case_of(case)
    qkv = streams(*tokens_of(settings), dtype=dtype)
    output, lse = attention.attention_forward(*qkv, Packing(**settings))
    slope = random(*output.shape, dtype=dtype, seed=9)
    grads = attention.attention_backward(slope, *qkv, output, lse, Packing(**settings))
    assert_gradients(grads, slope, qkv, settings)
    if HAS_GPU or case == "mask":
        again = attention.attention_backward(slope, *qkv, output, lse, Packing(**settings))
        for first, second in zip(grads, again, strict=True):
            assert_same_bits(first, second)


@each_dtype
def test_prefill_chunks_and_decode_give_a_position_the_same_bits(dtype) -> None:
    q, k, v = streams(LONGEST, LONGEST, dtype=dtype)
    output, lse = attention.attention_forward(q, k, v, Packing(**keywords([LONGEST], [LONGEST])))
    # The lengths at which a block of keys or a tile of queries begins or ends.
    borders = [length for block in range(0, LONGEST, 64) for length in (block + 1, block + 63, block + 64)]
    lengths = sorted({length for length in borders if length <= LONGEST} | {LONGEST})
    decode, decode_lse = attention.attention_forward(
        q[[length - 1 for length in lengths]],
        *(torch.cat([x[:length] for length in lengths]) for x in (k, v)),
        Packing(**keywords([1] * len(lengths), lengths)),
    )
    assert_same_bits(decode, output[[length - 1 for length in lengths]])
    assert_same_bits(decode_lse, lse[:, [length - 1 for length in lengths]])
    begin = 0
    for end in (50, 65, LONGEST):
        chunk, _ = attention.attention_forward(
            q[begin:end], k[:end], v[:end], Packing(**keywords([end - begin], [end]))
        )
        assert_same_bits(chunk, output[begin:end])
        begin = end


@each_dtype
def test_a_sequence_has_its_bits_in_every_pack(dtype) -> None:
    length = 500 if HAS_GPU else 34
    q, k, v = streams(length + 5, length + 5, dtype=dtype)
    settings = keywords([3, length, 2], [3, length, 2])
    middle = slice(3, -2)
    q1, k1, v1 = (x[middle].clone() for x in (q, k, v))
    alone = attention.attention_forward(q1, k1, v1, Packing(**keywords([length], [length], max_seqlen_q=2 * length)))
    grads_alone = attention.attention_backward(q1, q1, k1, v1, *alone, Packing(**keywords([length], [length])))
    for x in (q, k, v):
        x[:3], x[-2:] = float("nan"), torch.finfo(dtype).max
    packed = attention.attention_forward(q, k, v, Packing(**settings))
    assert_same_bits(packed[0][middle], alone[0])
    assert_same_bits(packed[1][:, middle], alone[1])
    grads = attention.attention_backward(q, q, k, v, *packed, Packing(**settings))
    for grad, expected in zip(grads, grads_alone, strict=True):
        assert_same_bits(grad[middle], expected)


@each_dtype
def test_a_mask_that_says_causal_gives_the_bits_of_the_causal_flag(dtype) -> None:
    q, k, v = streams(34, 70, dtype=dtype)
    flagged = attention.attention_forward(q, k, v, Packing(**keywords([34], [70])))
    mask = torch.ones(34, 70, dtype=torch.bool, device=DEVICE).tril(36)
    for shaped in (mask[None, None], mask.expand(1, HEADS, 34, 70)):
        masked = attention.attention_forward(q, k, v, Packing(**keywords([34], [70], is_causal=False, mask=shaped)))
        for actual, expected in zip(masked, flagged, strict=True):
            assert_same_bits(actual, expected)


@each_dtype
def test_packed_padded_and_windowed_by_a_mask_has_the_bits_of_its_own_keys(dtype) -> None:
    first, second, window = (300, 200, 150) if HAS_GPU else (19, 40, 30)
    total = first + second
    q, k, v = streams(total, total, dtype=dtype)
    position = torch.arange(total, device=DEVICE)
    causal = position >= position[:, None]
    in_first = position < first
    packed = causal.T & (in_first == in_first[:, None])
    settings = {"is_causal": False}
    output, _ = attention.attention_forward(
        q, k, v, Packing(**keywords([total], [total], mask=packed[None, None], **settings))
    )
    apart, _ = attention.attention_forward(q, k, v, Packing(**keywords([first, second], [first, second])))
    assert_same_bits(output, apart)
    # The mask may come on top of causality.
    mask = (in_first == in_first[:, None])[None, None]
    assert_same_bits(attention.attention_forward(q, k, v, Packing(**keywords([total], [total], mask=mask)))[0], apart)
    windowed = (causal.T & (position > position[:, None] - window))[None, None].expand(1, HEADS, -1, -1)
    output, _ = attention.attention_forward(q, k, v, Packing(**keywords([total], [total], mask=windowed, **settings)))
    for last in (0, window - 1, window, total - 1):
        seen = slice(max(0, last - window + 1), last + 1)
        length = seen.stop - seen.start
        step, _ = attention.attention_forward(q[last : last + 1], k[seen], v[seen], Packing(**keywords([1], [length])))
        assert_same_bits(step, output[last : last + 1])


@each_dtype
def test_huge_scores_of_one_query_leave_the_others_alone(dtype) -> None:
    q, k, v = streams(70, 70, dtype=dtype)
    settings = keywords([70], [70])
    output, _ = attention.attention_forward(q, k, v, Packing(**settings))
    q[::2] = float("nan")
    q[1::4] = torch.finfo(dtype).max
    assert_same_bits(attention.attention_forward(q, k, v, Packing(**settings))[0][3::4], output[3::4])


@each_dtype
def test_strides_change_no_bit_of_attention(dtype) -> None:
    q, k, v = streams(20, 20, dtype=dtype)
    settings = keywords([20], [20])
    output, lse = attention.attention_forward(q, k, v, Packing(**settings))
    fused = torch.cat([q, k, v], 1)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    by_lane = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for strided in (fused.split([HEADS, GROUPS, GROUPS], 1), by_head, by_lane):
        assert_same_bits(attention.attention_forward(*strided, Packing(**settings))[0], output)
    grads = attention.attention_backward(q, q, k, v, output, lse, Packing(**settings))
    strided = attention.attention_backward(by_lane[0], *by_head, by_head[0] * 0 + output, lse, Packing(**settings))
    for actual, expected in zip(strided, grads, strict=True):
        assert_same_bits(actual, expected)


def test_rows_after_the_last_sequence_get_zeros() -> None:
    settings = keywords([5, 20], [5, 20])
    qkv = streams(32, 32)
    # Fills new memory with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        output, lse = attention.attention_forward(*qkv, Packing(**settings))
        grads = attention.attention_backward(qkv[0], *qkv, output, lse, Packing(**settings))
    finally:
        torch.use_deterministic_algorithms(False)
    for x in (output, lse.t(), *grads):
        assert_same_bits(x[25:], torch.zeros_like(x[25:]))
        assert x[:25].isfinite().all()


def test_attention_of_no_tokens_is_empty() -> None:
    output, lse = attention.attention_forward(*streams(0, 0), Packing(**keywords([0], [0])))
    assert output.shape == (0, HEADS, HEAD_DIM)
    assert lse.shape == (HEADS, 0)


def test_what_attention_cannot_take_is_named() -> None:
    q, k, v = streams(6, 6)
    settings = keywords([6], [6])

    def message(error: type[Exception], match: str, *tensors: Tensor, **more: object) -> None:
        with pytest.raises(error, match=match):
            attention.attention_forward(*tensors, Packing(**{**settings, **more}))

    message(ValueError, r"query must be \[T, H, D\]", q[0], k, v)
    message(ValueError, "last dimensions must be equal", q[..., 1:], k, v)
    message(ValueError, "no multiple of", q[:, :1].expand(-1, 3, -1), k.expand(-1, 2, -1), v.expand(-1, 2, -1)) if (
        GROUPS == 1
    ) else None
    message(ValueError, r"in \[1, 256\], got 300", *(x.repeat(1, 1, 20)[..., :300] for x in (q, k, v)))
    message(TypeError, "value is torch.float16, query torch.float32", q, k, v.half())
    message(TypeError, "cu_seqlens_k must be int32", q, k, v, cu_seqlens_k=settings["cu_seqlens_k"].long())
    message(ValueError, r"must be \[S \+ 1\], got \[2\] and \[3\]", q, k, v, cu_seqlens_k=cu_seqlens([3, 3]))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE)
    message(TypeError, "mask must be bool", q, k, v, mask=mask.int())
    message(ValueError, r"mask must be \[1, 1, 6, 6\], got \[1, 1, 6, 5\]", q, k, v, mask=mask[..., :5])
    message(ValueError, r"mask must be \[S, 1 or", q, k, v, mask=mask.expand(1, 5, 6, 6))
    output, lse = attention.attention_forward(q, k, v, Packing(**settings))
    with pytest.raises(ValueError, match=r"lse be \[H, T\] float32"):
        attention.attention_backward(output, q, k, v, output, lse.t(), Packing(**settings))
