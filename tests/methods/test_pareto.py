# SPDX-License-Identifier: Apache-2.0
"""Pareto smoothing against a loop over sorted lists; rejection control is unbiased, and equal on every rank."""

import math

import pytest
import torch
from method_cases import apply, make_data
from method_losses import psis
from synchronization import recorded
from thread_ranks import run_ranks

from mis_ext.methods import Method, Score
from mis_ext.methods.batch import MISMATCH
from mis_ext.methods.sequence_weights import ParetoWeight, smooth_weights


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


@pytest.mark.parametrize(
    ("valid", "error", "message"),
    [
        (torch.ones(30), TypeError, "valid_N must be bool, got torch.float32"),
        (torch.ones(29).bool(), ValueError, r"weights_N has shape \[30\], and valid_N has \[29\]; both must be \[N\]"),
        ([True] * 30, TypeError, "valid_N must be a tensor, got list"),
    ],
)
def test_what_is_no_mask_of_the_weights_is_refused_by_name(valid, error, message) -> None:
    with pytest.raises(error, match=message):
        smooth_weights(torch.ones(30), valid)


def test_weights_are_a_row() -> None:
    with pytest.raises(ValueError, match=r"weights_N has shape \[5, 6\], and valid_N has \[5, 6\]; both must be \[N\]"):
        smooth_weights(torch.ones(5, 6), torch.ones(5, 6).bool())


def test_a_bound_of_weights_is_above_0() -> None:
    with pytest.raises(ValueError, match=r"high must be in \(0, inf\], got -1.0"):
        ParetoWeight(pair=MISMATCH, high=-1.0)


def test_smoothing_refuses_ranks_whose_sequences_it_does_not_see() -> None:
    data, mask, layout = make_data()
    method = Method(surrogate=Score(), factors=(ParetoWeight(pair=MISMATCH),))
    found = run_ranks(lambda rank: apply(method, data, mask, layout, dp_group=rank.groups.dp_group), dp_size=2)
    assert all(isinstance(error, ValueError) and "all sequences on one rank" in str(error) for error in found)


def test_smoothing_reads_no_value_of_the_device(monkeypatch) -> None:
    data, mask, layout = make_data(num_sequences=80)
    method = Method(surrogate=Score(), factors=(ParetoWeight(pair=MISMATCH),))
    apply(method, data, mask, layout)
    with recorded(monkeypatch, data.x, data.behavior, data.proximal, data.advantages, mask) as recorder:
        apply(method, data, mask, layout)
    assert recorder.names
