# SPDX-License-Identifier: Apache-2.0
"""The summary of a mismatch whose truth is known, and what-if numbers that are those of the correction."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import torch
from cases import drawn_samples
from drawn_configs import Point, draw_point
from hypothesis import given
from searching import searching

import mis_ext
from mis_ext.tools.diagnosis import Evidence, Gathering
from mis_ext.tools.diagnosis import evidence as evidence_module
from mis_ext.tools.report import Collector, Origin, Part, WhatIf, summarize
from mis_ext.tools.report.tally import NUM_SIZES, effective_share, k_hat, quantile, size_of_bin

K3, LENGTH, NUM_SEQUENCES = 1e-3, 256, 800


def gaussian(*, seed: int = 0, k3: float = K3, length: int = LENGTH, count: int = NUM_SEQUENCES, **more) -> Part:
    generator = torch.Generator().manual_seed(seed)
    behavior = -3.0 * torch.rand(count, length, generator=generator)
    difference = torch.randn(count, length, generator=generator) * math.sqrt(2.0 * k3) - k3
    return Part.of_lists(proximal=[*(behavior + difference)], behavior=[*behavior], **more)


@pytest.mark.parametrize(("k3", "expected"), [(1e-5, 0.1), (2e-3, 0.25), (1e-2, 0.85)])
def test_k_hat_grows_with_the_variance_of_the_log_weights(k3, expected) -> None:
    # Log-normal weights of 4,000 samples with variance 0.25, 1 and 9: 0.1, 0.18 and 0.94 (arXiv:1507.02646).
    assert summarize([gaussian(k3=k3)]).overall.k_hat == pytest.approx(expected, abs=0.25)


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0])
def test_k_hat_finds_the_shape_of_a_pareto_distribution(shape) -> None:
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # A fit to 3 sqrt(40,000) = 600 excesses has an error of (1 + shape) / sqrt(600), up to 0.08.
    assert k_hat(-shape * uniform.log()) == pytest.approx(shape, abs=2 * (1 + shape) / math.sqrt(600))


def test_k_hat_of_equal_or_few_weights() -> None:
    assert k_hat(torch.zeros(1000)) == 0.0
    weights = torch.randn(25, generator=torch.Generator().manual_seed(0))
    assert math.isfinite(k_hat(weights))
    assert math.isnan(k_hat(weights[:24]))


def test_a_quantile_of_more_tokens_than_float32_can_count_is_exact() -> None:
    counts, many = torch.zeros(NUM_SIZES, dtype=torch.float64), 2.0**25
    counts[100], counts[200] = many, many + 1.0
    assert quantile(counts, 0.5) == size_of_bin(200)
    counts[200] = many
    assert quantile(counts, 0.5) == size_of_bin(100)


def test_the_effective_share_of_weights_beyond_all_floats_is_exact() -> None:
    assert effective_share(torch.tensor([900.0, 0.0, -900.0, -900.0])) == 0.25
    assert effective_share(torch.tensor([-900.0, -900.0])) == 1.0
    assert math.isnan(effective_share(torch.tensor([])))


@pytest.mark.parametrize("gap", [16.0, 24.0])
def test_a_trainer_that_finds_every_token_impossible_has_a_report(gap) -> None:
    behavior = -torch.rand(40, generator=torch.Generator().manual_seed(0))
    proximal = behavior - gap - torch.linspace(0.0, 1.0, 40)
    found = summarize([Part.of_lists(proximal=[proximal], behavior=[behavior])]).overall
    # Beyond +-20 nats all ratios are the same.
    assert found.ess_token == pytest.approx(effective_share((proximal - behavior).double().clamp_min(-20.0)), rel=1e-4)


def test_a_part_of_no_response_has_no_token() -> None:
    part = Part.of_lists(proximal=[], behavior=[])
    assert len(part.evidence) == 0
    nothing = dataclasses.asdict(summarize([part]).overall)
    assert all(math.isnan(value) for value in nothing.values() if isinstance(value, float))
    summary = summarize([part, gaussian(count=20)])
    assert summary.overall.num_tokens == 20 * LENGTH


def test_versions_and_offenders_are_found_where_they_are() -> None:
    base = gaussian(count=2, length=8, k3=1e-6).streams
    behavior = [*base.behavior_logprobs_T.view(2, 8).clone()]
    proximal = [*base.proximal_logprobs_T.view(2, 8).clone()]
    proximal[1][5] += 3.0
    origins = [
        Origin("first", 4, versions_behind=0.0, token_ids=[*range(8)]),
        Origin("second", 9, reward=0.5, versions_behind=2.0, token_ids=[*range(100, 108)]),
    ]
    summary = summarize([Part.of_lists(proximal=proximal, behavior=behavior, origins=origins)])
    worst = summary.worst_tokens[0]
    sizes = [abs(token.log_ratio) for token in summary.worst_tokens]
    assert (len(sizes), sizes) == (16, sorted(sizes, reverse=True))
    assert (worst.sample, worst.sample_index, worst.position, worst.token_id) == ("second", 9, 5, 105)
    assert worst.ids_before == (100, 101, 102, 103, 104)
    assert worst.log_ratio == pytest.approx(3.0, abs=0.01)
    assert [each.sample for each in summary.worst_samples] == ["second", "first"]
    assert [(group.name, group.num_tokens) for group in summary.by_version] == [("0 behind", 8), ("2 behind", 8)]
    assert summary.by_position[2].low == 3
    assert summary.by_position[2].k3_share > 0.99


def test_counts_side_by_side_are_those_one_after_the_other() -> None:
    configs = {name: mis_ext.preset(name) for name in ("mis", "geometric_mis")}
    parts = [gaussian(seed=seed, count=40, step=str(seed)) for seed in range(4)]
    alone = Collector(configs)
    with ThreadPoolExecutor(4) as pool:
        together = Collector(configs, pool=pool)
        for part in parts:
            alone.add(part)
            together.add(part)
        assert str(together.summary().overall) == str(alone.summary().overall)
        assert str(together.outcomes()) == str(alone.outcomes())
        assert str(together.diagnoses()) == str(alone.diagnoses())


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to report"):
        summarize([])


@st.composite
def drawn_points(draw) -> Point:
    return draw_point(lambda options: draw(st.sampled_from(options)))


@searching(12)
@given(point=drawn_points().filter(lambda point: not point.config.staleness), samples=drawn_samples())
def test_what_if_numbers_are_those_of_the_correction(point, samples) -> None:
    streams = {"train_log_probs": samples.train, "rollout_log_probs": samples.rollout, "loss_masks": samples.masks}
    weights, masks, _ = mis_ext.compute_mis_weights(point.config, **streams)
    part = Part.of_lists(proximal=samples.train, behavior=samples.rollout, masks=samples.masks)
    what_if = WhatIf(point.config)
    correction = what_if.add(part)
    weights_T, mask_T = torch.cat([torch.zeros(0), *weights]), torch.cat([torch.zeros(0), *masks])
    assert torch.equal(correction.loss_mask_R, mask_T)
    outcome = what_if.outcome()
    num_response = float(sum((mask != 0).sum() for mask in samples.masks))
    if not num_response:
        assert math.isnan(outcome.kept_tokens)
        return
    assert outcome.kept_tokens == float(mask_T.sum()) / num_response
    factor_T = (weights_T * mask_T).double()
    assert outcome.learning_rate == pytest.approx(float(factor_T.sum()) / num_response, rel=1e-5, abs=1e-12)
    assert outcome.variance == pytest.approx(float(factor_T.square().sum()) / num_response, rel=1e-5, abs=1e-12)
    removed = sum(outcome.removed_by.values())
    assert removed == pytest.approx(1.0 - outcome.kept_tokens, abs=0.5 / num_response + 1e-9) or point.config.gates


def test_what_the_band_of_a_weight_removes_is_told_apart_from_a_filter() -> None:
    ratios = torch.tensor([[1.0, 3.0, 3.0, 0.1, 20.0]])
    part = Part.of_lists(proximal=[*torch.full((1, 5), -4.0)], behavior=[*(-4.0 - ratios.log())])
    weight = mis_ext.Weight(mode="mask", low=0.5, high=2.0)
    what_if = WhatIf(mis_ext.CorrectionConfig(weight=weight, gates=(mis_ext.Gate(high=10.0),)))
    what_if.add(part)
    # The largest ratio is beyond both.
    assert what_if.outcome().removed_by == pytest.approx({"weight: 0.5 <= rho_t <= 2": 0.6, "two or more gates": 0.2})


def test_evidence_of_causes_is_of_the_tokens_that_have_both_log_probs() -> None:
    behavior, proximal = torch.tensor([0.0, -0.5, -0.3, -9.0]), torch.tensor([-0.25, 0.0, -0.7, math.nan])
    part = Part.of_lists(proximal=[proximal], behavior=[behavior])
    origins = [Origin(token_ids=[3, 5, 3, 3])]
    evidence = Evidence.of(part.tokens, part.streams.layout, origins, given=part.streams[:2])
    assert evidence.d_T.tolist() == pytest.approx([-0.25, 0.5, -0.4])
    assert evidence["missing_trainer"].tolist() == [1.0]
    assert evidence.repeated_T.tolist() == [0, 0, 1]
    # A behavior log-prob of 0 says nothing about the engines.
    assert evidence.uncertain.engine_T.tolist() == pytest.approx([-0.5, -0.3])
    assert evidence.shift_T[1:].tolist() == pytest.approx([0.5 / 0.393469, 0.4 / 0.259182], rel=1e-5)


def test_of_many_tokens_whole_blocks_of_responses_are_kept_however_they_come(monkeypatch) -> None:
    monkeypatch.setattr(evidence_module, "MAX_KEPT", 1000)
    parts = [Part.of_lists(proximal=[torch.zeros(5)] * count, behavior=[torch.zeros(5)] * count) for count in (64, 400)]
    evidence = [Evidence.of(part.tokens, part.streams.layout, part.origins) for part in parts]
    kept = [Gathering().add(first).add(second).evidence for first, second in (evidence, evidence[::-1])]
    assert kept[0].ordinal_S.tolist() == kept[1].ordinal_S.tolist()
    assert 320 < len(kept[0]) <= 1000
    assert {*(kept[0].ordinal_S // 64 % 4).tolist()} == {0}
