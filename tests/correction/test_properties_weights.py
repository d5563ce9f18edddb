# SPDX-License-Identifier: Apache-2.0
"""Properties that hold by mathematics: weights, their gradient and their effective sample size."""

import pytest
import torch
from cases import RTOL, call_hook, correction_keys, drawn_keys, drawn_samples, flat, random_samples, sprinkle
from hypothesis import assume, given
from property_cases import ALL, FUZZ, LENGTHS, LEVELS, points_of_grid, weights_masks
from reference import Samples

import mis_ext

# These bounds are far apart for what a geometric mean does in practice, and the package says so.
pytestmark = pytest.mark.filterwarnings("ignore:a geometric (weight|gate)")


@pytest.mark.parametrize("mode", mis_ext.BOUNDS)
def test_at_length_one_all_levels_are_the_same(mode):
    samples = random_samples([1] * 40, seed=35, outliers=0.3)
    bounds = {"tis_upper_bound": 1.5} if mis_ext.BOUNDS[mode].has_high else {}
    results = []
    for level in LEVELS:
        keys = {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": True, "mis_guard": "warn"}
        results.append(weights_masks(keys | bounds, samples))
    for weights, masks in results[1:]:
        assert torch.equal(flat(weights), flat(results[0][0]))
        assert torch.equal(flat(masks), flat(results[0][1]))
    gated = []
    for level in LEVELS:
        keys = {"use_tis": True, "tis_level": "none", "use_rs": True, "rs_level": level}
        keys |= {"rs_lower_bound": 0.75, "rs_upper_bound": 1.25, "mis_guard": "warn"}
        gated.append(flat(weights_masks(keys, samples)[1]))
    assert 0 < gated[0].sum() < 40
    assert torch.equal(gated[0], gated[1])
    assert torch.equal(gated[0], gated[2])


@pytest.mark.parametrize("level", LEVELS)
def test_wide_bounds_are_raw_importance_sampling(level):
    samples = random_samples(LENGTHS, seed=36)
    raw, raw_masks = weights_masks({"use_tis": True, "tis_level": level, "tis_mode": "unbounded"}, samples)
    for mode, bound in mis_ext.BOUNDS.items():
        if not bound.has_high:
            continue
        keys = {"use_tis": True, "tis_level": level, "tis_mode": mode, "mis_guard": "warn"}
        keys |= {"tis_upper_bound": 1e9}
        keys |= {"tis_lower_bound": 1e-9} if bound.has_low else {}
        weights, masks = weights_masks(keys, samples)
        assert torch.equal(flat(weights), flat(raw))
        assert torch.equal(flat(masks), flat(raw_masks))
    expected = []
    for t, r, m in zip(samples.train, samples.rollout, samples.masks, strict=True):
        chosen = (t - r).double()[m != 0]
        x = {"token": (t - r).double(), "sequence": chosen.sum(), "geometric": chosen.mean()}[level]
        expected.append(torch.where(m != 0, x.clamp(-20, 20).exp().expand_as(t), 0.0))
    torch.testing.assert_close(flat(raw), flat(expected), rtol=RTOL, atol=0)


@points_of_grid
def test_on_policy_input_gives_weight_exactly_one_and_keeps_everything(weight, gate):
    generator = torch.Generator().manual_seed(37)
    scored = [torch.randn(length, generator=generator) - 3 for length in LENGTHS]
    masks = [m.clone() for m in random_samples(LENGTHS, seed=37, mask=0.7).masks]
    masks[5].zero_()
    samples = Samples(scored, [s.clone() for s in scored], masks)
    for normalizer, denominator in [("no normaliser", "fixed"), ("kept", "kept"), ("valid, micro-batch", "fixed")]:
        veto = {"rs_veto_threshold": 0.999, "rs_veto_upper_threshold": 1.001}
        keys = correction_keys(weight, gate=gate, normalizer=normalizer, mis_denominator=denominator) | veto
        pg_loss = torch.randn(sum(LENGTHS), generator=generator)
        loss, new_masks, metrics = call_hook(keys, samples, pg_loss=pg_loss)
        response = torch.cat(masks) != 0
        assert torch.equal(loss[response], pg_loss[response])
        assert all(torch.equal(new.float(), old.float()) for new, old in zip(new_masks, masks, strict=True))
        ones = [f"mis_{name}" for name in ("ess_ratio_token", "ess_ratio_seq", "ratio_max", "ratio_min", "ppl_ratio")]
        ones += ["mis_kept_token_fraction", "mis_kept_seq_fraction"]
        zeros = [f"mis_{name}" for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "tv", "logprob_abs_diff")]
        zeros += [f"mis_log_ppl_{name}" for name in ("diff", "abs_diff", "diff_min", "diff_max")]
        zeros += ["mis_nonfinite_token_fraction", *(n for n in metrics if n.endswith("_std"))]
        zeros += [f"mis_train_rollout_logprob_abs_diff_{name}" for name in ("max", "nonzero", "invalid")]
        ones += [n for n in metrics if n.startswith("mis_is_ratio") or "factor" in n or n.endswith("_value")]
        ones += [n for n in metrics if "tis_weight" in n and not n.endswith("_std")]
        zeros += [n for n in metrics if n.endswith("_fraction") and ("rs_" in n or "tis_" in n or "above" in n)]
        zeros += [n for n in metrics if n.endswith(("fraction_low", "fraction_high"))]
        assert all(torch.equal(metrics[n][response], torch.ones(int(response.sum()))) for n in ones)
        assert all(not metrics[n][response].any() for n in zeros)


