# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and their gradient from logits: against float64, in both backends, on drawn cases."""

from __future__ import annotations

import pytest
import torch
from scoring_cases import Answer, Case, answered, assert_near, drawn, judged
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mis_ext.scoring import KeptColumns, chunked, score_tokens
from mis_ext.scoring.passes import unpacked

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("first_seed", range(0, 160, 20))
def test_drawn_cases_are_what_float64_says(backend, first_seed) -> None:
    # The interpreter takes a tenth of a second for each; a GPU runs all of them through the kernels.
    for seed in range(first_seed, first_seed + (20 if backend == "eager" else 2)):
        case = drawn(seed, dtypes=DTYPES if seed % 3 == 0 else DTYPES[:1])
        found = answered(case)
        assert found.gradient.dtype == case.logits.dtype
        assert_near(case, found, judged(case))


def test_a_row_wider_than_a_block_is_one_row(backend) -> None:
    """A program of the kernels reads 4,096 or 8,192 logits at a time, and writes 4,096."""
    for dtype in (torch.float32, torch.float16):
        logits = (torch.randn(3, 9001, generator=torch.Generator().manual_seed(0)) * 4.0).to(dtype)
        case = Case(logits, torch.tensor([9000, 0, 4096]), {}, torch.tensor([1.0, -2.0, 0.5]), torch.ones(3))
        assert_near(case, answered(case), judged(case))


@pytest.mark.parametrize("row", ["large", "equal", "one huge", "minus infinity but one", "half minus infinity"])
def test_extreme_logits_are_what_float64_says(backend, row) -> None:
    row_V = torch.randn(130, generator=torch.Generator().manual_seed(1))
    row_V = {
        "large": row_V * 1e4,
        "equal": torch.full_like(row_V, 3.25),
        "one huge": torch.cat([row_V[:-1], torch.tensor([3e4])]),
        "minus infinity but one": torch.cat([torch.full_like(row_V[1:], -torch.inf), row_V[:1]]),
        "half minus infinity": torch.where(torch.arange(130) % 2 == 1, row_V, -torch.inf),
    }[row]
    case = Case(row_V.repeat(3, 1), torch.tensor([129, 129, 1]), {}, torch.tensor([1.0, 0.0, 2.0]), torch.ones(3))
    if row == "minus infinity but one":
        # Of a token that cannot be drawn the log-prob is -inf, and float64's softmax has no gradient for it.
        assert answered(case).log_prob_T[2] == -torch.inf
        case = case._replace(token_T=torch.full((3,), 129))
    found, wanted = answered(case), judged(case)
    if row == "half minus infinity":
        # The textbook's gradient is NaN where 0 meets infinity.
        wanted = wanted._replace(gradient=torch.where(row_V == -torch.inf, 0.0, wanted.gradient))
    assert_near(case, found, wanted)


def test_a_token_outside_of_the_vocabulary_cannot_be_drawn(backend) -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    for tokens in ([10, 3, -1], [7, 3, 9]):
        found = score_tokens(logits, torch.tensor(tokens), vocab_size=7)
        assert (found.log_prob_T == -torch.inf).tolist() == [True, False, True]
    case = Case(logits, torch.tensor([8, 3, 9]), {"vocab_size": 7}, torch.ones(3))
    assert not answered(case).gradient[:, 7:].any()


def test_strides_change_no_bit(backend) -> None:
    case = Case(
        torch.randn(4, 30, generator=torch.Generator().manual_seed(7)),
        torch.tensor([3, 29, 0]),
        {"row_T": torch.tensor([2, 0, 3])},
        torch.tensor([1.0, -1.0, 0.5]),
        torch.tensor([0.5, 2.0, 1.0]),
    )
    spread = case._replace(
        token_T=case.token_T.repeat_interleave(2)[::2],
        keys={"row_T": case.keys["row_T"].repeat_interleave(3)[::3].int()},
        grad_T=case.grad_T.repeat_interleave(2)[::2],
    )
    assert torch.equal(answered(spread).gradient, answered(case).gradient)
    turned = case._replace(logits=case.logits.t().contiguous().t())
    assert torch.equal(answered(turned).gradient, answered(case).gradient)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_no_gradient_reaches_stays_zero_whatever_its_logits_are(backend) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    logits[1], logits[4] = torch.nan, torch.inf
    keys = {"row_T": torch.tensor([4, 0, 5, 2])}
    grads = torch.tensor([0.0, 1.0, -1.0, 0.0])
    case = Case(logits, torch.tensor([3, 7, 39, 0]), keys, grads, grads * 0.5)
    found = answered(case).gradient
    assert found.isfinite().all()
    assert not found[[1, 2, 3, 4]].any()
    clean = case._replace(logits=torch.where(logits.isfinite(), logits, 0.0))
    assert torch.equal(found, answered(clean).gradient)


