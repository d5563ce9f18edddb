# SPDX-License-Identifier: Apache-2.0
"""Properties that hold by mathematics: gates, bands and vetoes."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from cases import (
    GATES,
    VETOES,
    WEIGHTS,
    call_hook,
    correction_keys,
    drawn_samples,
    flat,
    gates_only,
    random_samples,
    sprinkle,
)
from hypothesis import given
from property_cases import ALL, FUZZ, LENGTHS, LEVELS, assert_same, weights_masks, weights_of_grid
from reference import Samples

# These bounds are far apart or near for what a ratio does in practice, and the package says so.
pytestmark = pytest.mark.filterwarnings("ignore:a geometric (weight|gate)", "ignore:a gate on ratio")


@FUZZ
@given(
    samples=drawn_samples(),
    level=st.sampled_from(LEVELS),
    bounds=st.lists(st.sampled_from([0.01, 0.1, 0.5, 0.8, 0.95, 1.0]), min_size=2, max_size=2, unique=True),
    uppers=st.lists(st.sampled_from([1.0001, 1.05, 1.25, 2.0, 10.0, 100.0]), min_size=2, max_size=2, unique=True),
    form=st.sampled_from(["gate", "mask mode", "veto"]),
)
def test_widening_a_bound_never_removes_a_kept_token(samples, level, bounds, uppers, form):
    (low_wide, low_narrow), (high_narrow, high_wide) = sorted(bounds), sorted(uppers)

    def kept(low: float, high: float) -> torch.Tensor:
        if form == "gate":
            keys = {
                "tis_level": "none",
                "use_rs": True,
                "rs_level": level,
                "rs_lower_bound": low,
                "rs_upper_bound": high,
            }
        elif form == "mask mode":
            keys = {"tis_level": level, "tis_mode": "mask", "tis_lower_bound": low, "tis_upper_bound": high}
        else:
            keys = {"rs_veto_threshold": low, "rs_veto_upper_threshold": high}
        return flat(weights_masks({"use_tis": True, "mis_guard": "warn"} | keys, samples)[1])

    narrow = kept(low_narrow, high_narrow)
    for wide in [kept(low_wide, high_narrow), kept(low_narrow, high_wide), kept(low_wide, high_wide)]:
        assert (wide >= narrow).all()


def test_gates_commute_and_together_keep_what_each_one_keeps():
    samples = random_samples(LENGTHS, seed=38, spread=25)
    gates = [
        {"level": "token", "low": 0.7, "high": 1.4},
        {"level": "geometric", "low": 0.85, "high": 1.15},
        {"level": "sequence", "low": 0.2, "high": 4.0},
    ]

    def kept(chosen: tuple) -> torch.Tensor:
        return flat(weights_masks(gates_only(*chosen), samples)[1])

    alone = [kept((gate,)) for gate in gates]
    together = alone[0] * alone[1] * alone[2]
    assert 0 < together.sum() < min(a.sum() for a in alone)
    for order in itertools.permutations(gates):
        assert torch.equal(kept(order), together)


@pytest.mark.parametrize("level", LEVELS)
def test_bands_are_closed_a_ratio_on_the_edge_is_kept_and_not_counted_as_outside(level):
    samples = Samples([torch.tensor([-0.5, -1.0])], [torch.tensor([-0.5, -1.0])], [torch.ones(2)])
    for low, high in [(1.0, 1.09), (0.92, 1.0)]:
        gate = gates_only({"level": level, "low": low, "high": high})
        mode = ALL | {"tis_level": level, "tis_mode": "mask"}
        for keys in [gate, mode | {"tis_lower_bound": low, "tis_upper_bound": high}]:
            _, masks, metrics = call_hook(keys, samples)
            assert torch.equal(masks[0], torch.ones(2))
            outside = [value for name, value in metrics.items() if name.endswith(("_low", "_high"))]
            assert len(outside) >= 2
            assert not any(value.any() for value in outside)


def test_a_gate_judges_a_sequence_by_all_its_trainable_tokens_not_by_what_another_gate_left():
    # The first token is outside the token band and carries the sequence out of its band; without it the sequence is in.
    samples = Samples([torch.tensor([0.0, 0.0])], [torch.tensor([-3.0, -0.25])], [torch.ones(2)])
    gates = [{"level": "token", "low": 0.5, "high": 2.0}, {"level": "sequence", "low": 0.5, "high": 2.0}]
    assert torch.equal(flat(weights_masks(gates_only(*gates), samples)[1]), torch.zeros(2, dtype=torch.float64))


@weights_of_grid
def test_rejection_on_or_off_leaves_every_mismatch_metric_bit_equal(weight):
    samples = sprinkle(random_samples(LENGTHS, seed=39), seed=2, share=0.03)
    only = call_hook(ALL | {"use_tis": False, "get_mismatch_metrics": True}, samples)[2]
    assert len(only) > 20
    # A third of the pairs with each weight, and others with the next.
    first = WEIGHTS.index(weight) % 3
    for turn, (gate, veto) in enumerate([*itertools.product(GATES, VETOES)][first::3]):
        keys = correction_keys(weight, gate=gate, veto=veto, normalizer=["no normaliser", "kept"][turn % 2])
        metrics = call_hook(keys, samples)[2]
        assert_same(only, {name: metrics[name] for name in only})


def test_a_veto_on_one_token_responses_is_a_one_sided_token_gate():
    samples = random_samples([1] * 60, seed=45, outliers=0.4)
    veto = {"use_tis": True, "tis_level": "none", "rs_veto_threshold": 0.25, "mis_guard": "warn"}
    gate = gates_only({"level": "token", "low": 0.25, "high": math.inf})
    vetoed = flat(weights_masks(veto, samples)[1])
    assert 0 < vetoed.sum() < 60
    assert torch.equal(vetoed, flat(weights_masks(gate, samples)[1]))
