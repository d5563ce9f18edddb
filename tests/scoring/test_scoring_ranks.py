# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over tensor-parallel ranks: the numbers of one rank, with one collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scoring_cases import Case, answered, assert_near, drawn, judged
from thread_ranks import Rank, run_ranks


@pytest.fixture(params=["eager", "triton"], autouse=True)
def backend(request, monkeypatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("MIS_EXT_BACKEND", request.param)
    return request.param


def of_ranks(case: Case, num_ranks: int) -> tuple[list[Any], list[int]]:
    """The answer of each rank, and the number of collectives that each has joined."""
    width = case.logits.shape[-1] // num_ranks
    joined = [0] * num_ranks

    def rank_answer(rank: Rank) -> Any:
        part = case.logits[..., rank.cp_rank * width : (rank.cp_rank + 1) * width]
        group = rank.groups.cp_group
        found = answered(case._replace(logits=part), tp_group=group, tp_rank=rank.cp_rank)
        joined[rank.cp_rank] = group.turn
        return found

    return run_ranks(rank_answer, cp_size=num_ranks), joined


def assert_as_one(case: Case, num_ranks: int) -> None:
    answers, joined = of_ranks(case, num_ranks)
    for answer in answers:
        assert not isinstance(answer, Exception), answer
        # Every rank computes the loss, from the same bits.
        assert torch.equal(answer.log_prob_T, answers[0].log_prob_T)
        assert answer.entropy_T is None or torch.equal(answer.entropy_T, answers[0].entropy_T)
    whole = answers[0]._replace(gradient=torch.cat([answer.gradient for answer in answers], -1))
    assert_near(case, whole, judged(case))
    assert joined == [1] * num_ranks


@pytest.mark.parametrize("seed", range(200, 206))
def test_parts_of_a_vocabulary_are_as_one(seed) -> None:
    num_ranks = 2 + seed % 2
    assert_as_one(drawn(seed, most_columns=200, parts=num_ranks), num_ranks)


def test_a_rank_of_padding_alone_adds_nothing() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    grads = torch.linspace(-1.0, 1.0, 5)
    for vocab_size in (3, 4, 7):
        token_T = torch.tensor([0, 2, 1, vocab_size - 1, 0])
        assert_as_one(Case(logits, token_T, {"vocab_size": vocab_size}, grads, grads.flip(0)), 3)


def test_a_rank_whose_logits_are_all_minus_infinity_adds_nothing() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(2))
    logits[:3, 5:] = -torch.inf
    logits[3, :5] = -torch.inf
    case = Case(logits, torch.tensor([0, 4, 2, 9]), {}, torch.ones(4), None)
    answers, _ = of_ranks(case, 2)
    whole = answers[0]._replace(gradient=torch.cat([answer.gradient for answer in answers], -1))
    wanted = judged(case)
    assert_near(case, whole, wanted)
    again, _ = of_ranks(case._replace(entropy_grad_T=torch.ones(4)), 2)
    assert all(answer.gradient.isfinite().all() for answer in again)
