# SPDX-License-Identifier: Apache-2.0
"""Whatever statistic, reduction, action and bound: both backends do what the float64 judge says."""

from collections import Counter
from random import Random

import hypothesis.strategies as st
import pytest
import torch
from cases import assert_close, assert_hook_metrics, assert_values, drawn_samples, flat
from drawn_configs import LEVELS, Balanced, Point, broken_batch, correct_point, draw_point
from hypothesis import assume, given
from reference import Samples, correct
from searching import searching
from triton_support import DEVICE, HAS_GPU, OBSTACLE

import mis_ext

MARGIN = 1e-5
NUM_FUSED = 10
# A band may reject what is on-policy, or be wide: here both are meant.
pytestmark = pytest.mark.filterwarnings("ignore:a gate on", "ignore:a geometric")


@st.composite
def drawn_points(draw) -> Point:
    return draw_point(lambda options: draw(st.sampled_from(options)))


def assert_judged(point: Point, samples: Samples) -> None:
    (expected,) = correct([samples], point.rules, per_token_loss=point.config.per_token_loss)
    assume(expected.margin > MARGIN)
    correction = correct_point(point, samples)
    assert_close(correction.weights_T, flat(expected.weights), what="weights")
    assert torch.equal(correction.loss_mask_R.double(), flat(expected.masks))
    assert_hook_metrics(correction.token_metrics, expected, samples)
    assert_values({name: metric.value() for name, metric in correction.metrics.items()}, expected, samples)


@searching(60)
@given(point=drawn_points(), samples=drawn_samples())
def test_any_gates_and_any_weight_are_those_of_the_judge(point, samples) -> None:
    assert_judged(point, samples)


def fused_cases() -> list[tuple[Point, Samples]]:
    """Points and samples, no number of which is close to a bound."""
    random, found, used = Random(0), [], Counter()
    while len(found) < NUM_FUSED:
        choose = Balanced(random, used)
        point, samples = draw_point(choose), broken_batch([5, 1, 9, 3, 40], seed=random.randrange(1000))
        (expected,) = correct([samples], point.rules, per_token_loss=point.config.per_token_loss)
        if expected.margin > MARGIN and 0.0 < flat(expected.masks).mean() < 0.9:
            found.append((point, samples))
            used = choose.used
    return found


@pytest.fixture(scope="module")
def fused() -> list[tuple[Point, Samples]]:
    return fused_cases()


def test_the_points_for_triton_have_every_choice_among_them(fused) -> None:
    configs = [point.config for point, _ in fused]
    gates = [gate for config in configs for gate in config.gates]
    weights = [config.weight for config in configs if config.weight is not None]
    assert {gate.statistic for gate in gates} == set(mis_ext.STATISTICS)
    assert {gate.reduce for gate in gates} == set(LEVELS)
    assert {gate.action for gate in gates} == {"reject", "zero"}
    assert any(gate.after for gate in gates)
    assert {weight.mode for weight in weights} == set(mis_ext.BOUNDS)
    assert {weight.level for weight in weights} == {"token", "sequence", "geometric"}
    assert {config.normalize_over for config in configs} == {None, "kept", "valid"}


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.parametrize("number", range(NUM_FUSED))
def test_generated_kernels_are_the_eager_backend(number, fused, monkeypatch) -> None:
    point, samples = fused[number]
    results: list[mis_ext.Correction] = []
    for backend in ("triton", "eager"):
        monkeypatch.setenv("MIS_EXT_BACKEND", backend)
        results.append(correct_point(point, samples, device=DEVICE))
    ours, eager = results
    torch.testing.assert_close(ours.weights_T, eager.weights_T, rtol=1e-6, atol=0.0)
    assert torch.equal(ours.loss_mask_R, eager.loss_mask_R)
    assert list(ours.token_metrics) == list(eager.token_metrics)
    for name, values in ours.token_metrics.items():
        # Differences of numbers near 1 have their rounding, the root of one has half the digits.
        rtol, atol = (1e-3, 2e-3) if name.endswith("_std") else (1e-6, 1e-6)
        torch.testing.assert_close(
            values,
            eager.token_metrics[name],
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


if HAS_GPU:
    test_generated_kernels_are_the_eager_backend = pytest.mark.gpu(test_generated_kernels_are_the_eager_backend)
