# SPDX-License-Identifier: Apache-2.0
"""The Triton backend gives the judge's numbers and the eager backend's, and the same bits on every run.

On a GPU where there is one; elsewhere Triton's interpreter runs the same kernels, which is slow, so that one point
per weight and gate is visited.
"""

import math

import pytest
import torch
from cases import (
    GATES,
    NORMALIZERS,
    VETOES,
    WEIGHTS,
    assert_hook_metrics,
    assert_hook_output,
    assert_values,
    call_hook,
    correction_keys,
    gates_only,
    random_samples,
    sprinkle,
)
from reference import Samples, correct
from triton_support import DEVICE, HAS_GPU, OBSTACLE

import mis_ext
from mis_ext.correction.plan import DECISIONS, plan_of

MARGIN = 1e-5

programs = pytest.importorskip("mis_ext.correction.triton.generate")
kernels = pytest.importorskip("mis_ext.correction.triton.fused")
TILE = kernels.TILE
METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"}

pytestmark = [pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)), *([pytest.mark.gpu] if HAS_GPU else [])]


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")


@pytest.mark.parametrize("quotient", [lambda num_valid: 1.0 / num_valid, lambda num_valid: num_valid / 4.0])
def test_a_quotient_of_a_number_is_one_symbol_in_either_order(quotient) -> None:
    from mis_ext.correction.formula import Symbol

    symbol = quotient(Symbol("x", "float32"))
    assert symbol.type == "float64"
    expression = symbol.text.replace(".to(tl.float64)", "")
    assert eval(expression, {"x": 8.0}) == quotient(8.0)


@pytest.mark.filterwarnings("ignore:the bounds")
@pytest.mark.parametrize("weight", [{"high": 1e-9}, {"mode": "clip", "low": 1e9, "high": 1e10}])
def test_bounds_beyond_every_ratio_are_those_of_the_eager_backend(weight, monkeypatch) -> None:
    config = mis_ext.CorrectionConfig(weight=mis_ext.Weight(**weight))
    samples = random_samples([5], seed=2, outliers=0.0)
    columns = dict(
        zip(("train_log_probs", "rollout_log_probs", "loss_masks"), vars(moved(samples)).values(), strict=True)
    )
    fused = mis_ext.compute_mis_weights(config, **columns)[0][0]
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    torch.testing.assert_close(fused, mis_ext.compute_mis_weights(config, **columns)[0][0], rtol=1e-6, atol=0.0)


def moved(samples: Samples, device: torch.device | str = DEVICE) -> Samples:
    columns = (samples.train, samples.rollout, samples.masks)
    return Samples(*([x.to(device) for x in column] for column in columns))


def moved_output(output: tuple) -> tuple:
    loss, masks, metrics = output
    return loss.cpu(), [mask.cpu() for mask in masks], {name: values.cpu() for name, values in metrics.items()}


def loss_of(samples: Samples) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, sum(m.numel() for m in samples.masks))


def call(keys: dict, samples: Samples, *, pg_loss: torch.Tensor | None = None, **more) -> tuple:
    pg_loss = loss_of(samples) if pg_loss is None else pg_loss
    return moved_output(call_hook(keys, moved(samples), pg_loss=pg_loss.to(DEVICE), **more))


def assert_agrees(keys: dict, samples: Samples, *, per_token_loss: bool = False) -> tuple:
    (expected,) = correct([samples], keys, per_token_loss=per_token_loss)
    assert expected.margin > MARGIN
    output = call(keys, samples, per_token_loss=per_token_loss)
    assert_hook_output(output, expected, samples, pg_loss=loss_of(samples))
    return output


def batch(name: str) -> Samples:
    lengths = [5, 1, 9, 3]
    samples = random_samples(lengths, seed={"finite": 11, "broken": 12}[name])
    samples.masks[3].zero_()
    return samples if name == "finite" else sprinkle(samples, seed=5)


GRID = [
    pytest.param(weight, gate, id=f"{weight[0]} weight, {weight[1]}, {gate}") for weight in WEIGHTS for gate in GATES
]


@pytest.mark.parametrize(("weight", "gate"), GRID[::4] if HAS_GPU else GRID[::13])
def test_the_hook_agrees_with_the_judge(weight, gate) -> None:
    index = [param.values for param in GRID].index((weight, gate))
    points = [
        correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
        for veto in VETOES
        for normalizer in (["no normaliser"] if weight[0] == "none" else NORMALIZERS)
        for denominator in ("fixed", "kept")
    ]
    # Every point is compiled, or interpreted: a second or more each.
    name = ("broken", "finite")[index % 3 == 0]
    assert_agrees(points[(7 * index) % len(points)], batch(name), per_token_loss=index % 2 == 1)


