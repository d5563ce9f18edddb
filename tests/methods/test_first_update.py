# SPDX-License-Identifier: Apache-2.0
"""What a method does at the first update: the coefficient of the method itself, and the hook's numbers where it can."""

import math

import pytest
import torch
from method_cases import apply, make_data, parameters
from rows import for_each

import mis_ext
from mis_ext import CorrectionConfig, Gate, PackedLayout, Weight
from mis_ext.methods import METHODS, Method, PairGate, PairWeight, Score
from mis_ext.methods.batch import TOTAL
from mis_ext.methods.first_update import equivalent_correction, first_update, looks_at_advantages, without_terms

NO_CORRECTION = CorrectionConfig(metrics_only=True, weight=None)
each_preset = for_each("name", METHODS)


def streams(data) -> dict:
    return {"proximal_logprobs_T": data.proximal, "behavior_logprobs_T": data.behavior}


@each_preset
def test_times_the_advantage_it_is_the_coefficient_of_the_method_where_nothing_was_updated_yet(name) -> None:
    data, mask, layout = make_data(token_advantages=False)
    method = without_terms(METHODS[name](**parameters(name)))
    found = first_update(
        method, **streams(data), advantages_T=data.advantages, response_mask_T=mask.double(), layout=layout
    )
    wanted = apply(method, data, mask, layout, current_logprobs_T=data.proximal)
    torch.testing.assert_close(found.factor_T * data.advantages, wanted.coefficient_T, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.kept_T, wanted.kept_T)
    assert torch.equal(found.factor_T != 0.0, wanted.coefficient_T != 0.0)


@each_preset
def test_a_correction_beside_it_multiplies_and_rejects(name) -> None:
    data, mask, layout = make_data(token_advantages=False)
    method = METHODS[name](**parameters(name))
    given = streams(data) | {"advantages_T": data.advantages, "response_mask_T": mask, "layout": layout}
    kept_T = torch.arange(len(mask)) % 3 != 0
    alone = first_update(method, **given)
    found = first_update(method, **given, weights_T=torch.full_like(data.proximal, 0.5), keep_mask_T=kept_T)
    assert torch.equal(found.kept_T, alone.passed_T & kept_T)
    assert torch.equal(found.passed_T, alone.kept_T)
    if method.surrogate.spread == "token":
        torch.testing.assert_close(found.factor_T, torch.where(kept_T, 0.5 * alone.factor_T, 0.0), rtol=0.0, atol=0.0)


def test_where_every_token_has_the_mean_of_its_sequence_a_rejected_one_lowers_it() -> None:
    # A ratio of 1 for all four tokens of one response, of which one is rejected and the others weigh 2.
    log_probs = {"proximal_logprobs_T": torch.full((4,), -1.0), "behavior_logprobs_T": torch.full((4,), -1.0)}
    found = first_update(
        METHODS["gspo"].method,
        **log_probs,
        advantages_T=torch.ones(4),
        response_mask_T=torch.ones(4),
        layout=PackedLayout.whole([4]),
        weights_T=torch.full((4,), 2.0),
        keep_mask_T=torch.tensor([True, False, True, True]),
    )
    assert found.factor_T.tolist() == [1.5] * 4


def test_an_equivalent_configuration_stands_alone_and_keeps_what_else_the_file_says() -> None:
    config = NO_CORRECTION.replace(max_reject_fraction=0.3)
    found = equivalent_correction(config, METHODS["icepop"].method)
    gate = Gate(low=0.5, high=5.0, action="zero")
    assert found == CorrectionConfig(weight=Weight(mode="unbounded"), gates=(gate,), max_reject_fraction=0.3)
    assert equivalent_correction(config, METHODS["ppo"].method) is None
    assert equivalent_correction(mis_ext.preset("mis"), METHODS["icepop"].method) is None


LOOKING = {"bypass", "topr", "dppo_tv", "dppo_kl", "prime_rl", "opsm", "vespo", "m2po", "vaco", "clip_cov"}


def test_these_methods_look_at_the_advantages_at_the_first_update() -> None:
    # PPO's clip does not: its ratio is 1. Neither do methods whose bounds by sign hold 1 between them. One sign for all
    # tokens would hide clip_cov, whose covariance is then 0.
    assert {name for name, row in METHODS.items() if looks_at_advantages(row.method)} == LOOKING
    assert looks_at_advantages(METHODS["dispo"](positive=(1.1, 2.0)))


def test_a_token_without_a_log_prob_has_no_factor_and_is_not_kept() -> None:
    method = Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL), PairGate(pair=TOTAL, low=0.5)))
    behavior = torch.tensor([-1.0, -math.inf, -1.0, -1.0])
    proximal = torch.tensor([-1.0 + math.log(2.0), -1.0, math.nan, -3.0])
    found = first_update(
        method,
        proximal_logprobs_T=proximal,
        behavior_logprobs_T=behavior,
        advantages_T=torch.ones(4),
        response_mask_T=torch.ones(4),
        layout=PackedLayout.whole([4]),
    )
    assert found.factor_T.tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert found.kept_T.tolist() == [True, False, False, False]


def test_sequences_are_judged_and_products_taken_where_a_factor_says_so() -> None:
    judging = [name for name, row in METHODS.items() if row.method.judges_sequences]
    assert judging == [
        *("sequence_mis", "geometric_rs", "segment_rs", "geometric_rs_token_tis", "sequence_mask_tis", "veto", "trm"),
        *("sequence_error", "intellect_3", "mis_po", "opsm"),
    ]
    products = [name for name, row in METHODS.items() if row.method.multiplies_ratios]
    assert products == [
        *("decoupled_sequence_tis", "sequence_mis", "reinforce_sequence_tis", "reinforce_sequence_snis"),
        *("reinforce_sequence_psis", "topr", "vespo"),
    ]
