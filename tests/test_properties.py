"""Properties that hold by mathematics, whatever the numbers are."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from cases import (
    ATOL,
    GATES,
    RTOL,
    VETOES,
    WEIGHTS,
    args_of,
    call_hook,
    correction_keys,
    drawn_keys,
    drawn_samples,
    flat,
    gates_only,
    random_samples,
    sprinkle,
)
from host_loop import sum_of_sample_mean, sum_of_token
from hypothesis import HealthCheck, assume, given, settings
from reference import Samples, correct

import mis_ext
from mis_ext import prepare_rollout

FUZZ = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = [5, 1, 9, 3, 12, 1, 2]
LEVELS = ["token", "sequence", "geometric"]
ALL = {"use_tis": True, "mis_guard": "warn", "mis_metrics": "all"}
# These bounds are far apart for what a geometric mean does in practice, and the package says so.
pytestmark = pytest.mark.filterwarnings("ignore:a geometric (weight|gate)")
weights_of_grid = pytest.mark.parametrize("weight", WEIGHTS, ids=" ".join)
gates_of_grid = pytest.mark.parametrize("gate", GATES)


def weights_masks(keys: dict, samples: Samples) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights, masks, _ = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(keys),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    return weights, masks


def subset(samples: Samples, order: list[int]) -> Samples:
    return Samples(*([column[index] for index in order] for column in (samples.train, samples.rollout, samples.masks)))


def assert_same(first: dict, second: dict) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        assert torch.equal(value.nan_to_num(nan=-7.0), second[name].nan_to_num(nan=-7.0)), name


@FUZZ
@given(keys=drawn_keys(), samples=drawn_samples(), data=st.data())
def test_the_order_of_sequences_does_not_matter(keys, samples, data):
    assume(correct([samples], keys)[0].margin > 1e-5)
    order = data.draw(st.permutations(range(len(samples.masks))))
    weights, masks = weights_masks(keys, samples)
    permuted_weights, permuted_masks = weights_masks(keys, subset(samples, order))
    # The normaliser adds up in another order.
    torch.testing.assert_close(flat(permuted_weights), flat([weights[i] for i in order]), rtol=1e-6, atol=0)
    assert torch.equal(flat(permuted_masks), flat([masks[i] for i in order]))


@FUZZ
@given(keys=drawn_keys(), samples=drawn_samples())
def test_padding_every_response_to_one_length_with_garbage_under_the_mask_changes_nothing(keys, samples):
    assume(correct([samples], keys)[0].margin > 1e-5)
    longest = 2 + max(m.numel() for m in samples.masks)

    def pad(columns: list[torch.Tensor], filling: float) -> list[torch.Tensor]:
        return [torch.cat([c, torch.full((longest - c.numel(),), filling, dtype=c.dtype)]) for c in columns]

    padded = Samples(pad(samples.train, math.nan), pad(samples.rollout, math.inf), pad(samples.masks, 0))
    lengths = [m.numel() for m in samples.masks]
    loss, masks, metrics = call_hook(keys, samples)
    padded_loss, padded_masks, padded_metrics = call_hook(keys, padded)
    places = torch.cat([torch.arange(longest) < length for length in lengths])
    # Sums over the batch are cut into chunks at other places.
    torch.testing.assert_close(padded_loss[places], loss, rtol=1e-6, atol=0)
    assert not padded_loss[~places].any()
    assert torch.equal(flat(padded_masks)[places], flat(masks))
    response = flat(samples.masks) != 0
    for name, value in metrics.items():
        actual = padded_metrics[name][places][response]
        torch.testing.assert_close(actual, value[response], rtol=RTOL, atol=ATOL, equal_nan=True)
        assert padded_metrics[name][~places].isfinite().all()


@weights_of_grid
@gates_of_grid
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38, -1e4])
def test_what_lies_under_masked_tokens_changes_nothing_bit_for_bit(weight, gate, garbage):
    clean = random_samples(LENGTHS, seed=31, mask=0.6)
    clean.masks[4].zero_()
    for column in (clean.train, clean.rollout):
        for tensor, mask in zip(column, clean.masks, strict=True):
            tensor[mask == 0] = 0.0
    for train_garbage, rollout_garbage in [(garbage, 0.0), (0.0, garbage), (garbage, -garbage)]:
        dirty = Samples(
            [torch.where(m != 0, t, train_garbage) for t, m in zip(clean.train, clean.masks, strict=True)],
            [torch.where(m != 0, r, rollout_garbage) for r, m in zip(clean.rollout, clean.masks, strict=True)],
            clean.masks,
        )
        response = torch.cat(clean.masks) != 0
        for veto, normalizer, denominator in [("all vetoes", "kept", "kept"), ("no veto", "valid", "fixed")]:
            keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
            pg_loss = torch.linspace(-1, 1, sum(LENGTHS))
            loss, masks, metrics = call_hook(keys, clean, pg_loss=pg_loss)
            dirty_loss, dirty_masks, dirty_metrics = call_hook(keys, dirty, pg_loss=pg_loss)
            assert torch.equal(loss, dirty_loss)
            assert all(torch.equal(a, b) for a, b in zip(masks, dirty_masks, strict=True))
            assert_same(
                {name: value[response] for name, value in metrics.items()},
                {name: value[response] for name, value in dirty_metrics.items()},
            )
            assert all(value.isfinite().all() for value in dirty_metrics.values())


@weights_of_grid
def test_a_loss_that_is_not_finite_under_the_mask_does_not_leak(weight):
    samples = random_samples(LENGTHS, seed=32, mask=0.6)
    response = torch.cat(samples.masks) != 0
    pg_loss = torch.where(response, 1.0, math.nan).requires_grad_()
    loss, _, _ = call_hook(correction_keys(weight), samples, pg_loss=pg_loss)
    assert torch.equal(loss.detach()[~response], torch.zeros(int((~response).sum())))
    loss.sum().backward()
    assert pg_loss.grad.isfinite().all()


@pytest.mark.parametrize("over", ["kept", "valid"])
@pytest.mark.parametrize("denominator", ["fixed", "kept"])
@weights_of_grid
def test_under_rollout_scope_any_split_into_micro_batches_gives_the_same_weights(weight, denominator, over):
    for gate in ["token gate", "sequence gate"]:
        keys = correction_keys(weight, gate=gate, mis_denominator=denominator, tis_normalize_scope="rollout")
        if weight[0] != "none":
            keys |= {"tis_batch_normalize": True, "tis_normalize_over": over}
        elif denominator == "fixed":
            continue
        for samples in [random_samples(LENGTHS, seed=33), sprinkle(random_samples(LENGTHS, seed=34), seed=1)]:
            for per_token_loss in [False, True] if denominator == "kept" else [False]:
                args = args_of(keys, per_token_loss=per_token_loss)
                prepare_rollout(args, 0, rollout_data(samples))
                whole, _, _ = call_hook(keys, samples, args=args)
                parts = [[0, 1], [2], [3, 4, 5, 6]]
                split = [subset(samples, part) for part in parts]
                outputs = [call_hook(keys, part, args=args) for part in split]
                assert torch.equal(torch.cat([loss for loss, _, _ in outputs]), whole)
                expected = correct(split, keys, per_token_loss=per_token_loss, rollout=[samples])
                for (loss, masks, _), judge in zip(outputs, expected, strict=True):
                    torch.testing.assert_close(loss.double(), flat(judge.weights), rtol=RTOL, atol=0)
                    assert torch.equal(flat(masks), flat(judge.masks))


def rollout_data(samples: Samples) -> dict:
    lengths = [m.numel() for m in samples.masks]
    return {
        "log_probs": samples.train,
        "rollout_log_probs": samples.rollout,
        "loss_masks": samples.masks,
        "response_lengths": lengths,
        "total_lengths": [length + 3 for length in lengths],
    }


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask", "unbounded"])
def test_at_length_one_all_levels_are_the_same(mode):
    samples = random_samples([1] * 40, seed=35, outliers=0.3)
    bounds = {} if mode == "unbounded" else {"tis_upper_bound": 1.5}
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
    for mode in ["truncate", "clip", "mask"]:
        keys = {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_upper_bound": 1e9, "mis_guard": "warn"}
        if mode != "truncate":
            keys["tis_lower_bound"] = 1e-9
        weights, masks = weights_masks(keys, samples)
        assert torch.equal(flat(weights), flat(raw))
        assert torch.equal(flat(masks), flat(raw_masks))
    expected = []
    for t, r, m in zip(samples.train, samples.rollout, samples.masks, strict=True):
        chosen = (t - r).double()[m != 0]
        x = {"token": (t - r).double(), "sequence": chosen.sum(), "geometric": chosen.mean()}[level]
        expected.append(torch.where(m != 0, x.clamp(-20, 20).exp().expand_as(t), 0.0))
    torch.testing.assert_close(flat(raw), flat(expected), rtol=RTOL, atol=0)


@weights_of_grid
@gates_of_grid
def test_on_policy_input_gives_weight_exactly_one_and_keeps_everything(weight, gate):
    generator = torch.Generator().manual_seed(37)
    scored = [torch.randn(length, generator=generator) - 3 for length in LENGTHS]
    masks = [m.clone() for m in random_samples(LENGTHS, seed=37, mask=0.7).masks]
    masks[5].zero_()
    samples = Samples(scored, [s.clone() for s in scored], masks)
    for normalizer in ["no normaliser", "kept", "valid, micro-batch"]:
        for denominator in ["fixed", "kept"]:
            veto = {"rs_veto_threshold": 0.999, "rs_veto_upper_threshold": 1.001}
            keys = correction_keys(weight, gate=gate, normalizer=normalizer, mis_denominator=denominator) | veto
            pg_loss = torch.randn(sum(LENGTHS), generator=generator)
            loss, new_masks, metrics = call_hook(keys, samples, pg_loss=pg_loss)
            response = torch.cat(masks) != 0
            assert torch.equal(loss[response], pg_loss[response])
            assert all(torch.equal(new.float(), old.float()) for new, old in zip(new_masks, masks, strict=True))
            ones = [
                f"mis_{name}" for name in ("ess_ratio_token", "ess_ratio_seq", "ratio_max", "ratio_min", "ppl_ratio")
            ]
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
    for gate in GATES:
        for veto in VETOES:
            for normalizer in ["no normaliser", "kept"]:
                keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer)
                metrics = call_hook(keys, samples)[2]
                assert_same(only, {name: metrics[name] for name in only})


@weights_of_grid
@gates_of_grid
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


def test_a_veto_on_one_token_responses_is_a_one_sided_token_gate():
    samples = random_samples([1] * 60, seed=45, outliers=0.4)
    veto = {"use_tis": True, "tis_level": "none", "rs_veto_threshold": 0.25, "mis_guard": "warn"}
    gate = gates_only({"level": "token", "low": 0.25, "high": math.inf})
    vetoed = flat(weights_masks(veto, samples)[1])
    assert 0 < vetoed.sum() < 60
    assert torch.equal(vetoed, flat(weights_masks(gate, samples)[1]))


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


@pytest.mark.parametrize("gate", ["no gate", "token gate"])
def test_at_token_level_a_non_finite_token_is_like_a_masked_one(gate):
    clean = random_samples(LENGTHS, seed=47)
    broken = Samples([t.clone() for t in clean.train], [r.clone() for r in clean.rollout], clean.masks)
    masked = Samples(clean.train, clean.rollout, [m.clone() for m in clean.masks])
    for sample, index, column, value in [(0, 0, broken.train, math.nan), (4, 2, broken.rollout, -math.inf)]:
        column[sample][index] = value
        broken.masks[sample][index] = 1
        masked.masks[sample][index] = 0
    keys = correction_keys(("token", "clip"), gate=gate, normalizer="kept")
    loss, masks, metrics = call_hook(keys, broken)
    expected_loss, expected_masks, expected_metrics = call_hook(keys, masked)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(flat(masks), flat(expected_masks))
    for name in metrics:
        if "kept" in name or "nonfinite" in name or "invalid" in name:
            continue
        actual = sum_of_sample_mean(metrics[name].split(LENGTHS), broken.masks)
        expected = sum_of_sample_mean(expected_metrics[name].split(LENGTHS), masked.masks)
        torch.testing.assert_close(
            actual, expected, rtol=RTOL, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    share = sum_of_sample_mean(metrics["mis_nonfinite_token_fraction"].split(LENGTHS), broken.masks)
    wanted = 1 / float(broken.masks[0].sum()) + 1 / float(broken.masks[4].sum())
    torch.testing.assert_close(share, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("weight", "gate"),
    [
        (("sequence", "truncate"), "no gate"),
        (("geometric", "clip"), "no gate"),
        (("token", "truncate"), "sequence gate"),
        (("none", "unbounded"), "geometric gate"),
    ],
    ids=str,
)
def test_above_token_level_a_non_finite_token_takes_its_sequence_out(weight, gate):
    clean = random_samples(LENGTHS, seed=48)
    broken = Samples([t.clone() for t in clean.train], clean.rollout, clean.masks)
    broken.train[4][0] = math.nan
    without = Samples(clean.train, clean.rollout, [m.clone() for m in clean.masks])
    without.masks[4].zero_()
    keys = correction_keys(weight, gate=gate, normalizer="kept" if weight[0] != "none" else "no normaliser")
    loss, masks, metrics = call_hook(keys, broken)
    expected_loss, expected_masks, _ = call_hook(keys, without)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(flat(masks), flat(expected_masks))
    # The mismatch of its other tokens is still measured.
    assert (metrics["mis_logprob_abs_diff"].split(LENGTHS)[4][1:][clean.masks[4][1:] != 0] != 0).any()


@weights_of_grid
def test_inputs_are_never_changed_and_two_calls_give_the_same(weight):
    samples = sprinkle(random_samples(LENGTHS, seed=49), seed=6)
    copies = [[x.clone() for x in column] for column in (samples.train, samples.rollout, samples.masks)]
    for gate in GATES:
        keys = correction_keys(weight, gate=gate, veto="all vetoes", normalizer="kept", mis_denominator="kept")
        args = args_of(keys)
        before = dict(vars(args))
        pg_loss = torch.linspace(-1, 1, sum(LENGTHS)).requires_grad_()
        first = call_hook(keys, samples, pg_loss=pg_loss, args=args)
        second = call_hook(keys, samples, pg_loss=pg_loss, args=args)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
        assert_same(first[2], second[2])
        assert torch.equal(pg_loss.detach(), torch.linspace(-1, 1, sum(LENGTHS)))
        assert {key: vars(args)[key] for key in before} == before
        for copy, column in zip(copies, (samples.train, samples.rollout, samples.masks), strict=True):
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(copy, column, strict=True))
        for new in first[1]:
            new.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(copies[2], samples.masks, strict=True))


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