def test_metrics_only_agrees_with_the_judge() -> None:
    keys = METRICS_ONLY | {"mis_metric_max": 0.5}
    samples = batch("broken")
    (expected,) = correct([samples], keys)
    pg_loss = loss_of(samples)
    loss, masks, metrics = call(keys, samples)
    assert torch.equal(loss, pg_loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(masks, samples.masks, strict=True))
    assert_hook_metrics(metrics, expected, samples)


def test_several_gates_of_a_level_agree_with_the_judge() -> None:
    gates = [
        {"level": "token", "low": 0.75, "high": 3.0},
        {"level": "token", "low": 0.5, "high": 1.5},
        {"level": "sequence", "low": 0.2, "high": 4.0},
        {"level": "sequence", "low": 0.1, "high": 3.0},
        {"level": "geometric", "low": 0.92, "high": 1.09},
    ]
    assert_agrees(gates_only(*gates), batch("broken"))


def test_each_veto_rejects_the_sequence_of_its_token() -> None:
    train = [torch.tensor([-1.0, second]) for second in (-1.0, -2.0, -2.0, -5.0)]
    rollout = [torch.tensor([-1.0, second]) for second in (-1.0, 3.0, -6.0, -5.0)]
    samples = Samples(train, rollout, [torch.ones(2, dtype=torch.int32)] * 4)
    vetoes = VETOES["low veto"] | VETOES["high veto"] | VETOES["probability veto"]
    _, masks, metrics = assert_agrees(correction_keys(("token", "truncate"), **vetoes), samples)
    assert [int(mask[0]) for mask in masks] == [1, 0, 0, 0]
    for place, veto in enumerate(("catastrophic", "veto_upper", "veto_probability"), start=1):
        found = metrics[f"mis_rs_{veto}_seq_fraction"][::2]
        assert found.tolist() == [float(place == sequence) for sequence in range(4)]


@pytest.mark.parametrize(
    "lengths",
    [[0], [1], [0, 3, 0], [TILE], [TILE + 1, 7], [3 * TILE - 1, 0, TILE, 2]],
    ids=lambda lengths: f"{len(lengths)} sequences of up to {max(lengths, default=0)}",
)
def test_any_lengths_agree_with_the_judge(lengths) -> None:
    keys = correction_keys(("token", "clip"), gate="sequence gate", veto="low veto", normalizer="kept")
    assert_agrees(
        keys | {"rs_lower_bound": 1e-6, "rs_upper_bound": 1e6},
        random_samples(lengths, seed=21, outliers=0.01),
    )


def test_sequences_of_several_programs_agree_with_the_judge(monkeypatch) -> None:
    for module in (programs, kernels):
        monkeypatch.setattr(module, "SEQUENCES_PER_BLOCK", 4)
    programs.programs_of.cache_clear()
    keys = correction_keys(("sequence", "clip"), gate="token gate", normalizer="kept", mis_denominator="kept")
    assert_agrees(keys, random_samples([2] * 11, seed=22))
    programs.programs_of.cache_clear()


def test_the_number_of_launches_does_not_depend_on_the_samples(monkeypatch) -> None:
    launches = []
    launch = kernels.BoundKernel.__call__

    def counted(self, num_programs, *arguments, **keywords) -> None:
        launches[-1] += 1
        launch(self, num_programs, *arguments, **keywords)

    monkeypatch.setattr(kernels.BoundKernel, "__call__", counted)
    keys = correction_keys(("token", "truncate"), gate="geometric gate", veto="low veto", normalizer="kept")
    for lengths in ([3], [2, 5] * 3, [TILE + 1]):
        launches.append(0)
        call(keys, random_samples(lengths, seed=23))
    assert launches == [5, 5, 5]


def test_a_call_without_samples_gives_empty_results() -> None:
    keys = correction_keys(("token", "clip"), gate="sequence gate", veto="low veto", normalizer="kept")
    loss, masks, metrics = call(keys, Samples([], [], []))
    assert (loss.shape, masks) == ((0,), [])
    assert all(values.shape == (0,) for values in metrics.values())


def test_a_sequence_of_more_tiles_than_one_step_takes_is_summed_whole() -> None:
    num_tokens = (64 + 2) * TILE + 5
    masks = torch.ones(num_tokens, dtype=torch.int32)
    proximal = torch.full((num_tokens,), -1.0)
    # Metrics that need the sums which are looked at.
    config = mis_ext.CorrectionConfig(metrics=("mis_log_ppl_diff", "mis_training_log_ppl"))
    correction = mis_ext.compute_correction(
        proximal_logprobs_T=proximal.to(DEVICE),
        behavior_logprobs_T=(proximal - 0.25).to(DEVICE),
        response_mask_R=masks.to(DEVICE),
        layout=mis_ext.PackedLayout.whole([num_tokens], device=DEVICE),
        config=config,
    )
    assert correction.sequences["num_valid"].tolist() == [num_tokens]
    assert correction.sequences["sum_log_ratio"].tolist() == [0.25 * num_tokens]
    assert correction.sequences["sum_proximal"].tolist() == [-num_tokens]


