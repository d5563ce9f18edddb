# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and gradients from hidden states: against float64, in both backends, on drawn cases."""

from __future__ import annotations

import pytest
import torch
from hidden_cases import Case, answered, assert_near, drawn, judged, with_tiles
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mis_ext.scoring import KeptColumns, hidden, score_hidden


@pytest.fixture(params=["one tile", "many tiles"])
def passes(request, monkeypatch) -> int:
    """How many times the gradient of the weight is added to, at most."""
    if request.param == "one tile":
        return 1
    with_tiles(monkeypatch, tile=200, slopes=500, states=100)
    return 40


@pytest.mark.parametrize("first_seed", range(0, 80, 20))
def test_drawn_cases_are_what_float64_says(backend, passes, first_seed) -> None:
    # The interpreter takes a tenth of a second for each launch.
    for seed in range(first_seed, first_seed + (20 if backend == "eager" else 2)):
        case = drawn(seed)
        found = answered(case)
        assert found.log_prob_T.dtype == torch.float32
        assert found.weight_grad.dtype == found.hidden_grad.dtype == case.hidden_NE.dtype
        assert_near(case, found, judged(case), passes=passes)


def test_leading_dimensions_change_no_bit(backend, passes) -> None:
    case = plain(rows=6)
    wanted = answered(case)
    found = answered(case._replace(hidden_NE=case.hidden_NE.view(2, 3, -1)))
    assert torch.equal(found.log_prob_T, wanted.log_prob_T)
    assert torch.equal(found.hidden_grad.view_as(wanted.hidden_grad), wanted.hidden_grad)
    assert torch.equal(found.weight_grad, wanted.weight_grad)


def test_a_weight_that_is_transposed_is_the_same(backend, passes) -> None:
    case = plain(rows=6)
    turned = case._replace(weight_VE=case.weight_VE.t().contiguous().t())
    assert_near(case, answered(turned), judged(case), passes=passes)


def plain(*, rows: int, dtype: torch.dtype = torch.float32, **keys) -> Case:
    """A case without anything special."""
    generator = torch.Generator().manual_seed(3)
    hidden_NE, weight_VE = torch.randn(rows, 7, generator=generator), torch.randn(60, 7, generator=generator)
    num_tokens = len(keys.get("row_T", range(rows)))
    token_T = torch.randint(60, (num_tokens,), generator=generator)
    grad_2T = torch.randn(2, num_tokens, generator=generator)
    return Case(hidden_NE.to(dtype), weight_VE.to(dtype), None, token_T, {"entropy": "gradient"} | keys, {}, grad_2T)


# --- what must not matter


@pytest.mark.parametrize(
    "head",
    [{}, {"soft_cap": 3.0, "logit_scale": 0.5}, {"entropy": "value"}],
    ids=["plain", "capped", "no gradient of the entropy"],
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice encountered")
def test_what_no_gradient_reaches_changes_nothing(backend, passes, poison, head) -> None:
    """Neither a state that scores no token, nor one whose token has no gradient, nor what stands in for padding."""
    case = plain(rows=9, row_T=torch.tensor([4, 0, 5, 2, 8]), vocab_size=50, **head)
    case = case._replace(token_T=case.token_T % 50, grad_2T=case.grad_2T * torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]))
    wanted = answered(case)
    bad = case._replace(hidden_NE=case.hidden_NE.clone(), weight_VE=case.weight_VE.clone())
    bad.hidden_NE[[1, 4, 2, 7]] = poison
    bad.weight_VE[50:] = poison
    found = answered(bad)
    assert torch.equal(found.log_prob_T[[1, 2, 4]], wanted.log_prob_T[[1, 2, 4]])
    assert torch.equal(found.hidden_grad, wanted.hidden_grad)
    assert torch.equal(found.weight_grad, wanted.weight_grad)
    assert not found.hidden_grad[[1, 2, 3, 4, 6, 7]].any()
    assert not found.weight_grad[50:].any()


def test_a_token_outside_of_the_vocabulary_cannot_be_drawn(backend, passes) -> None:
    case = plain(rows=3, vocab_size=50)._replace(token_T=torch.tensor([50, 3, -1]))
    assert (answered(case).log_prob_T == -torch.inf).tolist() == [True, False, True]


