# SPDX-License-Identifier: Apache-2.0
"""Context and data parallelism give the coefficients of one rank, for every preset and level; no host waits."""

import dataclasses

import method_losses
import pytest
import torch
from method_cases import apply, make_data, parameters
from synchronization import recorded
from thread_ranks import run_ranks
from zigzag import local_tokens

from mis_ext import PackedLayout
from mis_ext.methods import METHODS, Method, PairWeight, Score
from mis_ext.methods.batch import MISMATCH, Reductions

NEEDS_ALL_TOKENS = "m2po"
NEEDS_ALL_SEQUENCES = "reinforce_sequence_psis"
CHOSEN = {
    **{name: row(**parameters(name)) for name, row in METHODS.items() if name != NEEDS_ALL_TOKENS},
    "segment weights": Method(surrogate=Score(), factors=(PairWeight(pair=MISMATCH, level="segment"),)),
    "prefix weights": Method(surrogate=Score(), factors=(PairWeight(pair=MISMATCH, level="prefix"),)),
    "normalized tokens": Method(surrogate=Score(), factors=(PairWeight(pair=MISMATCH),), normalize_over="tokens"),
}
TOPOLOGIES = [(2, 1, "zigzag"), (4, 1, "zigzag"), (1, 2, "zigzag"), (2, 2, "contiguous")]
PROMPTS = [3, 1, 9, 2]


def part(data, mask, local):
    """The tokens at `local`, and what a rank passes."""
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.name != "sequences"}
    return method_losses.Data(**{name: value[local] for name, value in fields.items()}, sequences=[]), mask[local]


@pytest.mark.parametrize(("cp_size", "dp_size", "partition"), TOPOLOGIES)
def test_any_number_of_ranks_gives_the_coefficients_of_one(cp_size, dp_size, partition) -> None:
    data, mask, whole = make_data(seed=3, num_sequences=40)
    lengths = list(whole.response_lengths)
    wanted = {name: apply(method, data, mask, whole) for name, method in CHOSEN.items()}
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    totals = [length + PROMPTS[i % len(PROMPTS)] for i, length in enumerate(lengths)]

    def work(rank):
        own = [i for i in range(len(lengths)) if i % dp_size == rank.dp_rank]
        cp = {"cp_rank": rank.cp_rank, "cp_size": cp_size, "partition": partition}
        local = [
            starts[i] + t for i in own for t in local_tokens(total_length=totals[i], response_length=lengths[i], **cp)
        ]
        if cp_size == 1:
            layout = PackedLayout.whole([lengths[i] for i in own])
        else:
            layout = PackedLayout.context_parallel(
                [lengths[i] for i in own], total_lengths=[totals[i] for i in own], **cp
            )
        local = torch.tensor(local, dtype=torch.long)
        mine, own_mask = part(data, mask, local)
        groups = {"cp_group": rank.groups.cp_group if cp_size > 1 else None, "dp_group": rank.groups.dp_group}
        for name, method in CHOSEN.items():
            if name == NEEDS_ALL_SEQUENCES and dp_size > 1:
                with pytest.raises(ValueError, match="all sequences on one rank"):
                    apply(method, mine, own_mask, layout, **groups)
                continue
            result = apply(method, mine, own_mask, layout, **groups)
            for field in ("coefficient_T", "loss_T", "kept_T", "clipped_T"):
                expected = getattr(wanted[name], field)[local]
                torch.testing.assert_close(getattr(result, field), expected, rtol=1e-9, atol=1e-12, msg=name)
        return len(local)

    found = run_ranks(work, cp_size=cp_size, dp_size=dp_size)
    assert [rank for rank in found if isinstance(rank, Exception)] == []
    assert sum(found) == len(mask)


def test_what_needs_all_tokens_of_the_batch_refuses_to_be_split() -> None:
    data, mask, layout = make_data(seed=3)

    def work(rank):
        return apply(METHODS[NEEDS_ALL_TOKENS].method, data, mask, layout, dp_group=rank.groups.dp_group)

    found = run_ranks(work, dp_size=2)
    assert all(isinstance(rank, ValueError) and "on one rank" in str(rank) for rank in found)


def test_cap_and_pull_of_p3o_share_one_sum_over_all_ranks(monkeypatch) -> None:
    data, mask, layout = make_data(seed=3)
    sums, batch_total = [], Reductions.batch_total

    def counted(self, values_T, mask_T):
        sums.append(len(values_T))
        return batch_total(self, values_T, mask_T)

    monkeypatch.setattr(Reductions, "batch_total", counted)
    apply(METHODS["p3o"].method, data, mask, layout)
    assert sums == [3]


def test_a_split_layout_needs_its_group() -> None:
    split = PackedLayout.context_parallel([4], total_lengths=[6], cp_rank=0, cp_size=2)
    values = torch.zeros(split.num_local_tokens)
    data = method_losses.Data(values, values, values, values, values, [], values)
    with pytest.raises(ValueError, match="needs its cp_group"):
        apply(METHODS["ppo"].method, data, values, split)


@pytest.mark.parametrize("name", METHODS)
def test_no_preset_reads_a_value_or_does_other_work_on_other_data(name, monkeypatch) -> None:
    data, mask, layout = make_data(seed=3)
    method = METHODS[name].method
    apply(method, data, mask, layout)
    names = []
    for factor, used in ((1.0, mask), (0.0, torch.zeros_like(mask))):
        moved = dataclasses.replace(data, x=data.x + factor, advantages=data.advantages * factor)
        inputs = (moved.x, moved.behavior, moved.proximal, moved.reference, moved.advantages, used)
        with recorded(monkeypatch, *inputs) as recorder:
            apply(method, moved, used, layout)
        names.append(recorder.names)
    assert names[0] == names[1]
    assert 0 < len(names[0]) < 270
