# SPDX-License-Identifier: Apache-2.0
"""Properties that hold by mathematics: normalised weights and denominators."""

import pytest
import torch
from cases import RTOL, call_hook, correction_keys, flat, random_samples, sprinkle
from host_loop import sum_of_sample_mean, sum_of_token
from property_cases import ALL, LENGTHS, LEVELS, weights_masks
from reference import Samples

from mis_ext import CorrectionConfig, Gate, compute_mis_weights

# These bounds are far apart for what a geometric mean does in practice, and the package says so.
pytestmark = pytest.mark.filterwarnings("ignore:a geometric (weight|gate)")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("over", ["kept", "valid"])
def test_normalised_weights_have_mean_one_over_what_counts(level, over):
    samples = sprinkle(random_samples(LENGTHS, seed=43), seed=4, share=0.02)
    keys = correction_keys((level, "truncate"), gate="token gate", veto="low veto")
    keys |= {"tis_batch_normalize": True, "tis_normalize_over": over}
    weights, masks = weights_masks(keys, samples)
    counted = [w[m != 0] if over == "kept" else w[w != 0] for w, m in zip(weights, masks, strict=True)]
    per_sequence = [w if level == "token" else w[:1] for w in counted]
    numbers = torch.cat(per_sequence)
    assert numbers.numel() > 3
    # A float32 mean of few numbers, divided by itself.
    torch.testing.assert_close(numbers.double().mean(), torch.ones((), dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_constant_factor_on_all_ratios_leaves_normalised_weights_alone():
    samples = random_samples([1] * 30, seed=44, outliers=0)
    shifted = Samples([t - 0.75 for t in samples.train], samples.rollout, samples.masks)
    for level in LEVELS:
        keys = {"use_tis": True, "tis_level": level, "tis_mode": "unbounded", "tis_batch_normalize": True}
        weights, _ = weights_masks(keys | {"mis_guard": "warn"}, samples)
        shifted_weights, _ = weights_masks(keys | {"mis_guard": "warn"}, shifted)
        torch.testing.assert_close(flat(shifted_weights), flat(weights), rtol=RTOL, atol=0)


def test_a_rejected_outlier_does_not_shrink_the_survivors():
    # The fault of the reference example: one rejected e^20 scales the others to 1e-8.
    samples = Samples(
        [torch.tensor([0.0]), torch.tensor([0.0])], [torch.tensor([-20.0]), torch.tensor([0.0])], [torch.ones(1)] * 2
    )
    for level in LEVELS:
        keys = {"use_tis": True, "tis_level": level, "tis_mode": "mask", "tis_upper_bound": 2.0}
        keys |= {"tis_batch_normalize": True, "mis_guard": "warn"}
        weights, masks = weights_masks(keys, samples)
        assert flat(masks).tolist() == [0.0, 1.0]
        assert float(weights[1]) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_the_normaliser_of_a_batch_that_is_rejected_entirely_is_one(level):
    samples = Samples([torch.tensor([-1.0, -2.0])], [torch.tensor([-8.0, -9.0])], [torch.ones(2)])
    keys = {"use_tis": True, "tis_level": level, "tis_mode": "mask", "tis_batch_normalize": True}
    keys |= ALL | {"mis_denominator": "kept"}
    loss, masks, metrics = call_hook(keys, samples)
    assert not flat(masks).any()
    assert loss.isfinite().all()
    assert torch.equal(metrics["mis_batch_norm_factor"], torch.ones(2))
    assert torch.equal(metrics["mis_denominator_factor"], torch.ones(2))


@pytest.mark.parametrize("weight", [("none", "unbounded"), ("token", "truncate")], ids=" ".join)
@pytest.mark.parametrize("veto", ["no veto", "low veto"])
def test_with_the_kept_denominator_the_host_mean_is_the_mean_over_survivors(weight, veto):
    samples = random_samples(LENGTHS, seed=46, spread=25)
    samples.masks[2].zero_()
    keys = correction_keys(weight, gate="token gate", veto=veto, mis_denominator="kept")
    plain_keys = keys | {"mis_denominator": "fixed"}
    pg_loss = torch.linspace(0.5, 2, sum(LENGTHS))
    total = flat(samples.masks).sum()

    loss, masks, _ = call_hook(keys, samples, pg_loss=pg_loss, per_token_loss=True)
    plain, _, _ = call_hook(plain_keys, samples, pg_loss=pg_loss, per_token_loss=True)
    host_mean = sum_of_token(loss.split(LENGTHS), masks) / total
    survivors = sum_of_token(plain.split(LENGTHS), masks) / flat(masks).sum()
    assert flat(masks).sum() < total
    torch.testing.assert_close(host_mean, survivors, rtol=RTOL, atol=0)

    # The hosts' default reducer: unit terms add up to the number of samples, as if nothing had been rejected.
    unit_keys = correction_keys(("none", "unbounded"), gate="token gate", veto=veto, mis_denominator="kept")
    loss, masks, _ = call_hook(unit_keys, samples)
    reduced = sum_of_sample_mean(loss.split(LENGTHS), masks, samples.masks)
    torch.testing.assert_close(reduced, torch.tensor(len(LENGTHS) - 1.0, dtype=torch.float64), rtol=RTOL, atol=0)


def test_a_kept_denominator_counts_what_stays_in_the_mask() -> None:
    """Half of the tokens lose their weight and stay: the others are not scaled up. Rejected, they make a factor 2."""
    proximal = [torch.tensor([-1.0, -1.0, -1.0, -1.0])]
    behavior = [torch.tensor([-1.0, -3.0, -1.0, -3.0])]
    found = {}
    for action in ("zero", "reject"):
        config = CorrectionConfig(
            weight=None, gates=(Gate(low=0.5, high=2.0, action=action),), denominator="kept", metrics="all"
        )
        weights, masks, metrics = compute_mis_weights(
            config, train_log_probs=proximal, rollout_log_probs=behavior, loss_masks=[torch.ones(4)]
        )
        found[action] = weights[0].tolist(), masks[0].tolist(), float(metrics["mis_denominator_factor"])
    assert found["zero"] == ([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], 1.0)
    assert found["reject"][1:] == ([1.0, 0.0, 1.0, 0.0], 2.0)
    assert found["reject"][0][::2] == [2.0, 2.0]