@pytest.mark.parametrize(
    ("mask_dtype", "dtypes"),
    [
        (torch.bool, (torch.bfloat16, torch.float32)),
        (torch.uint8, (torch.float16, torch.bfloat16)),
        (torch.int64, (torch.float32, torch.float64)),
        (torch.bfloat16, (torch.bfloat16, torch.bfloat16)),
    ],
    ids=str,
)
def test_half_precision_and_any_mask_dtype_are_computed_in_float32(mask_dtype, dtypes) -> None:
    samples = batch("broken")
    converted = Samples(
        [t.to(dtypes[0]) for t in samples.train],
        [r.to(dtypes[1]) for r in samples.rollout],
        [m.to(mask_dtype) for m in samples.masks],
    )
    keys = correction_keys(("sequence", "truncate"), gate="token gate", veto="all vetoes", normalizer="valid")
    assert_agrees(keys, converted)


def uneven_samples(num_sequences: int, num_tokens: int) -> Samples:
    """Log-probs that no float32 sum holds exactly, a tenth of the tokens masked."""
    generator = torch.Generator().manual_seed(5)
    lengths = (torch.rand(num_sequences, generator=generator) * 2 * num_tokens / num_sequences).int() + 1
    train = [-3.0 * torch.rand(int(n), generator=generator) for n in lengths]
    rollout = [t + 0.01 * torch.randn(len(t), generator=generator) for t in train]
    return Samples(train, rollout, [(torch.rand(len(t), generator=generator) > 0.1).int() for t in train])


REALISTIC = [
    correction_keys(("token", "truncate"), gate="geometric gate", veto="low veto", normalizer="kept"),
    correction_keys(("sequence", "mask"), veto="all vetoes", normalizer="kept", mis_denominator="kept"),
    correction_keys(("geometric", "clip"), gate="token gate", normalizer="valid"),
    METRICS_ONLY,
]


