# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over tensor-parallel ranks: the numbers of one rank, with one collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scoring_cases import Case, answered, assert_near, drawn, judged
from thread_ranks import Rank, run_ranks

from mis_ext.scoring import KeptColumns, score_tokens, scores

pytestmark = pytest.mark.usefixtures("backend")


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
        kept_TV = (torch.arange(vocab_size) == token_T[:, None]).index_fill(1, torch.tensor([0]), True)
        token_N, id_N = kept_TV.nonzero().unbind(-1)
        keys = {"vocab_size": vocab_size, "kept": KeptColumns(id_N, token_N, torch.ones(5, dtype=torch.bool))}
        assert_as_one(Case(logits, token_T, keys, grads, grads.flip(0), kept_TV), 3)


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


class NoMemory:
    def row_sums(self, *_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be"),
        ({"logits": torch.ones(2, 4, dtype=torch.int64)}, TypeError, "logits must be floating-point"),
        ({"row_T": torch.tensor([0])}, ValueError, r"row_T has shape \[1\]"),
        ({"logits": None}, TypeError, "logits must be a tensor, got NoneType"),
        ({"token_T": "abc"}, TypeError, "token_T must be a tensor, got str"),
        ({"token_T": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "token_T is on meta"),
        ({}, torch.OutOfMemoryError, "no memory"),
    ],
)
def test_what_one_rank_refuses_no_rank_waits_for(monkeypatch, num_tokens, change, error, text) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    choose = scores.choose_backend
    monkeypatch.setattr(scores, "choose_backend", lambda x: NoMemory() if x.shape[1] == 1 else choose(x))
    none_N = torch.zeros(0, dtype=torch.int64)
    kept = KeptColumns(none_N, none_N, torch.zeros(num_tokens, dtype=torch.bool))
    if "token_T" in change:
        change = {"token_T": change["token_T"][:num_tokens]}
    if error is torch.OutOfMemoryError:
        change = {"logits": torch.ones(num_tokens, 1)}
    for said in ({"entropy": "none"}, {"entropy": "value"}, {"entropy": "gradient", "kept": kept}):

        def answer(rank: Rank, said: dict[str, Any] = said) -> Any:
            given = {"logits": torch.ones(num_tokens, 4), "token_T": torch.arange(num_tokens), **said}
            given |= change if rank.cp_rank == 1 else {}
            logits, token_T = given.pop("logits"), given.pop("token_T")
            return score_tokens(logits, token_T, tp_group=rank.groups.cp_group, tp_rank=rank.cp_rank, **given)

        good, bad = run_ranks(answer, cp_size=2)
        assert isinstance(good, RuntimeError), good
        assert "tensor-parallel rank 1 failed to score" in str(good)
        with pytest.raises(error, match=text):
            raise bad


@pytest.mark.parametrize("token_T", [torch.zeros(3, dtype=torch.int64), None])
def test_the_error_that_came_first_is_raised_where_none_can_be_told(token_T) -> None:
    def allgather(*_: Any) -> Any:
        raise RuntimeError("no backend for this device")

    group = SimpleNamespace(_replica_id=0, size=lambda: 2, allgather=allgather)
    with pytest.raises((ValueError, TypeError), match=r"temperature must be|token_T must be a tensor"):
        score_tokens(torch.ones(3, 4), token_T, temperature=-1.0, tp_group=group)
