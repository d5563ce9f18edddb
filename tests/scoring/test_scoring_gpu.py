# SPDX-License-Identifier: Apache-2.0
"""Scoring on a GPU: float64's numbers, the same bits twice, no wait, and no memory but the gradient's."""

import hidden_cases
import pytest
import torch
from scoring_cases import Answer, Case, answered, assert_near, drawn, judged

from mis_ext.scoring import KeptColumns, score_hidden, score_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIB = 1 << 20


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
def test_drawn_cases_are_what_float64_says(backend, first_seed) -> None:
    for seed in range(first_seed, first_seed + 10):
        case = drawn(seed, most_columns=9000, dtypes=DTYPES)
        on_gpu = case.to("cuda")
        found = answered(on_gpu)
        assert_near(case, Answer(*(None if x is None else x.cpu() for x in found)), judged(case))
        assert torch.equal(answered(on_gpu).gradient, found.gradient)
        assert torch.equal(answered(on_gpu, inplace=True).gradient, found.gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_real_vocabulary_takes_the_gradients_memory_and_none_in_place(dtype, inplace) -> None:
    num_rows, size = 1100, 151_936
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(num_rows, size, device="cuda", generator=generator) * 3.0).to(dtype).requires_grad_()
    row_T = torch.arange(50, 1050, device="cuda")
    token_T = torch.randint(size, (1000,), device="cuda", generator=generator)
    grads = torch.randn(2, 1000, device="cuda", generator=generator)
    case = Case(logits.detach().cpu(), token_T.cpu(), {"row_T": row_T.cpu()}, *grads.cpu())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = score_tokens(logits, token_T, row_T=row_T, inplace=inplace)
    (gradient,) = torch.autograd.grad(scores, logits, tuple(grads))
    peak = torch.cuda.max_memory_allocated() - before
    own = 0 if inplace else logits.numel() * logits.element_size()
    assert own <= peak <= own + 2 * MIB
    # float64 of all rows takes 1.3 GiB more than twice: some of them.
    some_T = torch.arange(0, 1000, 50)
    part = case._replace(
        logits=case.logits[50:1050][some_T],
        token_T=case.token_T[some_T],
        keys={},
        grad_T=case.grad_T[some_T],
        entropy_grad_T=case.entropy_grad_T[some_T],
    )
    found = Answer(*(x.detach().cpu()[some_T] for x in scores), gradient[50:1050].cpu()[some_T])
    assert_near(part, found, judged(part))
    assert not gradient[:50].any()
    assert not gradient[1050:].any()


def score_logits(**keys):
    return score_tokens(torch.randn(40, 500, device="cuda", requires_grad=True), **keys)


def score_head(**keys):
    hidden_NE = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VE = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return score_hidden(hidden_NE, weight_VE, **keys)


@pytest.mark.parametrize("score", [score_logits, score_head])
def test_it_never_waits_for_the_device(score) -> None:
    token_T = torch.randint(500, (30,), device="cuda")
    row_T = torch.randperm(40, device="cuda")[:30]
    kept = KeptColumns(
        torch.randint(500, (90,), device="cuda"),
        torch.arange(30, device="cuda").repeat(3),
        torch.ones(30, dtype=torch.bool, device="cuda"),
    )
    try:
        for mode in ("default", "error"):
            # What is compiled at the first call may wait.
            torch.cuda.set_sync_debug_mode(mode)
            for given in (None, kept):
                scores = score(token_T=token_T, row_T=row_T, kept=given, temperature=0.7)
                (scores.log_prob_T.sum() + scores.entropy_T.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_device_need_not_be_that_of_the_logits() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = drawn(7)
    assert_near(case, Answer(*(x.cpu() for x in answered(case.to("cuda:1")))), judged(case))


# --- from hidden states


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
@pytest.mark.parametrize("small", [False, True])
def test_drawn_heads_are_what_float64_says(monkeypatch, backend, first_seed, small) -> None:
    if small:
        hidden_cases.with_tiles(monkeypatch, tile=200, slopes=500, states=100, device="cuda")
    for seed in range(first_seed, first_seed + 10):
        case = hidden_cases.drawn(seed)
        found, again = (hidden_cases.answered(case.on("cuda")) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)
        hidden_cases.assert_near(case, found.on("cpu"), hidden_cases.judged(case), passes=40 if small else 1)


@pytest.mark.parametrize("num_tokens", [2_000, 20_000])
def test_a_head_takes_less_than_a_gibibyte_above_its_gradients(num_tokens) -> None:
    width, size = 1024, 151_936
    hidden_NE = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VE = torch.randn(size, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    token_T = torch.randint(size, (num_tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = score_hidden(hidden_NE, weight_VE, token_T, temperature=30.0)
    torch.autograd.backward(scores, tuple(torch.randn(2, num_tokens, device="cuda")))
    above = torch.cuda.max_memory_allocated() - before - hidden_NE.nbytes - weight_VE.nbytes
    assert 0 < above <= 1024 * MIB