@pytest.mark.parametrize("keys", REALISTIC, ids=lambda keys: keys.get("tis_level", "metrics only"))
def test_both_backends_agree_to_a_millionth(keys, monkeypatch) -> None:
    samples = uneven_samples(64, 200_000) if HAS_GPU else uneven_samples(3, 1800)
    fused = call(keys, samples)
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    eager = call(keys, samples)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused[1], eager[1], strict=True))
    torch.testing.assert_close(fused[0], eager[0], rtol=1e-6, atol=0.0)
    assert list(fused[2]) == list(eager[2])
    for name, values in fused[2].items():
        # A difference of numbers near 1 has their rounding.
        torch.testing.assert_close(
            values, eager[2][name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


EXACTNESS = ["mis_train_rollout_logprob_abs_diff_" + name for name in ("max", "nonzero", "invalid")]
EXACTNESS_ALONE = METRICS_ONLY | {"mis_metrics": EXACTNESS}


def test_exactness_is_the_same_number_to_the_bit_in_both_backends(monkeypatch) -> None:
    below = torch.tensor(-1.0).nextafter(torch.tensor(-math.inf)).item()
    # A token that is a ULP or a subnormal number away, +0 against -0, NaN under the mask, and at last no log-prob.
    cases = [
        ([below, 0.0, math.nan], [-1.0, -0.0, -2.0], 2.0**-23),
        ([-1.0, 0.0, math.nan], [below, -0.0, -2.0], 2.0**-23),
        ([-(2.0**-149), 0.0, math.nan], [0.0, -0.0, -2.0], 2.0**-149),
    ]
    for train, rollout, gap in cases:
        samples = Samples(
            [torch.tensor(train), torch.tensor([-2.0, math.inf])],
            [torch.tensor(rollout), torch.tensor([-2.0, -2.0])],
            [torch.tensor([1, 1, 0]), torch.tensor([1, 1])],
        )
        for backend in ("triton", "eager"):
            monkeypatch.setenv("MIS_EXT_BACKEND", backend)
            metrics = call(EXACTNESS_ALONE, samples)[2]
            largest, differ, invalid = (metrics[name].tolist() for name in EXACTNESS)
            assert largest == [gap, gap, 0.0, gap, gap]
            assert differ == [0.5, 0.5, 0.0, 0.0, 0.0]
            assert invalid == [0.0, 0.0, 0.0, 0.5, 0.5]


# The interpreter divides with numpy, which warns.
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_exactness_of_no_valid_token_is_nan_and_never_zero() -> None:
    metrics = call(EXACTNESS_ALONE, Samples([torch.tensor([math.nan])], [torch.tensor([-1.0])], [torch.tensor([1])]))[2]
    largest, differ, invalid = (float(metrics[name]) for name in EXACTNESS)
    assert math.isnan(largest)
    assert math.isnan(differ)
    assert invalid == 1.0


@pytest.mark.skipif(not HAS_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize(
    "lengths", [[1, 2, 3, 0] * 25_000, [1_000_000, 1, 5]], ids=["100,000 sequences", "1,000,000 tokens"]
)
def test_many_and_long_sequences_give_the_eager_results_and_the_same_bits_again(lengths, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(6)
    behavior = -3.0 * torch.rand(sum(lengths), generator=generator)
    inputs = {
        "proximal_logprobs_T": (behavior + 0.01 * torch.randn(sum(lengths), generator=generator)).to(DEVICE),
        "behavior_logprobs_T": behavior.to(DEVICE),
        "response_mask_R": (torch.rand(sum(lengths), generator=generator) > 0.1).to(DEVICE),
        "layout": mis_ext.PackedLayout.whole(lengths, device=DEVICE),
        "config": mis_ext.config_from_mapping(REALISTIC[0]),
        "token_metrics": True,
    }
    results = []
    for name in ("triton", "triton", "eager"):
        monkeypatch.setenv("MIS_EXT_BACKEND", name)
        correction = mis_ext.compute_correction(**inputs)
        results.append([correction.weights_T, correction.loss_mask_R, *correction.token_metrics.values()])
    for first, again, eager in zip(*results, strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first, eager, rtol=1e-6, atol=1e-6)


def test_the_pieces_of_a_correction_are_those_of_the_eager_backend(monkeypatch) -> None:
    samples = batch("broken")
    keys = correction_keys(("token", "mask"), gate="geometric gate", veto="all vetoes", normalizer="kept")
    inputs = {
        "proximal_logprobs_T": torch.cat(samples.train).to(DEVICE),
        "behavior_logprobs_T": torch.cat(samples.rollout).to(DEVICE),
        "response_mask_R": torch.cat(samples.masks).to(DEVICE),
        "layout": mis_ext.PackedLayout.whole([m.numel() for m in samples.masks], device=DEVICE),
        "config": mis_ext.config_from_mapping(keys),
    }
    fused = mis_ext.compute_correction(**inputs)
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    eager = mis_ext.compute_correction(**inputs)
    assert torch.equal(fused.keep_mask_T, eager.keep_mask_T)
    assert torch.equal(fused.keep_mask_R, eager.keep_mask_R)
    assert fused.token_metrics == eager.token_metrics == {}
    columns = plan_of(inputs["config"]).columns
    pairs = {name: (fused.sequences[name], eager.sequences[name]) for name in (*columns, *DECISIONS, "has_kept")}
    assert list(fused.totals) == list(eager.totals)
    pairs |= {name: (total, eager.totals[name]) for name, total in fused.totals.items()}
    for name, (value, expected) in pairs.items():
        assert value.dtype == expected.dtype, name
        # Differences of numbers near 1 have their rounding in float32.
        atol = 1e-6 if "excess" in name or "k3" in name else 0.0
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    (expected,) = correct([samples], keys)
    assert_values({name: metric.value().cpu() for name, metric in fused.metrics.items()}, expected)


def test_two_runs_give_the_same_bits() -> None:
    samples = uneven_samples(5, 8000 if HAS_GPU else 1000)
    first, second = call(REALISTIC[1], samples), call(REALISTIC[1], samples)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[1], second[1], strict=True))
    assert all(torch.equal(values, second[2][name]) for name, values in first[2].items())


def test_the_gradient_of_the_loss_is_the_weight() -> None:
    samples = batch("broken")
    keys = correction_keys(("token", "truncate"), gate="token gate", normalizer="kept")
    pg_loss = loss_of(samples)
    pg_loss[torch.cat(samples.masks) == 0] = math.nan
    pg_loss = pg_loss.to(DEVICE).requires_grad_()
    loss, _, _ = call_hook(keys, moved(samples), pg_loss=pg_loss)
    loss.sum().backward()
    (expected,) = correct([samples], keys)
    weights = torch.tensor([w for ws in expected.weights for w in ws])
    assert loss.isfinite().all()
    torch.testing.assert_close(pg_loss.grad.cpu(), weights, rtol=1e-5, atol=0.0)
