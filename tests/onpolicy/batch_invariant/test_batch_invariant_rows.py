# SPDX-License-Identifier: Apache-2.0
"""A number's bits depend on its own row alone, for whatever the mode lets through on a CPU."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each
from searching import searching
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.batch_invariant.cpu_rows import filled
from mis_ext.onpolicy.bits import as_real, same_bits

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _threads_are_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def equal_bits(a, b):
    a, b = as_real(a), as_real(b)
    return a.shape == b.shape and bool((same_bits(a, b) | (a.isnan() & b.isnan())).all())


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def elementwise_operators():
    """All that torch calls pointwise, and return a new tensor."""
    names = [name for name in dir(aten) if isinstance(getattr(aten, name), torch._ops.OpOverloadPacket)]
    overloads = [getattr(getattr(aten, name), form) for name in names for form in getattr(aten, name).overloads()]
    return [func for func in overloads if torch.Tag.pointwise in func.tags and not func._schema.is_mutable]


def arguments_of(func, numel, dtype, rng):
    """By the types of the schema; None where there is no choice."""
    kinds = {"number": 0.7, "Optional[number]": 0.7, "float": 0.7, "int": 2, "bool": True, "str": "none"}
    scale, positive, arguments = rng.choice([0.1, 1.0, 30.0, 1000.0]), rng.random() < 0.5, []
    for argument in func._schema.arguments:
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            x = randn(numel, dtype=dtype, seed=rng.randrange(99), scale=scale)
            arguments.append(x.abs() if positive and not dtype.is_complex else x)
        elif not argument.has_default_value() or (not argument.kwarg_only and str(argument.type) == "number"):
            arguments.append(kinds.get(str(argument.type)))
    return arguments


def changed(arguments, change):
    return [change(x) if isinstance(x, torch.Tensor) else x for x in arguments]


def moved_bits(func, arguments, rng):
    """Where the function gives an element other bits than in one contiguous tensor and one thread."""
    torch.set_num_threads(1)
    expected, numel = func(*arguments), arguments_numel(arguments)
    start = rng.randrange(numel)
    stop = min(numel, start + rng.choice([1, 7, 63, 300]))
    for threads in (1, rng.randint(2, 7)):
        torch.set_num_threads(threads)
        if not equal_bits(func(*arguments), expected):
            yield f"{threads} threads"
        if not equal_bits(func(*changed(arguments, strided)), expected):
            yield "strided"
        if not equal_bits(func(*changed(arguments, lambda x: x[start:stop])), expected[start:stop]):
            yield f"{start} to {stop} of {numel}"


def arguments_numel(arguments):
    return next(x.numel() for x in arguments if isinstance(x, torch.Tensor))


def test_elementwise_functions_do_not_know_where_a_number_lies():
    rng, found, num_judged = random.Random(0), {}, 0
    for func in rng.sample(elementwise_operators(), 100):
        dtype = rng.choice([*FLOATS, torch.float32, torch.complex64])
        arguments = arguments_of(func, rng.choice([70, 1_001, 5_000, 33_001]), dtype, rng)
        try:
            plain = func(*arguments)
        except (RuntimeError, TypeError):
            # No function of this dtype, or of these arguments.
            continue
        if not isinstance(plain, torch.Tensor) or not (plain.is_floating_point() or plain.is_complex()):
            continue
        num_judged += 1
        with batch_invariant_mode():
            places = [*moved_bits(func, arguments, rng)]
        if places:
            found[f"{func} {dtype}"] = places
    assert found == {}
    assert num_judged > 35


OF_INTEGERS = {f.__name__: f for f in (torch.exp, torch.cosh, torch.sigmoid, torch.rsqrt, torch.log1p, torch.sin)}
OF_INTEGERS |= {"pow": lambda x: torch.pow(0.97, x), "atan2": lambda x: torch.atan2(x, x + 3)}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_functions_of_integers_do_not_know_where_a_number_lies(name):
    x = torch.arange(40).repeat(29).view(40, 29).remainder(37)
    with batch_invariant_mode():
        expected = OF_INTEGERS[name](x)
        for rows in (x, x.t().contiguous().t(), strided(x)):
            for size in (1, 7, 40):
                parts = [OF_INTEGERS[name](part) for part in rows.split(size)]
                assert equal_bits(torch.cat(parts), expected)
    torch.testing.assert_close(expected, OF_INTEGERS[name](x))


def of_many(function, *others):
    return lambda x: function([x, x + 1], *others)


FOREACH = {
    "cosh": of_many(torch._foreach_cosh),
    "rsqrt": of_many(torch._foreach_rsqrt),
    "pow": of_many(torch._foreach_pow, 2.3),
    "sub": lambda x: torch._foreach_sub([x], [x.sin()], alpha=0.7),
    "cosh of integers": lambda x: torch._foreach_cosh([(9 * x).int()]),
    "sigmoid_": lambda x: (y := [x.clone()], torch._foreach_sigmoid_(y))[0],
}


@pytest.mark.parametrize("name", ["logsumexp", "mean", "sum"])
def test_reductions_of_integers_in_columns_do_not_depend_on_the_batch(name):
    for seed in range(5):
        # Sums of such numbers round.
        largest, generator = 4 if name == "logsumexp" else 1 << 30, torch.Generator().manual_seed(seed)
        rows = torch.randint(0, largest, (127, 33), generator=generator, dtype=torch.int32).t()
        keywords = {} if name == "logsumexp" else {"dtype": torch.float32}
        with batch_invariant_mode():
            reduced = getattr(torch, name)(rows, 1, **keywords)
            assert torch.equal(torch.cat([getattr(torch, name)(row, 1, **keywords) for row in rows.split(1)]), reduced)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FOREACH)
def test_functions_of_many_tensors_are_those_of_each(name, dtype):
    x = randn(40, 33, dtype=dtype).abs()
    with batch_invariant_mode():
        expected = FOREACH[name](x)
        for parts in zip(*(FOREACH[name](part) for part in x.split(7)), strict=True):
            assert any(equal_bits(torch.cat(parts), whole) for whole in expected)
    assert all(torch.allclose(a.float(), b.float(), rtol=1e-2) for a, b in zip(expected, FOREACH[name](x), strict=True))


@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.sigmoid, F.softplus, torch.rsqrt, F.glu])
def test_what_is_called_in_models_is_close_to_torch_and_laid_out_like_it(function):
    x = randn(7, 5, 26).abs()
    for layout in (x, x.transpose(0, 1), strided(x), x[:, 1:]):
        plain = function(layout)
        with batch_invariant_mode():
            ours = function(layout)
        assert (ours.shape, ours.stride(), ours.dtype) == (plain.shape, plain.stride(), plain.dtype)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [torch.mul, torch.div, Tensor.mul_, Tensor.div_])
def test_a_row_divides_by_the_length_by_which_it_divides_in_a_batch(function, dtype):
    lengths = torch.arange(1, 4001)[:, None]
    x = 10 * randn(4000, 1, dtype=dtype).abs()
    with batch_invariant_mode():
        expected = function(x.clone(), lengths)
        # Many of these numbers do not fit into 16 bits.
        alone = [function(x[i : i + 1].clone(), lengths[i : i + 1]) for i in range(2, 4000, 19)]
        without_dimensions = [function(x[i].clone(), lengths[i, 0]) for i in range(2, 4000, 19)]
    assert equal_bits(torch.cat(alone), expected[2::19])
    assert equal_bits(torch.stack(without_dimensions), expected[2::19])


VIEWS_IN_PLACE = {
    "squeeze_": lambda x: x.unsqueeze(1).squeeze_(1),
    "squeeze_ of several": lambda x: x[:, None, None].squeeze_((1, 2)),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
}


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS_IN_PLACE)
def test_what_only_looks_at_a_tensor_in_another_way_passes_in_place_too(name, grad):
    with grad(), batch_invariant_mode():
        assert torch.equal(VIEWS_IN_PLACE[name](randn(5, 7)), VIEWS_IN_PLACE[name](randn(5, 7).clone()))
    assert torch.equal(VIEWS_IN_PLACE[name](randn(5, 7)), VIEWS_IN_PLACE[name](randn(5, 7)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_of_rows_are_those_of_the_rows_alone(dtype):
    levels = torch.tensor([0.1, 0.37, 0.9], dtype=dtype)
    for function in (lambda x: x.quantile(0.3, dim=-1), lambda x: x.nanquantile(levels, dim=-1).movedim(0, -1)):
        x = randn(29, 33, dtype=dtype)
        with batch_invariant_mode():
            expected = function(x)
            assert equal_bits(torch.cat([function(row) for row in x.split(1)]), expected)
        assert equal_bits(expected, function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.7, 1.3), (0, 1)])
def test_products_with_a_bias_of_one_row_are_those_of_all(beta, alpha, dtype):
    a, v, w, bias = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(29, 33), (33,), (29,), (29, 33)]))
    addmv = lambda bias, a: torch.addmv(bias, a, v, beta=beta, alpha=alpha)  # noqa: E731
    addmm = lambda bias, a: torch.addmm(bias, a, v[:, None], beta=beta, alpha=alpha)  # noqa: E731
    addr = lambda bias, w: torch.addr(bias, w, v, beta=beta, alpha=alpha)  # noqa: E731
    for function, arguments in ((addmv, (w, a)), (addmm, (w[:, None], a)), (addr, (bias, w))):
        with batch_invariant_mode():
            expected = function(*arguments)
            for size in (1, 10):
                parts = [function(*part) for part in zip(*(x.split(size) for x in arguments), strict=True)]
                assert equal_bits(torch.cat(parts), expected)
        torch.testing.assert_close(expected, function(*arguments), rtol=3e-2 if dtype.itemsize == 2 else 1e-4, atol=0.1)


@pytest.mark.parametrize("p", [1, 2, 3.0, math.inf])
def test_a_distance_does_not_depend_on_the_number_of_threads(p):
    a, b = randn(70_001), randn(70_001, seed=1)
    with batch_invariant_mode():
        torch.set_num_threads(1)
        expected = torch.dist(a, b, p=p)
        torch.set_num_threads(3)
        assert equal_bits(torch.dist(a, b, p=p), expected)
    torch.testing.assert_close(expected, torch.dist(a, b, p=p), rtol=1e-4, atol=0)


def test_functions_that_write_are_those_that_return():
    x, out = randn(3, 5), torch.empty(0)
    with batch_invariant_mode():
        expected = F.silu(x)
        assert equal_bits(F.silu(x.clone(), inplace=True), expected)
        assert equal_bits(torch.sigmoid(x, out=out), x.sigmoid())
        assert equal_bits(out, x.sigmoid())
        assert equal_bits(x.t().clone().t().exp_(), x.exp())
        assert torch.exp(torch.tensor(0.0)) == 1
        assert F.silu(torch.empty(0, 4)).shape == (0, 4)


@searching(20)
@given(numel=st.integers(0, 3_000_000), num_threads=st.integers(1, 96), is_gelu=st.booleans())
def test_every_thread_gets_whole_vectors_and_little_is_added(numel, num_threads, is_gelu):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: num_threads)
        length = filled(numel, is_gelu=is_gelu)
    assert numel <= length < numel + 64 * num_threads
    shares = num_threads if is_gelu and length > 16_384 else max(1, min(num_threads, -(-length // 32_768)))
    assert -(-length // shares) % 64 == 0


ROW_FUNCTIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh") + F.gelu(x),
    "sigmoid and softplus": lambda x: x.sigmoid() * F.softplus(x),
    "glu": lambda x: F.glu(torch.cat([x, x + 1], -1)),
    "mean": lambda x: x.mean(-1),
    "sum, its dimension kept": lambda x: x.sum(-1, keepdim=True),
    "sum over two": lambda x: x.sum((1, 2)),
    "sum over the middle": lambda x: x.sum(1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax over the middle": lambda x: x.softmax(1),
    "log_softmax over the middle": lambda x: x.log_softmax(1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "log-prob": lambda x: x - x.logsumexp(-1, keepdim=True),
    "variance": lambda x: x.var(-1),
    "variance and mean": lambda x: torch.stack(torch.var_mean(x, -1, keepdim=True)).movedim(0, -1),
    "deviation": lambda x: x.std((1, 2)),
    "norm": lambda x: F.normalize(x, dim=-1) + x.norm(dim=-1, keepdim=True),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "product": lambda x: (1 + x / 100).prod(-1),
    "dot": lambda x: torch.stack([torch.dot(row[0], row[-1]) for row in x]),
    "complex product": lambda x: torch.view_as_real(torch.complex(x, x + 1) * torch.polar(x.abs(), x)),
}


@for_each("name", ROW_FUNCTIONS)
def test_a_row_has_its_bits_in_any_batch_layout_and_number_of_threads(name):
    function, rng = ROW_FUNCTIONS[name], random.Random(name)
    for trial in range(2):
        dtype = torch.float32 if trial == 0 or name.startswith("complex") else rng.choice(FLOATS)
        # Alone, a row of more than 32,768 numbers is one that threads share.
        shapes = (rng.randint(2, 3), 1, rng.randint(33_000, 40_000)), (rng.randint(2, 7), 3, rng.randint(1, 3000))
        x = randn(*shapes[trial > 0], dtype=dtype, seed=trial)
        with batch_invariant_mode():
            torch.set_num_threads(1)
            expected = torch.cat([function(row[None]) for row in x])
            for threads in (1, rng.randint(2, 7)):
                torch.set_num_threads(threads)
                layouts = (strided(x), x.movedim(0, -1).contiguous().movedim(-1, 0))
                for batch in (x, rng.choice(layouts)) if threads > 1 else layouts:
                    assert equal_bits(function(batch), expected), (threads, dtype, [*x.shape], batch.stride())
                part = slice(len(x) - 1, None) if threads > 1 else slice(0, rng.randint(1, len(x)))
                assert equal_bits(function(x[part]), expected[part]), (threads, dtype, [*x.shape], part)
        torch.set_num_threads(1)
        torch.testing.assert_close(expected, function(x), rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.var, torch.std, torch.nansum, torch.logsumexp])
def test_a_sum_over_experts_is_about_a_token(function, dtype):
    for width in (72, 80, 1):
        x = randn(16, 75, width, dtype=dtype)
        with batch_invariant_mode():
            expected = function(x, 0)
            for size in (1, 4):
                parts = [function(part, 0) for part in x.split(size, 1)]
                assert equal_bits(torch.cat(parts), expected), (width, size)


def layer_norm_by_hand(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [lambda x: x.var(-1), lambda x: x.std(-1, keepdim=True), layer_norm_by_hand])
def test_the_variance_of_a_row_alone_is_that_of_the_row_in_a_batch(function, dtype):
    for width in (3, 33, 300, 1001):
        x = randn(40, width, dtype=dtype)
        with batch_invariant_mode():
            expected = function(x)
            assert equal_bits(torch.cat([function(row) for row in x.split(1)]), expected), width
            assert equal_bits(torch.stack([function(row) for row in x]), expected), width


GRADIENTS = {
    **{f.__name__: f for f in (F.softplus, F.elu, F.selu, F.celu, F.silu, F.gelu, F.mish, F.hardswish, F.logsigmoid)},
    **{f.__name__: f for f in (F.hardsigmoid, F.hardtanh, F.leaky_relu, F.softshrink, F.hardshrink, F.tanhshrink)},
    "glu": lambda x: F.glu(torch.cat([x, x + 1], -1)),
    "glu over the middle": lambda x: F.glu(torch.stack([x, x + 1], 1), 1),
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.3)),
    "rrelu": F.rrelu,
    "smooth L1": lambda x: F.smooth_l1_loss(x, x.detach() / 3, reduction="none", beta=0.7),
    "Huber": lambda x: F.huber_loss(x, x.detach() / 3, reduction="none", delta=0.7),
    "squared error": lambda x: F.mse_loss(x, x.detach() / 3, reduction="none"),
    "soft margin": lambda x: F.soft_margin_loss(x, x.detach().sign(), reduction="none"),
    "binary cross entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().cos().square(), reduction="none"),
    "softmax": lambda x: x.softmax(-1),
    "softmax over the middle": lambda x: torch.stack([x, x + 1], 1).softmax(1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "variance": lambda x: x.var(-1, unbiased=False),
    "norm": lambda x: F.normalize(x, dim=-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "cumulative sum": lambda x: x.cumsum(-1),
}


def gradient_of_rows(function, x, rows):
    x = x[rows].clone().requires_grad_()
    y = function(x)
    slope = randn(29, *y.shape[1:], dtype=y.dtype, seed=7)[rows]
    return torch.autograd.grad(y, x, slope)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@for_each("name", GRADIENTS)
def test_the_gradient_of_a_row_has_its_bits_in_any_batch(name, dtype):
    rng = random.Random(name)
    for width in (1, 300):
        x = randn(29, width, dtype=dtype, scale=2.0)
        with batch_invariant_mode():
            expected = gradient_of_rows(GRADIENTS[name], x, slice(None))
            for batch, start in ((x, rng.randrange(1, 29)), (strided(x), rng.randrange(1, 29)), (strided(x), 0)):
                rows = slice(start, start + rng.choice([1, 1, 10]) if start else 17)
                torch.set_num_threads(rng.randint(1, 3))
                assert equal_bits(gradient_of_rows(GRADIENTS[name], batch, rows), expected[rows]), (width, rows)
        torch.set_num_threads(1)
        plain = gradient_of_rows(GRADIENTS[name], x, slice(None))
        torch.testing.assert_close(expected, plain, rtol=2e-2 if dtype in FLOATS[1:] else 1e-4, atol=2e-2)


def of_statistics(norm):
    """A batch norm that is not in training, of weight, bias, mean and variance."""
    return lambda x: norm(x, *(randn(33, dtype=x.dtype, seed=seed).abs() for seed in range(4)), 0.1, 1e-5)[0]


OF_CHANNELS = {
    "group norm": lambda x: F.group_norm(x, 3),
    "instance norm": F.instance_norm,
    "batch norm": of_statistics(lambda x, w, b, mean, var, *rest: (F.batch_norm(x, mean, var, w, b),)),
    "batch norm of exported models": of_statistics(aten._native_batch_norm_legit_no_training),
    "batch norm without update": of_statistics(aten._batch_norm_no_update),
    "pools": lambda x: F.avg_pool2d(x, 3) + F.max_pool2d(x, 3),
    "mean of a picture": lambda x: F.adaptive_avg_pool2d(x, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_channels_that_lie_apart_have_the_bits_of_those_that_lie_together(name, dtype):
    function, x = OF_CHANNELS[name], randn(3, 33, *((33, 40) if "picture" in name else (7, 9)), dtype=dtype)
    with batch_invariant_mode():
        expected, gradient = function(x), gradient_of_rows(function, x, slice(0, 3))
        for batch in (x.to(memory_format=torch.channels_last), strided(x)):
            for rows in (slice(None), slice(1, 2)):
                own = batch[rows].detach().requires_grad_()
                output = function(own)
                slope = randn(29, *output.shape[1:], dtype=dtype, seed=7)[:3][rows]
                slope = slope.to(memory_format=torch.channels_last)
                assert equal_bits(output.detach(), expected[rows])
                assert equal_bits(torch.autograd.grad(output, own, slope)[0], gradient[rows])
    torch.testing.assert_close(expected, function(x), rtol=1e-2, atol=1e-2)


def test_a_gradient_that_nobody_has_reviewed_is_refused():
    x = randn(1, 1, 3, 3).requires_grad_()
    outside = F.grid_sample(x, torch.zeros(1, 2, 2, 2), align_corners=False)
    with pytest.raises(NotImplementedError, match="grid_sampler_2d_backward"), batch_invariant_mode():
        outside.sum().backward()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_columns_without_a_share_change_no_bit_of_the_gradient_of_a_softmax(dtype):
    shares, slope, rng = randn(4, 200, dtype=dtype).softmax(-1), randn(4, 200, dtype=dtype, seed=1), random.Random(0)
    with batch_invariant_mode():
        expected = aten._softmax_backward_data(slope, shares, -1, dtype)
        for _ in range(10):
            width = rng.randint(201, 900)
            places = torch.tensor(sorted(rng.sample(range(width), 200)))
            wide, wide_slope = torch.zeros(4, width, dtype=dtype), randn(4, width, dtype=dtype, seed=2)
            wide[:, places], wide_slope[:, places] = shares, slope
            result = aten._softmax_backward_data(wide_slope, wide, -1, dtype)
            assert equal_bits(result[:, places], expected)
    exact = shares.double() * (slope.double() - (shares.double() * slope.double()).sum(-1, keepdim=True))
    assert (expected.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_reductions_without_a_kernel_are_refused_on_cuda_but_for_those_over_the_batch():
    with FakeTensorMode():
        x, experts = torch.empty(4, 8, device="cuda"), torch.empty(2, 4, 8, device="cuda")
    with batch_invariant_mode():
        assert x.norm().shape == torch.linalg.vector_norm(x).shape == ()
        assert x.var(0).shape == experts.var((0, 1)).shape == (8,)
        with pytest.raises(
            NotImplementedError, match="of a row has no batch-invariant form on cuda: take means and sums"
        ):
            x.norm(dim=-1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_columns_at_minus_infinity_change_no_bit_of_a_softmax_wherever_they_are(dtype):
    x, rng = randn(4, 200, dtype=dtype, scale=4.0), random.Random(0)
    with batch_invariant_mode():
        expected = x.softmax(-1)
        for _ in range(10):
            width = rng.randint(201, 900)
            places = torch.tensor(sorted(rng.sample(range(width), 200)))
            wide = torch.full((4, width), -math.inf, dtype=dtype)
            wide[:, places] = x
            result = wide.softmax(-1)
            assert equal_bits(result[:, places], expected)
            assert result.count_nonzero() == expected.count_nonzero()
        assert torch.full((2, 3), -math.inf).softmax(-1).isnan().all()
        assert torch.tensor([[1.0, math.inf, 2.0], [math.nan, 1.0, 2.0]]).softmax(-1).isnan().all()
    exact = x.double().softmax(-1)
    # Rounded are the differences to the highest, up to 32, and float16 has no numbers below 2**-24.
    tolerance = 32 * torch.finfo(dtype).eps * exact + 2.0**-24 * (dtype == torch.float16)
    assert ((expected.double() - exact).abs() <= tolerance + 1e-300).all()


def test_a_softmax_of_equal_columns_is_exact():
    with batch_invariant_mode():
        assert (torch.zeros(1, 1 << 20).softmax(-1) == 2.0**-20).all()
        with pytest.raises(NotImplementedError, match="at most 1048576 columns, got 1048577"):
            torch.zeros(1, (1 << 20) + 1).softmax(-1)


def test_a_row_has_the_same_members_alone_and_in_a_batch_where_dtypes_differ():
    generator = torch.Generator().manual_seed(0)
    members = torch.randint(-3000, 3000, (34, 300), dtype=torch.int32, generator=generator)
    tests = (torch.randn(10_200, generator=generator) * 2000).half()
    expected = torch.stack([(row.half()[:, None] == tests).any(1) for row in members])
    assert not torch.equal(torch.isin(members, tests), expected), "torch does it right by itself"
    with batch_invariant_mode():
        assert torch.equal(torch.isin(members, tests), expected)
        assert all(torch.equal(torch.isin(row, tests), of_row) for row, of_row in zip(members, expected, strict=True))
