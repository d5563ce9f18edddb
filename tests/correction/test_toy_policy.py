# SPDX-License-Identifier: Apache-2.0
"""Metrics and normalisation of a rollout in which every response is as frequent as it is likely."""

import math

import pytest
import torch
from reference import Samples

import mis_ext

# Sums of float32 weights.
RTOL = 2e-6


def exhaustive_rollout() -> tuple[Samples, dict[int, tuple[float, float]]]:
    """One-token responses in numbers proportional to the behavior policy, so that plain means are expectations."""
    behavior = [8, 5, 2, 1]
    proximal = [5, 4, 4, 3]
    train, rollout, masks = [], [], []
    for mu, pi in zip(behavior, proximal, strict=True):
        for _ in range(mu):
            train.append(torch.tensor([math.log(pi / 16)]))
            rollout.append(torch.tensor([math.log(mu / 16)]))
            masks.append(torch.ones(1))
    return Samples(train, rollout, masks), {
        i: (b / 16, p / 16) for i, (b, p) in enumerate(zip(behavior, proximal, strict=True))
    }


def test_metrics_of_an_exhaustive_rollout_are_the_divergences_themselves():
    samples, table = exhaustive_rollout()
    _, _, metrics = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(
            {"use_tis": True, "mis_metric_max": math.inf, "mis_guard": "warn", "mis_metrics": "all"}
        ),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    pairs = list(table.values())
    kl = sum(mu * math.log(mu / pi) for mu, pi in pairs)
    chi2 = sum(pi * pi / mu for mu, pi in pairs) - 1
    wanted = {
        "mis_kl": kl,
        "mis_k3_kl": kl,
        "mis_tv": sum(abs(mu - pi) for mu, pi in pairs) / 2,
        "mis_chi2_token": chi2,
        "mis_chi2_seq": chi2,
        "mis_ess_ratio_token": 1 / (1 + chi2),
        "mis_ess_ratio_seq": 1 / (1 + chi2),
        "mis_lr_multiplier_token": (1 + chi2) ** -0.5,
        "mis_lr_multiplier_seq": (1 + chi2) ** -0.5,
        "mis_ratio_max": 3.0,
        "mis_ratio_min": 0.625,
        "mis_ratio_above_2_fraction": 1 / 16,
        "mis_tis_weight_before_bound": 1.0,
        "mis_tis_weight_after_bound": 15 / 16,
        "mis_tis_truncate_fraction": 1 / 16,
        "mis_tis_truncate_fraction_low": 0.0,
        "mis_log_ppl_diff_min": -math.log(3.0),
        "mis_log_ppl_diff_max": -math.log(0.625),
    }
    for name, value in wanted.items():
        # Logarithms rounded to float32, then differences of numbers near 1.
        assert math.isclose(float(metrics[name]), value, rel_tol=2e-6, abs_tol=5e-7), name


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalising_an_exhaustive_rollout_changes_nothing_because_the_expected_ratio_is_one(level):
    samples, _ = exhaustive_rollout()
    keys = {"use_tis": True, "tis_level": level, "tis_mode": "unbounded", "mis_guard": "warn"}
    results = []
    for normalize in [False, True]:
        config = mis_ext.config_from_mapping(keys | ({"tis_batch_normalize": True} if normalize else {}))
        weights, _, _ = mis_ext.compute_mis_weights(
            config,
            train_log_probs=samples.train,
            rollout_log_probs=samples.rollout,
            loss_masks=samples.masks,
        )
        results.append(torch.cat(weights))
    torch.testing.assert_close(results[1], results[0], rtol=RTOL, atol=0)
