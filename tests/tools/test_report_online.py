# SPDX-License-Identifier: Apache-2.0
"""The report's numbers from a running job: of all ranks' samples, written once, and never nothing without a word."""

import argparse
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from thread_ranks import Rank, current_rank, run_ranks
from zigzag import take

import mis_ext
from mis_ext.hosts.groups import Groups
from mis_ext.tools.report import Part, online, summarize
from mis_ext.tools.report.online import PREFIX

LENGTHS = (40, 1, 7, 0, 33, 2, 1, 16)
PROMPTS = (3, 1, 9, 2, 1, 30, 1, 5)
STREAMS = ("log_probs", "rollout_log_probs")


def rollout_of(numbers: range = range(8)) -> dict:
    """Some of eight samples, as slime holds them without context parallelism."""
    generator = torch.Generator().manual_seed(5)

    def drawn(length: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (length,), generator=generator)

    # Multiples of 1/64, whose sums are exact in any order: then so is any cut into ranks.
    behavior = [drawn(length, -200, -20) / 64 for length in LENGTHS]
    proximal = [each + drawn(len(each), -10, 11) / 64 for each in behavior]
    masks = [drawn(length, 0, 4).clamp_max(1).int() for length in LENGTHS]
    # What lies under a mask may be anything, and a trained token may lack a log-prob.
    proximal[0][masks[0] == 0] = torch.nan
    behavior[4][masks[4].nonzero()[2]] = -torch.inf
    whole = {
        "log_probs": proximal,
        "rollout_log_probs": behavior,
        "loss_masks": masks,
        "total_lengths": [prompt + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)],
        "response_lengths": [*LENGTHS],
    }
    return {name: [column[number] for number in numbers] for name, column in whole.items()}


def local(data: dict, *, cp_rank: int, cp_size: int) -> dict:
    """What a context-parallel rank holds: its part of the log-probs, and whole masks."""
    place = {"cp_rank": cp_rank, "cp_size": cp_size, "total_lengths": data["total_lengths"]}
    return data | {name: take(data[name], **place) for name in STREAMS}


def expected() -> dict[str, float]:
    """What the report says of the eight samples."""
    data = rollout_of()
    part = Part.of_lists(proximal=data["log_probs"], behavior=data["rollout_log_probs"], masks=data["loss_masks"])
    numbers = summarize([part]).scalars()
    # Nobody says which samples have one prompt.
    left_out = ("reward", "num_prompts", "k3_error", "abs_mean_error", "mean_length_error", "reward_error")
    return {f"{PREFIX}{name}": value for name, value in numbers.items() if name not in left_out}


def assert_is_of_all_samples(found: dict[str, float]) -> None:
    # Sums of exponentials are in float64, and their order is that of the ranks.
    assert found == pytest.approx(expected(), rel=1e-12, abs=0.0, nan_ok=True)
    assert found["mismatch/num_sequences"] == len(LENGTHS)
    assert found["mismatch/num_without_ratio"] == 1
    assert found["mismatch/k3"] > 0.0


def megatron(groups: Groups, *, tp_rank: int = 0, is_last: bool = True) -> ModuleType:
    """Megatron-Core's ``parallel_state``, of which slime's ranks know their place."""
    module = ModuleType("megatron.core.parallel_state")
    answers = {
        "model_parallel_is_initialized": True,
        "is_pipeline_last_stage": is_last,
        "get_tensor_model_parallel_rank": tp_rank,
    }
    for name, axis in (("context", "cp"), ("data", "dp")):
        for ours, theirs in (("rank", "rank"), ("size", "world_size"), ("group", "group")):
            answers[f"get_{name}_parallel_{theirs}"] = getattr(groups, f"{axis}_{ours}")
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    return module


@pytest.fixture
def board(monkeypatch) -> list[dict]:
    """What reaches wandb, in which the host has a run open."""
    logged: list[dict] = []
    stand_in = SimpleNamespace(run=object(), log=logged.append, define_metric=lambda name, step_metric: None)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return logged


def test_a_rollout_has_the_numbers_of_the_report(board, monkeypatch) -> None:
    said = []
    monkeypatch.setattr("mis_ext.tools.report.online._logger.info", lambda text, *values: said.append(text % values))
    data = rollout_of()
    before = {name: [*column] for name, column in data.items()}
    # As slime calls it: three positional arguments, and it looks at no result.
    assert mis_ext.log_mismatch(argparse.Namespace(), 3, data) is None
    (numbers,) = board
    assert numbers.pop("mismatch/rollout_id") == 3
    assert_is_of_all_samples(numbers)
    assert "mismatch of rollout 3, of the samples of all ranks: k3 0.0" in said[0]
    assert data.keys() == before.keys()
    assert all(new is old for name in data for new, old in zip(data[name], before[name], strict=True))