@FUZZ
@given(keys=drawn_keys(), samples=drawn_samples())
def test_the_effective_sample_size_lies_between_one_sample_and_all_of_them(keys, samples):
    _, _, metrics = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(keys),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    finite = [
        int(((m != 0) & t.isfinite() & r.isfinite()).sum())
        for t, r, m in zip(samples.train, samples.rollout, samples.masks, strict=True)
    ]
    assume(sum(finite) > 0)
    # A division at the end of the sums.
    slack = 1 + 1e-6
    assert 1 / sum(finite) / slack <= metrics["mis_ess_ratio_token"] <= slack
    assert 1 / sum(count > 0 for count in finite) / slack <= metrics["mis_ess_ratio_seq"] <= slack


def test_one_dominating_sample_has_an_effective_sample_size_of_one():
    log_ratio = [torch.tensor([15.0]), torch.tensor([-15.0]), torch.tensor([-15.0]), torch.tensor([-15.0])]
    samples = Samples(log_ratio, [torch.zeros(1)] * 4, [torch.ones(1)] * 4)
    _, _, metrics = call_hook({"use_tis": True, "mis_guard": "warn"}, samples)
    # The others add 3e-13.
    torch.testing.assert_close(metrics["mis_ess_ratio_token"], torch.full((4,), 0.25), rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["mis_ess_ratio_seq"], torch.full((4,), 0.25), rtol=1e-6, atol=0)


@points_of_grid
def test_the_gradient_is_exactly_the_weight_and_nothing_else_carries_gradient(weight, gate):
    samples = sprinkle(random_samples(LENGTHS, seed=40), seed=3)
    samples = Samples(
        [t.requires_grad_() for t in samples.train], [r.requires_grad_() for r in samples.rollout], samples.masks
    )
    for normalizer, denominator in [("no normaliser", "fixed"), ("kept", "kept")]:
        keys = correction_keys(weight, gate=gate, normalizer=normalizer, mis_denominator=denominator)
        weights, standalone_masks = weights_masks(keys, samples)
        pg_loss = torch.linspace(-2, 2, sum(LENGTHS)).requires_grad_()
        loss, masks, metrics = call_hook(keys, samples, pg_loss=pg_loss)
        loss.sum().backward()
        assert torch.equal(pg_loss.grad, torch.cat(weights))
        assert all(t.grad is None for t in samples.train + samples.rollout)
        outputs = [*weights, *standalone_masks, *masks, *metrics.values()]
        assert not any(t.requires_grad for t in outputs)


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_scaling_the_log_ratio_scales_divergences_and_bands_accordingly(scale):
    samples = random_samples(LENGTHS, seed=41, outliers=0.0, spread=10)
    scaled = Samples(
        samples.train,
        [t - scale * (t - r) for t, r in zip(samples.train, samples.rollout, strict=True)],
        samples.masks,
    )
    metrics, scaled_metrics = (call_hook(ALL, s)[2] for s in (samples, scaled))
    response = torch.cat(samples.masks) != 0
    for name in ["mis_kl", "mis_log_ppl_diff", "mis_log_ppl_abs_diff", "mis_logprob_abs_diff"]:
        # Exact numbers scaled by a power of two; a mean rounds the same way on both sides.
        assert torch.equal(scaled_metrics[name][response], scale * metrics[name][response])
    for level in LEVELS:
        base = {"use_tis": True, "tis_level": level, "tis_mode": "mask", "mis_guard": "warn"}
        low, high = 0.875, 1.125
        narrow = base | {"tis_lower_bound": low, "tis_upper_bound": high}
        wide = base | {"tis_lower_bound": low**scale, "tis_upper_bound": high**scale}
        weights, masks = weights_masks(narrow, samples)
        scaled_weights, scaled_masks = weights_masks(wide, scaled)
        assert 0 < flat(masks).sum() < response.sum()
        assert torch.equal(flat(scaled_masks), flat(masks))
        torch.testing.assert_close(flat(scaled_weights), flat(weights) ** scale, rtol=RTOL, atol=0)


def test_repeating_a_response_keeps_the_geometric_weight_and_multiplies_the_sequence_weight():
    samples = random_samples([4, 3, 6], seed=42, spread=8, outliers=0)
    thrice = Samples(*([torch.cat([x] * 3) for x in c] for c in (samples.train, samples.rollout, samples.masks)))
    for level, power in [("geometric", 1), ("sequence", 3)]:
        keys = {"use_tis": True, "tis_level": level, "tis_mode": "unbounded", "mis_guard": "warn"}
        once = torch.stack([w.max() for w in weights_masks(keys, samples)[0]])
        repeated = torch.stack([w.max() for w in weights_masks(keys, thrice)[0]])
        torch.testing.assert_close(repeated, once**power, rtol=RTOL, atol=0)


def test_truncating_and_clipping_never_lower_the_effective_sample_size():
    samples = random_samples([3] * 40, seed=50, spread=25)

    def effective(mode: str, bounds: dict) -> float:
        keys = {"use_tis": True, "tis_level": "sequence", "tis_mode": mode, "mis_guard": "warn"} | bounds
        w = torch.stack([x.max() for x in weights_masks(keys, samples)[0]]).double()
        return float(w.sum() ** 2 / (w * w).sum())

    raw = effective("unbounded", {})
    truncated = effective("truncate", {"tis_upper_bound": 2.0})
    clipped = effective("clip", {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0})
    assert 1 < raw < truncated < clipped < 40