def test_an_entropy_of_which_only_the_value_is_wanted_has_no_gradient(backend) -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    scores = score_tokens(logits, torch.tensor([1, 2]), entropy="value")
    assert not scores.entropy_T.requires_grad
    assert torch.autograd.grad(scores.log_prob_T.sum(), logits)[0].any()


def test_what_comes_back_may_be_changed_in_place(backend) -> None:
    leaf = torch.randn(4, 30, generator=torch.Generator().manual_seed(9), requires_grad=True)
    gradients = []
    for changes in (False, True):
        scores = score_tokens(leaf, torch.arange(4))
        log_prob_T = scores.log_prob_T.mul_(2.0) if changes else scores.log_prob_T * 2.0
        gradients += torch.autograd.grad(log_prob_T.sum() + scores.entropy_T.sum(), leaf)
    assert torch.equal(*gradients)


def test_only_the_entropy_may_carry_gradient(backend) -> None:
    leaf = torch.randn(4, 30, generator=torch.Generator().manual_seed(4), requires_grad=True)
    (found,) = torch.autograd.grad(score_tokens(leaf, torch.tensor([0, 1, 2, 3])).entropy_T.sum(), leaf)
    exact = leaf.detach().double().requires_grad_()
    log_p = exact.log_softmax(-1)
    (wanted,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


# --- in place of the logits


@pytest.mark.parametrize("seed", range(3))
def test_in_place_has_the_bits_of_a_new_gradient(backend, seed) -> None:
    case = drawn(seed, dtypes=DTYPES)
    assert torch.equal(answered(case, inplace=True).gradient, answered(case).gradient)


def test_in_place_takes_the_memory_of_the_logits(backend) -> None:
    places = []
    leaf = torch.randn(1, 6, 50, requires_grad=True)
    for inplace in (True, False):
        logits = leaf * 1
        logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
        score_tokens(logits, torch.arange(6), inplace=inplace).log_prob_T.sum().backward()
        assert (places[-1] == logits.data_ptr()) is inplace
        logits = leaf * 1
        scores = score_tokens(logits, torch.arange(6), inplace=inplace)
        (gradient,) = torch.autograd.grad(scores.log_prob_T.sum(), logits)
        assert not gradient.requires_grad


def test_who_reads_the_logits_after_them_is_told(backend) -> None:
    leaf = torch.randn(6, 50, requires_grad=True)
    logits = leaf * 1
    squares = (logits * logits).sum()
    loss = squares + score_tokens(logits, torch.arange(6), inplace=True).log_prob_T.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    scores = score_tokens(leaf * 1, torch.arange(6), inplace=True).log_prob_T.sum()
    scores.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.backward()


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_loss_that_is_computed_again_for_its_backward_pass_has_the_same_gradient(
    backend, use_reentrant, inplace
) -> None:
    leaf = torch.randn(7, 33, generator=torch.Generator().manual_seed(5), requires_grad=True)
    token_T = torch.arange(7)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        scores = score_tokens(logits, token_T, inplace=inplace)
        return (scores.log_prob_T * 2.0 - scores.entropy_T).sum()

    (wanted,) = torch.autograd.grad(loss(leaf * 1), leaf)
    checkpoint(loss, leaf * 1, use_reentrant=use_reentrant).backward()
    assert torch.equal(leaf.grad, wanted)


# --- how it computes


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_as_exact_as_a_softmax_of_divided_logits(backend, temperature) -> None:
    """As the hosts have it: float32 logits are divided first, and their highest is taken off afterwards."""
    # The interpreter takes milliseconds for each.
    num_tokens = 400 if backend == "eager" else 80
    logits = torch.randn(num_tokens, 50, generator=torch.Generator().manual_seed(8)) * 8.0
    token_T = torch.arange(num_tokens) % 50
    case = Case(logits, token_T, {"temperature": temperature}, torch.ones(num_tokens))
    exact = judged(case).log_prob_T
    usual = (logits / temperature).log_softmax(-1).gather(-1, token_T.unsqueeze(-1)).squeeze(-1)
    error, usual_error = ((x.detach() - exact).abs() for x in (answered(case).log_prob_T, usual))
    assert error.mean() <= usual_error.mean()
    assert error.max() <= usual_error.max()


def test_gradients_of_float64_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    kept = KeptColumns(torch.tensor([0, 3, 5]), torch.tensor([0, 0, 2]), torch.tensor([True, False, True]))

    def function(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return score_tokens(logits, torch.tensor([1, 8, 2]), row_T=torch.tensor([3, 0, 1]), temperature=0.7, kept=kept)

    assert torch.autograd.gradcheck(function, logits)


def test_two_runs_have_the_same_bits_in_deterministic_mode_too(backend) -> None:
    case = drawn(21)
    first = answered(case)
    torch.use_deterministic_algorithms(True)
    try:
        again = answered(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None)


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes, and how many operations there are."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.operations = self.large = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.operations += 1
        given = {each.data_ptr() for each in args if isinstance(each, torch.Tensor)}
        # Views and results in place take no memory.
        if isinstance(out, torch.Tensor) and out.data_ptr() not in given:
            self.elements = max(self.elements, out.numel())
            self.large += out.numel() > 2000
        return out


def test_on_a_cpu_the_memory_on_top_does_not_grow_with_the_logits(monkeypatch) -> None:
    monkeypatch.setitem(chunked.CHUNK, "cpu", 2000)
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    case = Case(
        torch.randn(100, 100), torch.arange(100), {"row_T": torch.arange(100)}, torch.ones(100), torch.ones(100)
    )
    logits = case.logits.clone().requires_grad_()
    with Largest() as forward:
        scores = score_tokens(logits, case.token_T, **case.keys)
    assert forward.elements <= 2000
    wanted = judged(case)
    loss = (scores.log_prob_T + scores.entropy_T).sum()
    with Largest() as backward:
        loss.backward()
    # The gradient itself, and nothing else of its size.
    assert backward.elements == logits.numel()
    assert backward.large == 1
    assert_near(case, Answer(*scores, logits.grad), wanted)


def test_the_kernels_are_launched_once_each_however_many_tokens_there_are(monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")
    counts = set()
    for num_tokens in (2, 40):
        logits = torch.randn(50, 20, requires_grad=True)
        with Largest() as operations:
            scores = score_tokens(logits, torch.zeros(num_tokens, dtype=torch.int64), row_T=torch.arange(num_tokens))
            (scores.log_prob_T + scores.entropy_T).sum().backward()
        counts.add(operations.operations)
    assert len(counts) == 1


# --- kept columns


@pytest.mark.parametrize("seed", range(8))
def test_bits_are_the_columns_that_were_kept(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 200, (), generator=generator))
    kept_TV = torch.rand(5, size, generator=generator) < 0.3
    token_N, id_N = kept_TV.nonzero().unbind(-1)
    order_N = torch.cat([torch.randperm(len(id_N), generator=generator), torch.arange(len(id_N))])
    kept = KeptColumns(id_N[order_N].int(), token_N[order_N], torch.tensor([True, True, False, True, True]))
    kept_TV[2] = True
    begin = int(torch.randint(size, (), generator=generator))
    for first, stop in ((0, size), (begin, size), (0, begin)):
        bits_TC = kept.bits(first=first, num_columns=stop - first)
        assert torch.equal(unpacked(bits_TC, stop - first), kept_TV[:, first:stop])


# --- refusals


def kept_as(**change: torch.Tensor) -> KeptColumns:
    """Two of five columns for each of two tokens."""
    id_N, token_N = torch.tensor([0, 1, 0, 3]), torch.tensor([0, 0, 1, 1])
    return KeptColumns(id_N, token_N, torch.ones(2, dtype=torch.bool))._replace(**change)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"entropy": "gradients"}, ValueError, r"entropy must be one of gradient \| value \| none, got 'gradients'"),
        ({"logits": torch.tensor(1.0)}, ValueError, "logits must be .*, got a tensor without dimensions"),
        ({"token_T": torch.zeros(3, dtype=torch.int64)}, ValueError, r"token_T has shape \[3\], but there are 2 rows"),
        (
            {"logits": torch.zeros(0, 5), "row_T": torch.tensor([0, 0])},
            ValueError,
            "token_T has 2 tokens, but there are no rows",
        ),
        ({"token_T": torch.zeros(2)}, TypeError, "token_T must be int64 or int32, got torch.float32"),
        ({"row_T": torch.zeros(3, dtype=torch.int64)}, ValueError, r"row_T has shape \[3\], and token_T has \[2\]"),
        (
            {"kept": KeptColumns(torch.zeros(0), torch.zeros(0), torch.ones(3, dtype=torch.bool))},
            ValueError,
            r"kept.is_recorded_T has shape \[3\], and token_T has \[2\]",
        ),
        (
            {"kept": kept_as(is_recorded_T=torch.ones(2))},
            TypeError,
            "kept.is_recorded_T must be bool, got",
        ),
        ({"kept": kept_as(id_N=torch.zeros(4))}, TypeError, "kept.id_N must be int64 or int32, got torch.float32"),
        (
            {"kept": kept_as(token_N=torch.zeros(3, dtype=torch.int64))},
            ValueError,
            r"kept.id_N has shape \[4\], and kept.token_N has \[3\]",
        ),
        ({"kept": tuple(kept_as())}, TypeError, "kept must be a KeptColumns, got"),
        (
            {"kept": kept_as(token_N=torch.zeros(4))},
            TypeError,
            "kept.token_N must be int64 or int32, got torch.float32",
        ),
        ({"kept": kept_as(token_N=[0, 0, 1, 1])}, TypeError, "kept.token_N must be a tensor, got list"),
        (
            {"kept": kept_as(**dict.fromkeys(("id_N", "token_N"), torch.zeros(2, 2, dtype=torch.int64)))},
            ValueError,
            r"kept.id_N has shape \[2, 2\], and kept.token_N has \[2, 2\]; both must be \[N\]",
        ),
        ({"row_T": torch.zeros(2, dtype=torch.bool)}, TypeError, "row_T must be int64 or int32, got torch.bool"),
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "logits must be floating-point, got torch.int64"),
        ({"vocab_size": 0}, ValueError, "vocab_size"),
        ({"vocab_size": 6}, ValueError, r"vocab_size must be in \[1, 5\] for 1 ranks with 5 columns of logits, got 6"),
        ({"vocab_size": 5.0}, TypeError, "vocab_size must be an integer, got 5.0"),
        ({"tp_rank": 1}, ValueError, r"tp_rank must be in \[0, 0\], because tp_group has 1 ranks, got 1"),
        ({"tp_rank": -1}, ValueError, r"tp_rank must be in \[0, 0\], because tp_group has 1 ranks, got -1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, text) -> None:
    given = {"logits": torch.zeros(2, 5), "token_T": torch.zeros(2, dtype=torch.int64)} | change
    with pytest.raises(error, match=text):
        score_tokens(given.pop("logits"), given.pop("token_T"), **given)


def test_a_row_of_two_tokens_is_scored_twice_and_has_no_gradient(backend) -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(8)).requires_grad_()
    rows, tokens = torch.tensor([2, 0, 2]), torch.tensor([1, 4, 3])
    scores = score_tokens(logits, tokens, row_T=rows)
    torch.testing.assert_close(scores.log_prob_T, logits.log_softmax(-1)[rows, tokens])
    with pytest.raises(RuntimeError, match="row_T has a row twice, and only one token's gradient fits"):
        scores.log_prob_T.sum().backward()
