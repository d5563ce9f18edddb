# SPDX-License-Identifier: Apache-2.0
"""Numbers for a dashboard are those of one call with everything: over micro-batches and ranks, with one read."""

import math
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_ranks import on_processes

import mis_ext
from mis_ext import GroupNumber, Mean, PackedLayout, scalars
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.own_trainer import agreed_scalars

LENGTHS = (8, 4, 16, 4, 8, 2)
PATIENCE = timedelta(seconds=60)
CORRECTION = {"use_tis": True, "use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.4, "mis_metrics": "all"}
LOSS = CORRECTION | {"mis_loss_method": "ppo"}


def mean(total: float, count: float) -> Mean:
    return Mean(torch.tensor(total), torch.tensor(count))


def number(value: float) -> GroupNumber:
    return GroupNumber(torch.tensor(value))


def streams(rows: slice | list[int] = slice(None)) -> dict[str, torch.Tensor]:
    """Six padded responses, of which the second has no log-prob of the engine: nothing of it is measured."""
    generator = torch.Generator().manual_seed(3)
    behavior = -torch.rand(6, 16, generator=generator) * 2 - 0.01
    proximal = (behavior + torch.randn(6, 16, generator=generator) / 4).clamp_max(-0.01)
    mask = (torch.arange(16) < torch.tensor(LENGTHS)[:, None]).int()
    behavior[1] = torch.nan
    given = {"proximal_logprobs": proximal, "behavior_logprobs": behavior, "response_mask": mask}
    return {name: each[rows] for name, each in given.items()}


def corrected(rows: slice | list[int] = slice(None)) -> dict:
    return mis_ext.correct_padded(CORRECTION, **streams(rows)).metrics


def trained(rows: slice | list[int] = slice(None)) -> dict:
    given = streams(rows)
    advantages = torch.linspace(-1.0, 1.0, 6)[rows]
    current = given["proximal_logprobs"] + 0.03
    return mis_ext.policy_loss_from_log_probs(LOSS, current_logprobs=current, advantages=advantages, **given).metrics


def means_of(metrics: dict) -> dict[str, float]:
    """Without what is one number of a call: the whole loss has it as a mean over its calls."""
    numbers = {name for name, each in corrected().items() if isinstance(each, GroupNumber)}
    assert len(numbers) > 5
    found = {f"train/{name}": float(each.value()) for name, each in metrics.items() if name not in numbers}
    assert len(found) > 10
    return found


def near(expected: dict[str, float]) -> object:
    """Totals are float32 sums of tens of tokens, in another order."""
    return pytest.approx(expected, rel=2e-6, abs=1e-7, nan_ok=True)


def test_a_mean_is_total_by_count_of_all_calls() -> None:
    # 4 of 8, where the mean of 3/2 and 1/6 is 5/6.
    assert scalars({"mis_a": mean(3.0, 2.0)}, {"mis_a": mean(1.0, 6.0)}) == {"train/mis_a": 0.5}


def test_a_group_number_is_the_mean_of_the_calls_that_measured_it() -> None:
    calls = [{"mis_a": number(each)} for each in (1.0, math.nan, 4.0)]
    assert scalars(*calls, prefix="") == {"mis_a": 2.5}
    assert scalars({"mis_a": number(math.inf)}, {"mis_a": number(1.0)}) == {"train/mis_a": math.inf}


def test_what_no_call_measured_is_nan_and_what_a_call_lacks_is_no_zero() -> None:
    found = scalars({"a": mean(0.0, 0.0), "b": number(math.nan)}, {"c": mean(6.0, 2.0)}, {"c": mean(0.0, 0.0)})
    assert [*found] == ["train/a", "train/b", "train/c"]
    assert math.isnan(found["train/a"])
    assert math.isnan(found["train/b"])
    assert found["train/c"] == 3.0
    assert scalars() == {}


def test_counts_beyond_what_float32_can_count_add_up() -> None:
    # In float32 2^24 + 1 is 2^24.
    calls = [{"a": mean(2.0**24, 2.0**24)}, {"a": mean(0.0, 1.0)}]
    assert scalars(*calls)["train/a"] == 2**24 / (2**24 + 1)


@pytest.mark.parametrize("call", [corrected, trained])
def test_the_means_of_micro_batches_are_those_of_the_batch(call) -> None:
    whole, parts = call(), [call(rows) for rows in (slice(2), slice(2, 3), slice(3, 6))]
    expected = means_of(whole)
    for found in (scalars(whole), scalars(*parts)):
        assert {name: found[name] for name in expected} == near(expected)
        assert [*found] == [f"train/{name}" for name in whole]


def test_all_metrics_of_all_calls_are_read_from_the_device_at_once(monkeypatch) -> None:
    calls, reads = [corrected(slice(3)), corrected(slice(3, 6))], []
    whole = torch.Tensor.tolist

    def refused(*_: object) -> None:
        raise AssertionError("reads one number")

    for name in ("item", "cpu", "numpy", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda each: [reads.append(each.numel()), whole(each)][1])
    scalars(*calls)
    assert reads == [2 * (len(calls[0]) + len(calls[1]))]


def test_numbers_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="mis_a is a Tensor, not a metric of mis_ext"):
        scalars({"mis_a": torch.tensor(1.0)})
    for calls in ([corrected(), corrected()], None):
        with pytest.raises(TypeError, match=f"mappings, the metrics of each call, got a {type(calls).__name__}"):
            scalars(calls)


# --- ranks


CUTS = ([[0, 1]], [[2]], [[3], [4, 5]], [])
"""The micro-batches of four ranks: the last one has none."""


