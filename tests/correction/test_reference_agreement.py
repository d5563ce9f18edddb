# SPDX-License-Identifier: Apache-2.0
"""Hook, standalone function and packed pipeline against the float64 judge, over the whole grid of settings."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from cases import (
    GATES,
    NORMALIZERS,
    VETOES,
    WEIGHTS,
    assert_close,
    assert_hook_metrics,
    assert_hook_output,
    assert_values,
    call_hook,
    correction_keys,
    drawn_keys,
    drawn_samples,
    flat,
    random_samples,
    sprinkle,
)
from hypothesis import assume, given
from reference import Corrected, Samples, correct
from rows import for_each
from searching import searching

import mis_ext

LENGTHS = [5, 1, 9, 3, 12, 1, 2]
# A float32 statistic cannot tell which side of a bound it lies on when it is closer than this.
MARGIN = 1e-5
FUZZ = searching(25)


def plain_batch(seed: int) -> Samples:
    """A batch with one fully masked sample."""
    samples = random_samples(LENGTHS, seed=seed)
    samples.masks[3].zero_()
    return samples


BATCHES = {"finite": plain_batch(11), "broken": sprinkle(plain_batch(12), seed=5)}
GRID = [
    pytest.param(weight, gate, id=f"{weight[0]} weight, {weight[1]}, {gate}") for weight in WEIGHTS for gate in GATES
]


def is_decidable(keys: dict, samples: Samples) -> bool:
    return correct([samples], keys)[0].margin > MARGIN


def assert_hook_agrees(keys: dict, samples: Samples, *, per_token_loss: bool = False) -> tuple:
    (expected,) = correct([samples], keys, per_token_loss=per_token_loss)
    assert expected.margin > MARGIN
    pg_loss = torch.linspace(-1.0, 2.0, sum(m.numel() for m in samples.masks))
    output = call_hook(keys, samples, per_token_loss=per_token_loss, pg_loss=pg_loss)
    assert_hook_output(output, expected, samples, pg_loss=pg_loss)
    return output


# Every gate and every weight has its turn, and two of three points the batch with broken tokens.
@pytest.mark.parametrize(("weight", "gate"), GRID[::5])
def test_the_hook_agrees_for_every_veto_normalizer_and_denominator(weight, gate):
    normalizers = ["no normalizer"] if weight[0] == "none" else ["no normalizer", "kept", "valid, micro-batch"]
    # Half of the points with each gate, a chessboard of all three, and those of its neighbor are the other half.
    vetoes, start = ["no veto", "low veto", "all vetoes"], GATES.index(gate)
    cells = itertools.product(enumerate(vetoes), enumerate(normalizers), enumerate(["fixed", "kept"]))
    points = [[name for _, name in cell] for cell in cells if (sum(at for at, _ in cell) + start) % 2 == 0]
    for number, (veto, normalizer, denominator) in enumerate(points, start=start):
        keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
        assert_hook_agrees(keys, BATCHES["broken" if number % 3 else "finite"])


# Five for four gates: each weight and each gate meets them all, or all but one.
TURNS = [
    ("finite", "no veto", "kept"),
    ("broken", "high veto", "valid"),
    ("broken", "no veto", "kept"),
    ("broken", "probability veto", "no normalizer"),
    ("finite", "high veto", "valid"),
]


@for_each("point, turn", zip(GRID, itertools.cycle(TURNS), strict=False))
def test_the_standalone_function_and_the_pipeline_agree(point, turn):
    (weight, gate), (batch, veto, normalizer) = point.values, turn
    keys, samples = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer), BATCHES[batch]
    (expected,) = correct([samples], keys)
    assert expected.margin > MARGIN
    assert_standalone_agrees(keys, samples, expected)
    assert_pipeline_agrees(keys, samples, expected)


def assert_standalone_agrees(keys: dict, samples: Samples, expected: Corrected) -> None:
    weights, masks, metrics = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(keys),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    lengths = [m.numel() for m in samples.masks]
    assert [w.numel() for w in weights] == lengths
    assert [m.numel() for m in masks] == lengths
    assert_close(flat(weights), flat(expected.weights), what="weights")
    assert torch.equal(flat(masks), flat(expected.masks))
    assert_values(metrics, expected)


def assert_pipeline_agrees(keys: dict, samples: Samples, expected: Corrected) -> None:
    correction = mis_ext.compute_correction(
        proximal_logprobs_T=torch.cat(samples.train),
        behavior_logprobs_T=torch.cat(samples.rollout),
        response_mask_R=torch.cat(samples.masks),
        layout=mis_ext.PackedLayout.whole([m.numel() for m in samples.masks], device=torch.device("cpu")),
        config=mis_ext.config_from_mapping(keys),
    )
    keep_T = flat(expected.masks) != 0
    assert_close(correction.weights_T, flat(expected.weights), what="weights")
    assert torch.equal(correction.keep_mask_T, keep_T)
    assert torch.equal(correction.keep_mask_R, keep_T)
    values = {name: metric.value() for name, metric in correction.metrics.items()}
    assert_values({name if name.startswith("mis_") else f"mis_{name}": v for name, v in values.items()}, expected)


@FUZZ
@given(keys=drawn_keys(), samples=drawn_samples())
def test_the_standalone_function_agrees_on_any_samples(keys, samples):
    (expected,) = correct([samples], keys)
    assume(expected.margin > MARGIN)
    assert_standalone_agrees(keys, samples, expected)


@FUZZ
@given(
    keys=drawn_keys(),
    samples=drawn_samples(),
    dtypes=st.tuples(*[st.sampled_from([torch.bfloat16, torch.float16, torch.float32])] * 2),
    mask_dtype=st.sampled_from([torch.int32, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.uint8]),
    per_token_loss=st.booleans(),
)
def test_the_hook_agrees_on_any_samples_of_any_dtype(keys, samples, dtypes, mask_dtype, per_token_loss):
    converted = Samples(
        [t.to(dtypes[0]) for t in samples.train],
        [r.to(dtypes[1]) for r in samples.rollout],
        [m.to(mask_dtype) for m in samples.masks],
    )
    assume(is_decidable(keys, converted))
    assert_hook_agrees(keys, converted, per_token_loss=per_token_loss)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16)], ids=str
)
def test_the_difference_of_half_precision_log_probs_is_not_rounded_to_half_precision(dtypes):
    # Each number fits into eight bits, their difference needs thirteen.
    train, rollout = torch.tensor([-1 / 1024, -4.0], dtype=dtypes[0]), torch.tensor([-4.0, -1 / 1024], dtype=dtypes[1])
    weights, _, metrics = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping({"use_tis": True, "tis_mode": "unbounded", "mis_guard": "warn"}),
        train_log_probs=[train],
        rollout_log_probs=[rollout],
        loss_masks=[torch.ones(2)],
    )
    difference = 4 - 1 / 1024
    wanted = torch.tensor([math.exp(difference), math.exp(-difference)], dtype=torch.float64)
    assert_close(weights[0], wanted, what="weights")
    assert float(metrics["mis_logprob_abs_diff"]) == difference
    streams = mis_ext.PackedStreams(train, rollout, torch.ones(2), mis_ext.PackedLayout.whole([2]))
    assert streams.tokens.d.tolist() == [difference, -difference]


def next_below(x: float) -> torch.Tensor:
    return torch.tensor([x]).nextafter(torch.tensor(-math.inf))


EXACTNESS = ["mis_train_rollout_logprob_abs_diff_max", "mis_train_rollout_logprob_abs_diff_nonzero"]
EXACTNESS += ["mis_nonfinite_token_fraction"]
# The first token is another number: a ULP apart, by the least float32 there is, or after rounding to bfloat16.
ALMOST_EQUAL = {
    "one ULP": (torch.tensor([-1.0]), next_below(-1.0), 2.0**-23),
    "one ULP the other way": (next_below(-1.0), torch.tensor([-1.0]), 2.0**-23),
    "a subnormal number": (next_below(0.0), torch.tensor([0.0]), 2.0**-149),
    "bfloat16 against float32": (torch.tensor([-1.0]).bfloat16(), next_below(-1.0), 2.0**-23),
}


@pytest.mark.parametrize("metrics_only", [False, True])
@pytest.mark.parametrize("pair", ALMOST_EQUAL)
def test_one_almost_equal_token_is_seen_and_one_without_a_log_prob_counted(pair, metrics_only):
    train, rollout, gap = ALMOST_EQUAL[pair]
    # Then +0 against -0, and numbers under the mask; the second response has an infinity and two equal tokens.
    samples = Samples(
        [torch.cat([train, train.new_tensor([0.0, math.nan, -3.0])]), torch.tensor([-2.0, -math.inf, -3.0])],
        [torch.cat([rollout, torch.tensor([-0.0, -1.0, -5.0])]), torch.tensor([-2.0, -math.inf, -3.0])],
        [torch.tensor([1, 1, 0, 0]), torch.tensor([1, 1, 1])],
    )
    keys = {"use_tis": not metrics_only, "mis_guard": "warn", "mis_metrics": "all"}
    keys |= {"get_mismatch_metrics": True} if metrics_only else {}
    _, _, metrics = call_hook(keys, samples)
    largest, differ, invalid = ([part.tolist() for part in metrics[name].split([4, 3])] for name in EXACTNESS)
    assert largest == [[gap, gap, 0.0, 0.0], [gap] * 3]
    # Of each response over its valid tokens: one of two, none of two; over response tokens: none, one of three.
    assert differ == [[0.5, 0.5, 0.0, 0.0], [0.0] * 3]
    assert invalid == [[0.0] * 4, [pytest.approx(1 / 3)] * 3]


def test_exactness_over_samples_is_a_share_of_valid_and_of_response_tokens_and_nan_of_none():
    def measured(train: list[float], rollout: list[float], mask: list[int]) -> list[float]:
        _, _, metrics = mis_ext.compute_mis_weights(
            mis_ext.CorrectionConfig(metrics=tuple(EXACTNESS)),
            train_log_probs=[torch.tensor(train, dtype=torch.float64)],
            rollout_log_probs=[torch.tensor(rollout)],
            loss_masks=[torch.tensor(mask)],
        )
        return [float(metrics[name]) for name in EXACTNESS]

    # float64 is read as float32, where the first two are equal.
    found = measured([-1.0 - 1e-12, -2.0, -3.0, math.nan], [-1.0, -2.0, -2.5, -4.0], [1, 1, 1, 1])
    assert found == [0.5, pytest.approx(1 / 3), 0.25]
    largest, differ, invalid = measured([math.nan, -1.0], [-1.0, math.inf], [1, 1])
    assert math.isnan(largest)
    assert math.isnan(differ)
    assert invalid == 1.0
    assert all(math.isnan(value) for value in measured([-1.0], [-1.0], [0]))


@pytest.mark.parametrize("weight", WEIGHTS, ids=" ".join)
@pytest.mark.parametrize("far", [-1e4, -3e38])
def test_log_ratios_of_any_size_give_finite_numbers(weight, far):
    huge = Samples(
        [torch.tensor([far, -1.0, -0.5]), torch.tensor([-0.25, -1.0]), torch.tensor([far]), torch.tensor([-0.5])],
        [torch.tensor([-1.0, far, -0.5]), torch.tensor([far, -0.5]), torch.tensor([-0.5]), torch.tensor([-0.25])],
        [torch.ones(3), torch.ones(2), torch.ones(1), torch.ones(1)],
    )
    # Each of the five with one of four gates.
    for gate, normalizer in zip(itertools.cycle(GATES), NORMALIZERS, strict=False):
        keys = correction_keys(weight, gate=gate, normalizer=normalizer)
        loss, _, metrics = assert_hook_agrees(keys, huge)
        assert loss.isfinite().all()
        assert all(value.isfinite().all() for value in metrics.values())


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize("scope", ["micro_batch", "data_parallel"])
@pytest.mark.parametrize("veto", list(VETOES))
def test_the_kept_denominator_agrees_for_both_host_reducers(veto, scope, per_token_loss):
    for gate, samples in zip(GATES, itertools.cycle(BATCHES.values()), strict=False):
        keys = correction_keys(
            ("token", "truncate"), gate=gate, veto=veto, mis_denominator="kept", tis_normalize_scope=scope
        )
        assert_hook_agrees(keys, samples, per_token_loss=per_token_loss)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_response_of_sixty_thousand_tokens_is_summed_without_losing_digits(level):
    generator = torch.Generator().manual_seed(51)
    rollout = -torch.rand(60_000, generator=generator) - 0.5
    train = rollout + 3e-4 + 0.05 * torch.randn(60_000, generator=generator)
    x = (train.double() - rollout.double()).sum()
    weights, _, _ = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping({"use_tis": True, "tis_level": level, "tis_mode": "unbounded"}),
        train_log_probs=[train],
        rollout_log_probs=[rollout],
        loss_masks=[torch.ones(60_000)],
    )
    # A running sum in float32 is off by 6e-5, a tree of sums by about 1e-6.
    wanted = (x if level == "sequence" else x / 60_000).exp()
    assert math.isclose(float(weights[0][0]), float(wanted), rel_tol=1e-5)


def test_the_metric_cap_is_a_setting_and_infinity_switches_it_off():
    samples = random_samples([6, 4], seed=3, outliers=0.5)
    capped = {}
    for cap in [0.5, 10.0, math.inf]:
        keys = correction_keys(("token", "truncate"), mis_metric_max=cap)
        assert_hook_agrees(keys, samples)
        capped[cap] = call_hook(keys, samples)[2]["mis_chi2_token"].max()
    assert capped[0.5] == 0.5
    assert capped[10.0] == 10.0
    assert capped[math.inf] > 10.0


@FUZZ
@given(samples=drawn_samples())
def test_metrics_only_mode_measures_the_mismatch_of_the_judge(samples):
    (expected,) = correct([samples], {})
    assume(expected.margin > MARGIN)
    keys = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"}
    _, _, metrics = call_hook(keys, samples)
    assert_hook_metrics(metrics, expected, samples)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("weight", "gate"), GRID)
def test_on_a_gpu_the_hook_agrees_too(weight, gate):
    keys = correction_keys(weight, gate=gate, veto="all vetoes", normalizer="kept", mis_denominator="kept")
    for samples in BATCHES.values():
        (expected,) = correct([samples], keys)
        moved = Samples(*([x.cuda() for x in column] for column in (samples.train, samples.rollout, samples.masks)))
        pg_loss = torch.linspace(-1.0, 2.0, sum(LENGTHS), device="cuda")
        loss, masks, metrics = call_hook(keys, moved, pg_loss=pg_loss)
        assert all(mask.is_cuda for mask in masks)
        output = (loss.cpu(), [mask.cpu() for mask in masks], {name: value.cpu() for name, value in metrics.items()})
        assert_hook_output(output, expected, samples, pg_loss=pg_loss.cpu())