def test_no_token_is_no_gradient(backend, passes) -> None:
    case = plain(rows=4, row_T=torch.zeros(0, dtype=torch.int64))
    found = answered(case)
    assert found.log_prob_T.shape == (0,)
    assert not found.hidden_grad.any()
    assert not found.weight_grad.any()


def test_what_needs_no_gradient_gets_none(backend, passes) -> None:
    case = plain(rows=6)
    wanted = answered(case)
    for frozen in range(2):
        leaves = [case.hidden_NE.clone(), case.weight_VE.clone()]
        leaves[1 - frozen].requires_grad_()
        scores = score_hidden(*leaves, case.token_T)
        torch.autograd.backward(scores, tuple(case.grad_2T))
        assert leaves[frozen].grad is None
        assert torch.equal(leaves[1 - frozen].grad, (wanted.weight_grad, wanted.hidden_grad)[frozen])
    assert not score_hidden(case.hidden_NE, case.weight_VE, case.token_T).log_prob_T.requires_grad


def test_an_entropy_of_which_only_the_value_is_wanted_has_no_gradient(backend) -> None:
    leaf = plain(rows=3).weight_VE.requires_grad_()
    scores = score_hidden(torch.randn(2, 7), leaf, torch.tensor([1, 2]), entropy="value")
    assert not scores.entropy_T.requires_grad
    assert torch.autograd.grad(scores.log_prob_T.sum(), leaf)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_deterministic_mode_change_no_bit(backend, passes, dtype) -> None:
    case = plain(rows=8, row_T=torch.tensor([7, 0, 3]), dtype=dtype)
    wanted = answered(case)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = answered(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if a is not None)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_loss_that_is_computed_again_for_its_backward_pass_has_the_same_gradient(backend, use_reentrant) -> None:
    case = plain(rows=5)

    def loss(hidden_NE: torch.Tensor) -> torch.Tensor:
        scores = score_hidden(hidden_NE, case.weight_VE, case.token_T)
        return (scores.log_prob_T * 2.0 - scores.entropy_T).sum()

    leaf = case.hidden_NE.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    checkpoint(loss, leaf, use_reentrant=use_reentrant).backward()
    assert torch.equal(leaf.grad, wanted)


def test_tiles_are_added_up_in_float32(monkeypatch) -> None:
    """The gradient of hidden states in bfloat16, in 60 tiles of columns: as near to float64 as in one."""
    generator = torch.Generator().manual_seed(4)
    shapes = (64, 32), (1800, 32)
    hidden_NE, weight_VE = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    keys = {"entropy": "gradient", "temperature": 4.0}
    token_T, grad_2T = torch.arange(64), torch.randn(2, 64, generator=generator)
    case = Case(hidden_NE, weight_VE, None, token_T, keys, {"temperature": 4.0}, grad_2T)
    wanted = judged(case).hidden_grad
    errors = []
    for columns in (1800, 30):
        with_tiles(monkeypatch, tile=64 * columns, slopes=64 * columns, states=64 * 32)
        errors.append((answered(case).hidden_grad.double() - wanted).norm())
    assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize(
    ("rows", "keys", "made"), [(4, {}, [5, 3, 5]), (4, {"soft_cap": 3.0}, [5] * 3), (8, {}, [5, 10, 10])]
)
def test_of_few_tokens_tiles_stay_for_one_backward_pass(monkeypatch, rows, keys, made) -> None:
    """Of five tiles the last two, for which the forward pass has room; a cap is taken off in their place."""
    with_tiles(monkeypatch, tile=48, slopes=96, states=56)
    monkeypatch.setattr(hidden, "COLUMNS", 12)
    case, counts, gradients, logits = plain(rows=rows), [], [], hidden._Head.logits

    def counted(*given: object) -> None:
        counts[-1] += 1
        logits(*given)

    monkeypatch.setattr(hidden._Head, "logits", counted)
    leaves = [case.hidden_NE.requires_grad_(), case.weight_VE.requires_grad_()]
    counts.append(0)
    scores = score_hidden(*leaves, case.token_T, **keys)
    for _ in range(2):
        counts.append(0)
        gradients.append(torch.autograd.grad(scores, leaves, tuple(case.grad_2T), retain_graph=True))
    wanted = judged(case._replace(naive=keys))
    torch.testing.assert_close(gradients[0], (wanted.hidden_grad.float(), wanted.weight_grad.float()))
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    assert counts == made