def check_ranks_without_micro_batches(rank: int) -> None:
    for call in (corrected, trained):
        found = scalars(*[call(rows) for rows in CUTS[rank]], group=dist.group.WORLD)
        expected = means_of(call())
        assert {name: found[name] for name in expected} == near(expected)


def check_same_bits_on_every_rank(rank: int) -> None:
    found = scalars(*[corrected(rows) for rows in CUTS[rank]], group=dist.group.WORLD)
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, {name: value.hex() for name, value in found.items()})
    assert all([*each.items()] == [*everyone[0].items()] for each in everyone)


def check_a_number_of_all_ranks_stays_what_it_is(rank: int) -> None:
    rows = [[0, 1], [2], [3, 4], [5]][rank]
    metrics = mis_ext.correct_padded(CORRECTION, **streams(rows), dp_group=dist.group.WORLD).metrics
    found = scalars(metrics, group=dist.group.WORLD)
    numbers = {name: each for name, each in metrics.items() if isinstance(each, GroupNumber)}
    assert len(numbers) > 2
    assert {name: found[f"train/{name}"] for name in numbers} == pytest.approx(
        {name: float(each.value()) for name, each in numbers.items()}, rel=0.0, abs=0.0, nan_ok=True
    )


def check_a_group_of_some_ranks_has_its_own_mean(rank: int) -> None:
    pairs = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    found = scalars({"a": mean(float(rank), 1.0)}, prefix="", group=pairs[rank // 2])
    assert found == {"a": 0.5 if rank < 2 else 2.5}


def check_an_error_of_one_rank_leaves_none_waiting(rank: int) -> None:
    wrong = {"mis_a": torch.tensor(1.0)} if rank == 2 else {"mis_a": mean(1.0, 2.0)}
    kind, message = (
        (TypeError, "not a metric of mis_ext") if rank == 2 else (RuntimeError, "scalars failed on rank 2 of")
    )
    with pytest.raises(kind, match=message):
        scalars(wrong, group=dist.group.WORLD)


def check_ranks_agree_on_names_and_fill_in_the_mean_of_the_others(rank: int) -> None:
    # Nothing of the second response is measured.
    ranks = [scalars(corrected(rows), prefix="") for rows in ([0, 1], [1], [2, 3], [1])]
    own, agreed = ranks[rank], agreed_scalars(corrected([[0, 1], [1], [2, 3], [1]][rank]), prefix="")
    known = {name for name, value in own.items() if not math.isnan(value)}
    assert {name: agreed[name] for name in known} == {name: own[name] for name in known}
    others = {name for name, value in ranks[0].items() if not math.isnan(value)} - known
    assert bool(others) == (rank in (1, 3))
    assert {name: agreed[name] for name in others} == {name: (ranks[0][name] + ranks[2][name]) / 2 for name in others}
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, [*agreed])
    assert all(names == everyone[0] for names in everyone)
    # No rank has measured "b", one has measured "a".
    metrics = {"a": number(2.0 if rank == 1 else math.nan), "b": mean(0.0, 0.0)}
    assert agreed_scalars(metrics, prefix="actor/") == {"actor/a": 2.0}


def check_data_parallel_ranks_of_megatron_agree(rank: int) -> None:
    groups = [dist.new_group(each) for each in ([0, 2], [1], [3])]
    group = groups[0] if rank in (0, 2) else groups[1 if rank == 1 else 2]
    megatron = types.SimpleNamespace(model_parallel_is_initialized=lambda: True, get_data_parallel_group=lambda: group)
    metrics = {"a": number(2.0 if rank == 2 else math.nan), "b": mean(0.0, 0.0)}
    with mock.patch.dict(sys.modules, {"megatron.core.parallel_state": megatron}):
        # The stage of rank 1 has no loss: its group does not call.
        found = None if rank == 1 else agreed_scalars(metrics, prefix="")
    assert found == {0: {"a": 2.0}, 1: None, 2: {"a": 2.0}, 3: {}}[rank]


def check_context_parallel_ranks_count_nothing_twice(rank: int) -> None:
    """Two ranks share each sequence, and two such pairs the batch: one group of all four."""
    whole = streams()
    # New groups are made by all ranks together.
    pairs = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    cp_rank, dp_rank = rank % 2, rank // 2
    rows = slice(3 * dp_rank, 3 * dp_rank + 3)
    lengths = LENGTHS[rows]
    total_lengths = [length + 3 for length in lengths]
    layout = PackedLayout.context_parallel(lengths, total_lengths=total_lengths, cp_rank=cp_rank, cp_size=2)
    mask_R = torch.ones(sum(lengths))
    flat = {
        name: layout.local_part(torch.cat([row[:n] for row, n in zip(whole[name][rows], lengths, strict=True)]))
        for name in ("proximal_logprobs", "behavior_logprobs")
    }
    groups = Groups.of_process_groups(cp_group=pairs[dp_rank])
    advantages = torch.cat([a.expand(n) for a, n in zip(torch.linspace(-1.0, 1.0, 6)[rows], lengths, strict=True)])
    found = mis_ext.policy_loss_from_log_probs(
        LOSS,
        current_logprobs=flat["proximal_logprobs"] + 0.03,
        advantages=layout.local_part(advantages),
        response_mask=mask_R,
        layout=layout,
        groups=groups,
        **flat,
    )
    expected = means_of(trained())
    numbers = scalars(found.metrics, group=dist.group.WORLD)
    assert {name: numbers[name] for name in expected} == near(expected)


CHECKS: dict[str, Callable[[int], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}

test_on_four_processes = on_processes(CHECKS, world_size=4, seconds=PATIENCE.seconds)
