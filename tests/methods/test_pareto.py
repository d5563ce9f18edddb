# SPDX-License-Identifier: Apache-2.0
"""Pareto smoothing against a loop over sorted lists; rejection control is unbiased, and equal on every rank."""

import dataclasses
import math

import pytest
import torch
from method_cases import apply, make_data
from method_losses import psis
from synchronisation import recorded
from test_method_ranks import part
from thread_ranks import run_ranks
from zigzag import local_tokens

from mis_ext import PackedLayout
from mis_ext.correction.tokens import MISMATCH
from mis_ext.methods import Method, RatioWeight, Score
from mis_ext.methods.sequence_weights import Accept, ParetoWeight, smooth_weights


def lognormal(n: int, spread: float, seed: int = 0) -> torch.Tensor:
    return (spread * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).exp()


@pytest.mark.parametrize("n", [25, 60, 400])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_smoothing_is_that_of_the_paper_whatever_else_lies_in_the_tensor(n, spread) -> None:
    weights = lognormal(n, spread, seed=n)
    wanted, k_hat = psis(weights.tolist())
    found = smooth_weights(weights, torch.ones(n, dtype=torch.bool))
    torch.testing.assert_close(found.weights_N, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=0.0)
    assert float(found.k_hat) == pytest.approx(k_hat, rel=1e-9)
    # Others in between, some of them huge, change nothing.
    valid = torch.rand(3 * n, generator=torch.Generator().manual_seed(1)).argsort().argsort() < n
    wide = torch.full((3 * n,), 1e9, dtype=torch.float64)
    wide[valid] = weights
    among = smooth_weights(wide, valid)
    torch.testing.assert_close(among.weights_N[valid], found.weights_N, rtol=1e-9, atol=0.0)
    assert bool((among.weights_N[~valid] == 1e9).all())
    assert float(among.k_hat) == pytest.approx(k_hat, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "shape", "k_hat"),
    [(100, 0.3, 0.5290904880991414), (400, 0.6, 0.6804235356948526), (900, 0.9, 0.8368531987980867)],
)
def test_k_hat_is_that_of_arviz(n, shape, k_hat) -> None:
    # Recorded with its psislw, version 0.20; its smoothed weights of drawn samples agreed to 4e-15 too.
    uniform = (torch.arange(n, dtype=torch.float64) * 7919 % 1009 + 0.5) / 1009
    found = smooth_weights(uniform**-shape, torch.ones(n, dtype=torch.bool))
    assert float(found.k_hat) == pytest.approx(k_hat, rel=1e-12)


def test_k_hat_is_nan_where_nothing_can_be_fitted() -> None:
    for weights in (torch.ones(300), torch.rand(20), torch.ones(0)):
        found = smooth_weights(weights, torch.ones(len(weights), dtype=torch.bool))
        assert math.isnan(float(found.k_hat))
        assert torch.equal(found.weights_N, weights)
    few = smooth_weights(torch.rand(300), torch.arange(300) < 20)
    assert math.isnan(float(few.k_hat))


def test_pareto_weights_of_sequences_are_the_smoothed_products() -> None:
    data, mask, layout = make_data(num_sequences=80)
    ratio = (data.proximal - data.behavior).exp()
    smoothed, _ = psis([float(ratio[tokens].prod()) for tokens in data.sequences])
    found = apply(Method(surrogate=Score(), factors=(ParetoWeight(pair=MISMATCH),)), data, mask, layout).coefficient_T
    for tokens, weight in zip(data.sequences, smoothed, strict=True):
        torch.testing.assert_close(found[tokens], weight * data.advantages[tokens], rtol=1e-9, atol=1e-12)


def test_smoothing_refuses_ranks_whose_sequences_it_does_not_see() -> None:
    data, mask, layout = make_data()
    method = Method(surrogate=Score(), factors=(ParetoWeight(pair=MISMATCH),))
    found = run_ranks(lambda rank: apply(method, data, mask, layout, dp_group=rank.groups.dp_group), dp_size=2)
    assert all(isinstance(error, ValueError) and "all sequences on one rank" in str(error) for error in found)


def test_neither_reads_a_value_of_the_device(monkeypatch) -> None:
    data, mask, layout = make_data(num_sequences=80)
    method = Method(surrogate=Score(), factors=(ParetoWeight(pair=MISMATCH), *CONTROL.factors))
    apply(method, data, mask, layout)
    with recorded(monkeypatch, data.x, data.behavior, data.proximal, data.advantages, mask) as recorder:
        apply(method, data, mask, layout)
    assert recorder.names


CONTROL = Method(
    surrogate=Score(),
    factors=(RatioWeight(pair=MISMATCH, level="sequence", low=1.5), Accept(pair=MISMATCH, bound=1.5)),
)


def test_rejection_control_accepts_as_often_as_it_says_and_is_unbiased() -> None:
    data, mask, layout = make_data(num_sequences=12)
    data = dataclasses.replace(data, advantages=torch.ones_like(data.x))
    plain = apply(Method(surrogate=Score(), factors=CONTROL.factors[:0]), data, mask, layout)
    weight = apply(
        Method(surrogate=Score(), factors=(RatioWeight(pair=MISMATCH, level="sequence"),)), data, mask, layout
    )
    rounds = 400
    kept, total = torch.zeros_like(data.x), torch.zeros_like(data.x)
    for seed in range(rounds):
        accept = dataclasses.replace(CONTROL.factors[1], seed=seed)
        result = apply(dataclasses.replace(CONTROL, factors=(CONTROL.factors[0], accept)), data, mask, layout)
        kept += result.kept_T
        total += result.coefficient_T
    w = weight.coefficient_T
    chance = (w / 1.5).clamp(max=1.0)
    # Five standard deviations of a mean of independent rounds.
    spread = 5 * (chance * (1 - chance) / rounds).sqrt() + 1e-9
    assert bool(((kept / rounds - chance).abs() <= spread)[mask].all())
    assert bool(((total / rounds - w).abs() <= spread * w.clamp(min=1.5))[mask].all())
    assert plain.kept_T.sum() == mask.sum()
    assert bool((kept[mask] < rounds).any())


def test_a_sequence_has_one_random_number_on_every_rank_and_in_every_split() -> None:
    data, mask, whole = make_data(num_sequences=12)
    lengths = list(whole.response_lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    wanted = apply(CONTROL, data, mask, whole).kept_T
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own, own_mask = part(data, mask, torch.arange(start, start + length))
        alone = apply(CONTROL, own, own_mask, PackedLayout.whole([length])).kept_T
        assert torch.equal(alone, wanted[start : start + length]), i

    def work(rank):
        cp = {"cp_rank": rank.cp_rank, "cp_size": 2}
        totals = [length + 2 for length in lengths]
        local = torch.tensor(
            [
                starts[i] + t
                for i in range(len(lengths))
                for t in local_tokens(total_length=totals[i], response_length=lengths[i], **cp)
            ]
        )
        own, own_mask = part(data, mask, local)
        layout = PackedLayout.context_parallel(lengths, total_lengths=totals, **cp)
        return torch.equal(apply(CONTROL, own, own_mask, layout, cp_group=rank.groups.cp_group).kept_T, wanted[local])

    assert run_ranks(work, cp_size=2) == [True, True]