# --- the gradient of the weight


def test_an_embedding_that_is_the_head_too_gets_both_gradients(backend) -> None:
    case = plain(rows=5)
    weight = case.weight_VE.double().requires_grad_()
    token_T = case.token_T

    def hidden_of(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_T.roll(1), weight).tanh()

    (found,) = torch.autograd.grad(score_hidden(hidden_of(weight), weight, token_T).log_prob_T.sum(), weight)
    logits = hidden_of(weight) @ weight.t()
    (wanted,) = torch.autograd.grad(logits.log_softmax(-1)[torch.arange(5), token_T].sum(), weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_out", [None, False, True])
def test_main_grad_takes_the_gradient_of_the_weight(passes, dtype, zero_out) -> None:
    """Megatron-Core's flag: what autograd is given in its place is dropped by a hook, and added where that is zeros."""
    case = plain(rows=9, dtype=dtype)
    weight = torch.nn.Parameter(case.weight_VE.clone())
    weight.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    if zero_out is not None:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero_out
    for _ in range(2):
        scores = score_hidden(case.hidden_NE, weight, case.token_T, gradient_accumulation_fusion=True)
        torch.autograd.backward(scores, tuple(case.grad_2T))
        if zero_out is None:
            assert weight.grad is None
        else:
            assert weight.grad_added_to_main_grad
            assert weight.grad.shape == weight.shape
            assert weight.grad.dtype == dtype
            assert not zero_out or not weight.grad.any()
            weight.grad = None
    # In float32 however many micro-batches there are: only the slopes are rounded to the dtype of the operands.
    float64 = judged_plain(case)
    reach = judged_plain(case, absolute=True)
    near = 2 * (reach * torch.finfo(dtype).eps + 1e-6 * (reach + 1.0))
    assert ((weight.main_grad.double() - 1.0 - 2.0 * float64).abs() <= near).all()


def judged_plain(case: Case, *, absolute: bool = False) -> torch.Tensor:
    """``[V, E]``: the gradient of the weight in float64, or the sum of the absolute values of its terms."""
    logits = (case.hidden_NE.double() @ case.weight_VE.double().t()).requires_grad_()
    log_p_TV = logits.log_softmax(-1)
    log_prob_T = log_p_TV[torch.arange(len(case.token_T)), case.token_T]
    entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    (slope_TV,) = torch.autograd.grad((log_prob_T * case.grad_2T[0] + entropy_T * case.grad_2T[1]).sum(), logits)
    rows_TE = case.hidden_NE.double()
    return slope_TV.abs().t() @ rows_TE.abs() if absolute else slope_TV.t() @ rows_TE


# --- memory


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("with_kept", [False, True])
def test_no_tensor_has_tokens_and_vocabulary(monkeypatch, with_kept) -> None:
    # Triton's interpreter copies storages.
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    with_tiles(monkeypatch, tile=400, slopes=800, states=160)
    num_tokens, size, width = 40, 300, 8
    leaves = [torch.randn(num_tokens, width, requires_grad=True), torch.randn(size, width, requires_grad=True)]
    kept = None
    if with_kept:
        kept = KeptColumns(torch.arange(40), torch.arange(40), torch.ones(40, dtype=torch.bool))
    with Largest() as forward:
        scores = score_hidden(*leaves, torch.arange(num_tokens), kept=kept)
    loss = (scores.log_prob_T + scores.entropy_T).sum()
    with Largest() as backward:
        loss.backward()
    # The weight, which is larger than any tile, and six sums of each token.
    assert forward.elements <= size * width
    assert backward.elements <= size * width


@pytest.mark.parametrize(("number", "most"), [(0, 5), (1, 5), (5, 5), (300, 256), (1000, 384), (248_320, 8192), (9, 0)])
def test_parts_are_equal_and_none_is_larger(number, most) -> None:
    size = hidden._even(number, most)
    parts = list(hidden.slices(number, size))
    assert [each.start for each in parts] == [0, *(each.stop for each in parts[:-1])]
    assert parts[-1].stop == number
    assert size <= max(most, 1)
    assert len(parts) == max(-(-number // max(most, 1)), 1)


# --- refusals


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"logit_scale": -1.0}, ValueError, "logit_scale must be in"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap must be in"),
        ({"entropy": "gradients"}, ValueError, r"entropy must be one of gradient \| value \| none, got 'gradients'"),
        (
            {"weight": torch.zeros(5, 4)},
            ValueError,
            r"weight must be \[V, 3\], with E of hidden, got shape \[5, 4\]",
        ),
        ({"weight": torch.zeros(5, 3).bfloat16()}, TypeError, "weight is torch.bfloat16, but hidden is torch.float32"),
        ({"weight": torch.zeros(0, 3)}, ValueError, r"weight has shape \[0, 3\]: neither V nor E may be 0"),
        (
            {"hidden": torch.zeros(2, 0), "weight": torch.zeros(5, 0)},
            ValueError,
            r"weight has shape \[5, 0\]: neither V nor E may be 0",
        ),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \[4\], and weight has \[5, 3\]"),
        (
            {"token_T": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            r"token_T has shape \[3\], but there are 2 hidden sta",
        ),
        ({"token_T": torch.zeros(2)}, TypeError, "token_T must be int64 or int32, got torch.float32"),
        ({"row_T": torch.zeros(3, dtype=torch.int64)}, ValueError, r"row_T has shape \[3\], and token_T has \[2\]"),
        ({"row_T": torch.zeros(2, dtype=torch.bool)}, TypeError, "row_T must be int64 or int32, got torch.bool"),
        ({"hidden": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "hidden must be floating-point, got torch.int64"),
        ({"hidden": torch.zeros(2, 3, device="meta")}, ValueError, "weight is on cpu, but hidden is on meta"),
        ({"vocab_size": 6}, ValueError, r"vocab_size must be in \[1, 5\] for 1 ranks with 5 rows of weight, got 6"),
        ({"tp_rank": 1}, ValueError, r"tp_rank must be in \[0, 0\], because tp_group has 1 ranks, got 1"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel must be False if tp_group is None"),
        (
            {"kept": KeptColumns(torch.zeros(0), torch.zeros(0), torch.ones(3, dtype=torch.bool))},
            ValueError,
            r"kept.is_recorded_T has shape \[3\], and token_T has \[2\]",
        ),
        (
            {"weight": torch.zeros(5, 3, requires_grad=True), "gradient_accumulation_fusion": True},
            ValueError,
            r"weight.main_grad must have the shape \[5, 3\] of weight, got None",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, text) -> None:
    given = {
        "hidden": torch.zeros(2, 3),
        "weight": torch.zeros(5, 3),
        "token_T": torch.zeros(2, dtype=torch.int64),
    } | change
    with pytest.raises(error, match=text):
        score_hidden(given.pop("hidden"), given.pop("weight"), given.pop("token_T"), **given)


def test_sums_of_integers_are_refused() -> None:
    weight = torch.zeros(5, 3, requires_grad=True)
    weight.main_grad = torch.zeros(5, 3, dtype=torch.int32)
    given = torch.zeros(2, 3), weight, torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"weight.main_grad must be floating-point, got torch.int32"):
        score_hidden(*given, gradient_accumulation_fusion=True)


def test_autocast_is_named_where_it_gave_the_states_another_dtype() -> None:
    given = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"must have the same dtype$"):
        score_hidden(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"pass weight.to\(hidden.dtype\)"):
        score_hidden(*given)


def test_a_state_of_two_tokens_is_scored_twice_and_has_no_gradient(backend) -> None:
    case = plain(rows=3, row_T=torch.tensor([2, 0, 2]))
    leaf = case.weight_VE.clone().requires_grad_()
    scores = score_hidden(case.hidden_NE, leaf, case.token_T, row_T=case.keys["row_T"])
    log_p_NV = (case.hidden_NE @ leaf.t()).log_softmax(-1)
    torch.testing.assert_close(scores.log_prob_T, log_p_NV[case.keys["row_T"], case.token_T])
    with pytest.raises(RuntimeError, match="row_T has a row twice, and only one token's gradient fits"):
        scores.log_prob_T.sum().backward()
