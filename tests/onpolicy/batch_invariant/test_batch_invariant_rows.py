# SPDX-License-Identifier: Apache-2.0
"""A number's bits depend on its own row alone, for whatever the mode lets through on a CPU."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import equal_bits, randn
from rows import for_each
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _threads_are_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


ELEMENTWISE = {
    **{f.__name__: f for f in (torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.rsqrt, torch.log1p)},
    **{f.__name__: f for f in (F.silu, F.gelu, F.softplus, F.elu, F.mish)},
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "pow": lambda x: x.pow(2.3),
    "pow of numbers": lambda x: torch.pow(0.97, x),
    "atan2": lambda x: torch.atan2(x, x + 3),
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "add with a factor": lambda x: torch.add(x, x.cos(), alpha=0.7),
    "addcmul": lambda x: torch.addcmul(x, x, x + 1, value=0.3),
    "in place": lambda x: x.clone().sigmoid_(),
}


@for_each("name, dtype", [(name, dtype) for name in ELEMENTWISE for dtype in FLOATS])
def test_elementwise_functions_do_not_know_where_a_number_lies(name, dtype):
    function, rng = ELEMENTWISE[name], random.Random(name)
    x = randn(rng.choice([1_001, 5_000, 33_001]), dtype=dtype).abs()
    with batch_invariant_mode():
        torch.set_num_threads(1)
        expected = function(x)
        start = rng.randrange(len(x))
        part = slice(start, start + rng.choice([1, 7, 63, 300]))
        for threads in (1, rng.randint(2, 7)):
            torch.set_num_threads(threads)
            for found, of in ((function(x), expected), (function(strided(x)), expected)):
                assert equal_bits(found, of), (name, dtype, threads)
            assert equal_bits(function(x[part]), expected[part]), (name, dtype, threads)
    torch.testing.assert_close(expected, function(x), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "pow of numbers", "atan2"])
def test_functions_of_integers_do_not_know_where_a_number_lies(name):
    x = torch.arange(40).repeat(29).view(40, 29).remainder(37)
    with batch_invariant_mode():
        expected = ELEMENTWISE[name](x)
        for rows in (x, x.t().contiguous().t(), strided(x)):
            for size in (1, 7, 40):
                assert equal_bits(torch.cat([ELEMENTWISE[name](part) for part in rows.split(size)]), expected)


@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.sigmoid, F.softplus, torch.rsqrt])
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


def test_functions_in_place_are_those_that_return():
    x = randn(3, 5)
    with batch_invariant_mode():
        assert equal_bits(F.silu(x.clone(), inplace=True), F.silu(x))
        assert equal_bits(x.t().clone().t().exp_(), x.exp())
        assert torch.exp(torch.tensor(0.0)) == 1
        assert F.silu(torch.empty(0, 4)).shape == (0, 4)


ROW_FUNCTIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh") + F.gelu(x),
    "sigmoid and softplus": lambda x: x.sigmoid() * F.softplus(x),
    "mean": lambda x: x.mean(-1),
    "sum, its dimension kept": lambda x: x.sum(-1, keepdim=True),
    "sum over two": lambda x: x.sum((1, 2)),
    "sum over the middle": lambda x: x.sum(1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax over the middle": lambda x: x.softmax(1),
    "log_softmax over the middle": lambda x: x.log_softmax(1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "log-prob": lambda x: x - x.logsumexp(-1, keepdim=True),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


@for_each("name", ROW_FUNCTIONS)
def test_a_row_has_its_bits_in_any_batch_layout_and_number_of_threads(name):
    function, rng = ROW_FUNCTIONS[name], random.Random(name)
    for trial in range(2):
        dtype = torch.float32 if trial == 0 else rng.choice(FLOATS)
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


def test_a_logsumexp_of_float64_is_computed_in_float64():
    x = randn(6, 200, dtype=torch.float64)
    # Beyond the range of exp, and infinite.
    x[1:3] += torch.tensor([[2e3], [-2e3]])
    x[3], x[4, 7], x[5, 7] = -torch.inf, torch.inf, -torch.inf
    with batch_invariant_mode():
        ours = x.logsumexp(-1)
    torch.testing.assert_close(ours, x.logsumexp(-1), rtol=1e-14, atol=0)


GRADIENTS = {
    **{f.__name__: f for f in (F.softplus, F.elu, F.silu, F.gelu)},
    "softmax": lambda x: x.softmax(-1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "product": lambda x: x @ randn(x.shape[-1], 5, dtype=x.dtype, seed=3),
    "loss": lambda x: F.cross_entropy(x, torch.arange(len(x)) % x.shape[-1], reduction="none"),
    "rows": lambda x: x[torch.arange(len(x)).flip(0)],
    "log-prob": lambda x: x.log_softmax(-1).gather(-1, torch.zeros(len(x), 1, dtype=torch.long)),
}


@for_each("name", GRADIENTS)
def test_gradients_are_those_of_torch(name):
    function, x = GRADIENTS[name], randn(29, 300).requires_grad_()
    with batch_invariant_mode():
        ours = function(x)
        slope = randn(*ours.shape, seed=7)
        (gradient,) = torch.autograd.grad(ours, x, slope)
    (plain,) = torch.autograd.grad(function(x), x, slope)
    torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_columns_at_minus_infinity_change_no_bit_of_a_softmax_wherever_they_are(dtype):
    x, rng = 4 * randn(4, 200, dtype=dtype), random.Random(0)
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