def test_without_wandb_the_numbers_go_to_tensorboard(monkeypatch, tmp_path) -> None:
    written = {}

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name, step] = value

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setenv("MISMATCH_LOG_DIR", str(tmp_path))
    mis_ext.log_mismatch(None, 2, rollout_of())
    assert_is_of_all_samples({name: value for (name, step), value in written.items() if step == 2})


@pytest.mark.parametrize("stage", [{"tp_rank": 1}, {"is_last": False}], ids=str)
def test_one_rank_of_the_last_stage_writes(stage, board, monkeypatch) -> None:
    # slime opens its run on the first rank of the last stage, whatever its global rank is.
    monkeypatch.setenv("RANK", "6")
    data = rollout_of()
    if not stage.get("is_last", True):
        for name in STREAMS:
            del data[name]
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron(Groups(), **stage))
    mis_ext.log_mismatch(None, 0, data)
    assert board == []
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron(Groups()))
    mis_ext.log_mismatch(None, 0, rollout_of())
    assert len(board) == 1


@pytest.mark.parametrize("missing", STREAMS)
@pytest.mark.parametrize("how", ["absent", None, []], ids=str)
def test_a_rollout_without_log_probs_is_refused(missing, how, board) -> None:
    data = rollout_of() | {missing: how}
    if how == "absent":
        del data[missing]
    other = STREAMS[missing == STREAMS[0]]
    with pytest.raises(ValueError, match=rf"mis_ext\.log_mismatch: rollout 7 has no {missing}; .*--get-mismatch") as e:
        mis_ext.log_mismatch(None, 7, data)
    assert f"no {other}" not in str(e.value)
    assert board == []


def test_a_host_without_rollout_data_is_refused() -> None:
    # As Miles calls it.
    with pytest.raises(ValueError, match=r"passes no rollout data \(Miles\); run `mis-ext report` on its dumps"):
        mis_ext.log_mismatch(argparse.Namespace())


def test_a_rollout_without_samples_has_no_numbers_but_counts(board) -> None:
    mis_ext.log_mismatch(None, 0, rollout_of(range(0)) | dict.fromkeys(STREAMS))
    (numbers,) = board
    assert numbers["mismatch/num_sequences"] == 0
    assert torch.tensor(numbers["mismatch/k3"]).isnan()


# --- over ranks


@pytest.fixture
def threads(monkeypatch) -> None:
    """Ranks are threads, which exchange objects as they are."""
    monkeypatch.setattr(online, "gather_objects", lambda value, group: group.exchange(value) if group else [value])
    monkeypatch.setattr(online, "global_rank", current_rank)


def share_of(rank: Rank) -> dict:
    """Rank 0 has five of eight samples, the others fewer."""
    begins = {1: (0, 8), 2: (0, 5, 8), 4: (0, 5, 6, 6, 8)}[rank.groups.dp_size]
    mine = rollout_of(range(begins[rank.dp_rank], begins[rank.dp_rank + 1]))
    return local(mine, cp_rank=rank.cp_rank, cp_size=rank.groups.cp_size)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_rank_has_the_numbers_of_all_samples(cp_size, threads) -> None:
    def numbers(rank: Rank) -> dict:
        return online.rollout_mismatch(share_of(rank), rank.groups)

    for found in run_ranks(numbers, cp_size=cp_size, dp_size=4 // cp_size):
        assert_is_of_all_samples(found)


def test_the_first_rank_writes(threads, board, monkeypatch) -> None:
    def log(rank: Rank) -> int:
        before = len(board)
        monkeypatch.setattr(online, "find_groups", lambda: rank.groups)
        mis_ext.log_mismatch(None, 4, share_of(rank))
        return len(board) - before

    assert [found if isinstance(found, Exception) else None for found in run_ranks(log, dp_size=2)] == [None, None]
    assert [numbers["mismatch/num_sequences"] for numbers in board] == [8.0]


@pytest.mark.parametrize(
    ("wrong", "kind"), [({"log_probs": None}, ValueError), ({"loss_masks": 3}, TypeError)], ids=str
)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_where_one_rank_has_wrong_data_nobody_waits_for_it_and_all_know(cp_size, wrong, kind, threads) -> None:
    def fail(rank: Rank) -> dict:
        data = share_of(rank) | (wrong if rank.number == 3 else {})
        return online.rollout_mismatch(data, rank.groups)

    *others, last = run_ranks(fail, cp_size=cp_size, dp_size=4 // cp_size)
    assert isinstance(last, kind)
    assert next(iter(wrong)) in str(last)
    assert all(isinstance(each, RuntimeError) and "failed on rank 3;" in str(each) for each in others)
