# SPDX-License-Identifier: Apache-2.0
"""A head whose vocabulary is split over tensor-parallel ranks: the numbers of one rank, with one collective a pass."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hidden_cases import Answer, Case, answered, assert_near, drawn, judged, with_tiles
from process_ranks import joined, on_processes, run_processes
from thread_ranks import Rank, run_ranks

from mis_ext.scoring import hidden, score_hidden


def part_of(case: Case, rank: int, ranks: int) -> Case:
    """The rows of the weight, and of the bias, that a rank has."""
    width = len(case.weight_VE) // ranks
    rows = slice(rank * width, (rank + 1) * width)
    bias_V = None if case.bias_V is None else case.bias_V[rows]
    return case._replace(weight_VE=case.weight_VE[rows], bias_V=bias_V)


def whole_of(answers: list[Answer], *, sequence_parallel: bool = False) -> Answer:
    """What one rank would have answered."""
    for answer in answers:
        assert not isinstance(answer, Exception), answer
        # Every rank computes the loss, from the same bits.
        assert torch.equal(answer.log_prob_T, answers[0].log_prob_T)
        assert answer.entropy_T is None or torch.equal(answer.entropy_T, answers[0].entropy_T)
        assert sequence_parallel or torch.equal(answer.hidden_grad, answers[0].hidden_grad)
    hidden_grads = [answer.hidden_grad for answer in answers]
    return answers[0]._replace(
        hidden_grad=torch.cat(hidden_grads) if sequence_parallel else hidden_grads[0],
        weight_grad=torch.cat([answer.weight_grad for answer in answers]),
        bias_grad=None if answers[0].bias_grad is None else torch.cat([answer.bias_grad for answer in answers]),
    )


@pytest.mark.parametrize("seed", range(100, 106))
def test_parts_of_a_vocabulary_are_as_one(backend, monkeypatch, seed) -> None:
    if seed % 2:
        with_tiles(monkeypatch, tile=200, slopes=500, states=100)
    ranks = 2 + seed % 3
    case = drawn(seed, ranks=ranks, most_rows=40 if backend == "eager" else 6)
    joined = Counter()

    def answer(rank: Rank) -> Any:
        group = rank.groups.cp_group
        found = answered(part_of(case, rank.cp_rank, ranks), tp_group=group, tp_rank=rank.cp_rank)
        joined[rank.cp_rank] = group.turn
        return found

    # Of each rank the gradient of hidden states is rounded before it is added.
    assert_near(case, whole_of(run_ranks(answer, cp_size=ranks)), judged(case), passes=40, ranks=ranks)
    assert joined == dict.fromkeys(range(ranks), 2)


def test_a_rank_of_padding_alone_adds_nothing(backend) -> None:
    case = drawn(7, ranks=3, most_rows=6)
    case.keys.pop("kept", None), case.naive.pop("kept", None)
    size = len(case.weight_VE) // 3
    for vocab_size in (1, size, 2 * size):
        some = case._replace(
            token_T=case.token_T % vocab_size,
            keys=case.keys | {"vocab_size": vocab_size},
            naive=case.naive | {"vocab_size": vocab_size},
        )

        def answer(rank: Rank, some: Case = some) -> Any:
            return answered(part_of(some, rank.cp_rank, 3), tp_group=rank.groups.cp_group, tp_rank=rank.cp_rank)

        assert_near(some, whole_of(run_ranks(answer, cp_size=3)), judged(some), ranks=3)


@pytest.mark.parametrize("with_rows", [False, True])
def test_states_that_are_split_over_the_sequence_are_gathered(backend, with_rows) -> None:
    case = drawn(3, ranks=2, most_rows=6)
    case = case._replace(keys={"entropy": "gradient"}, naive={}, hidden_NE=case.hidden_NE[:1].repeat(6, 1).contiguous())
    case = case._replace(hidden_NE=case.hidden_NE * torch.linspace(0.1, 1.0, 6).unsqueeze(-1).to(case.hidden_NE.dtype))
    rows = [4, 1, 5] if with_rows else list(range(6))
    keys = {"row_T": torch.tensor(rows)} if with_rows else {}
    tokens = torch.arange(len(rows)) % len(case.weight_VE)
    grads = torch.randn(2, len(rows), generator=torch.Generator().manual_seed(0))
    case = Case(case.hidden_NE, case.weight_VE, case.bias_V, tokens, case.keys | keys, {"rows": rows}, grads)

    def answer(rank: Rank) -> Any:
        part = part_of(case, rank.cp_rank, 2)
        part = part._replace(hidden_NE=case.hidden_NE[rank.cp_rank * 3 : rank.cp_rank * 3 + 3])
        return answered(part, tp_group=rank.groups.cp_group, tp_rank=rank.cp_rank, sequence_parallel=True)

    assert_near(case, whole_of(run_ranks(answer, cp_size=2), sequence_parallel=True), judged(case), ranks=2)


# --- errors


def failing(rank: Rank, change: dict[str, Any]) -> Any:
    group = rank.groups.cp_group
    given = {"hidden": torch.ones(2, 3), "weight": torch.ones(4, 3, requires_grad=True)}
    given |= change if rank.cp_rank == 1 else {}
    keys = {name: given.pop(name) for name in ("temperature", "vocab_size") if name in given}
    return score_hidden(
        given["hidden"], given["weight"], torch.tensor([1, 5]), tp_group=group, tp_rank=rank.cp_rank, **keys
    )


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be"),
        ({"weight": torch.ones(4, 2)}, ValueError, r"got shape \[4, 2\]"),
        ({"hidden": torch.ones(3, 3)}, ValueError, "there are 3 hidden states"),
        ({"vocab_size": 9}, ValueError, r"vocab_size must be in \[1, 8\] for 2 ranks with 4 rows of weight, got 9"),
        ({"vocab_size": 6.5}, TypeError, "vocab_size must be an integer"),
        ({"hidden": torch.tensor(1.0)}, ValueError, "hidden must be"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
    ],
)
def test_what_one_rank_refuses_no_rank_waits_for(monkeypatch, change, error, text) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    good, bad = run_ranks(lambda rank: failing(rank, change), cp_size=2)
    assert isinstance(good, RuntimeError)
    assert "tensor-parallel rank 1 failed to score" in str(good)
    with pytest.raises(error, match=text):
        raise bad


def test_a_rank_without_memory_leaves_none_waiting_in_either_pass(monkeypatch) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    here = {}

    def fails(rank: Rank, name: str) -> Any:
        def work(*args: Any) -> Any:
            if here["rank"] == 1:
                raise torch.OutOfMemoryError("no memory")
            return original(*args)

        original = getattr(hidden, name)
        leaf = torch.ones(2, 3, requires_grad=True)
        with mock.patch.object(hidden, name, work):
            here["rank"] = rank.cp_rank
            scores = score_hidden(
                leaf, torch.ones(4, 3), torch.tensor([1, 5]), tp_group=rank.groups.cp_group, tp_rank=rank.cp_rank
            )
            here["rank"] = rank.cp_rank
            return torch.autograd.grad(scores.log_prob_T.sum(), leaf)[0]

    good, bad = run_ranks(lambda rank: fails(rank, "_row_sums"), cp_size=2)
    assert "tensor-parallel rank 1 failed" in str(good)
    assert isinstance(bad, torch.OutOfMemoryError)

    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    # The tiles are still there while the error is on its way.
    with mock.patch.object(torch.Tensor, "new_full", no_memory):
        good, bad = run_ranks(lambda rank: fails(rank, "_add_gradients"), cp_size=2)
    # Not a part of a gradient, with which it would train.
    assert good.isnan().all()
    assert isinstance(bad, torch.OutOfMemoryError)


# --- gloo processes


def check_parts(rank: int) -> None:
    """Each width of tensor parallelism that four ranks can have."""
    groups = {ranks: [dist.new_group(list(range(ranks)))] for ranks in (2, 4)}
    for ranks, (group,) in groups.items():
        if rank >= ranks:
            continue
        for seed in range(200, 206):
            case = drawn(seed, ranks=ranks, most_rows=20)
            found = answered(part_of(case, rank, ranks), tp_group=group, tp_rank=rank)
            answers: list[Any] = [None] * ranks
            dist.all_gather_object(answers, found.on("cpu"), group=group)
            assert_near(case, whole_of(answers), judged(case), ranks=ranks)


def check_sequence_parallel(rank: int, ranks: int = 4, device: str = "cpu") -> None:
    case = drawn(211, ranks=ranks)
    states_NE = torch.randn(8, case.weight_VE.shape[1], generator=torch.Generator().manual_seed(1))
    rows = [5, 0, 7]
    case = Case(
        states_NE.to(case.weight_VE.dtype),
        case.weight_VE,
        None,
        torch.tensor([0, 1, 2]) % len(case.weight_VE),
        {"entropy": "gradient", "row_T": torch.tensor(rows)},
        {"rows": rows},
        torch.randn(2, 3, generator=torch.Generator().manual_seed(2)),
    )
    part = part_of(case, rank, ranks)._replace(hidden_NE=case.hidden_NE.chunk(ranks)[rank])
    found = answered(part.on(device), tp_group=dist.group.WORLD, tp_rank=rank, sequence_parallel=True)
    answers: list[Any] = [None] * ranks
    dist.all_gather_object(answers, found.on("cpu"))
    assert_near(case, whole_of(answers, sequence_parallel=True), judged(case), ranks=ranks)


CHECKS = {"parts": check_parts, "sequence parallel": check_sequence_parallel}

test_processes_are_as_one = on_processes(CHECKS, world_size=4, seconds=60)


# --- GPUs over NCCL


def parts_over_nccl(rank: int, folder: str) -> None:
    """Two devices, a part of the vocabulary each; then the sequence split as well."""
    torch.cuda.set_device(rank)
    # All ranks are of this machine; multicast over NVLink is one more way to hang.
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    with joined(rank, 2, folder, seconds=120, backend="nccl"):
        for backend, seed in itertools.product(("eager", "triton"), range(200, 208)):
            os.environ["MIS_EXT_BACKEND"] = backend
            case = drawn(seed, ranks=2, most_rows=20)
            found = answered(part_of(case, rank, 2).on("cuda"), tp_group=dist.group.WORLD, tp_rank=rank)
            answers: list[Any] = [None] * 2
            dist.all_gather_object(answers, found.on("cpu"))
            assert_near(case, whole_of(answers), judged(case), ranks=2)
        check_sequence_parallel(rank, ranks=2, device="cuda")


@pytest.mark.gpu
@pytest.mark.distributed
def test_nccl_gives_the_numbers_of_one_rank(tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    # A process that has asked for CUDA cannot be forked.
    run_processes(parts_over_nccl, str(tmp_path), world_size=2, start_method="spawn")
