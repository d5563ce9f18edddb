# SPDX-License-Identifier: Apache-2.0
"""Whatever statistic, reduction, action and bound: the correction does what the float64 judge says."""

from random import Random

import hypothesis.strategies as st
import torch
from cases import assert_close, assert_hook_metrics, assert_values, drawn_samples, flat
from drawn_configs import Balanced, Point, broken_batch, correct_point, draw_point
from hypothesis import assume, given
from reference import Corrected, Samples, correct
from searching import searching

MARGIN = 1e-5
# A band may reject what is on-policy, or be wide: here both are meant.


@st.composite
def drawn_points(draw) -> Point:
    return draw_point(lambda options: draw(st.sampled_from(options)))


def judge(point: Point, samples: Samples) -> Corrected:
    (expected,) = correct([samples], point.rules, per_token_loss=point.config.per_token_loss)
    return expected


def assert_judged(point: Point, samples: Samples, expected: Corrected) -> None:
    correction = correct_point(point, samples)
    assert_close(correction.weights_T, flat(expected.weights), what="weights")
    assert torch.equal(correction.loss_mask_R.double(), flat(expected.masks))
    assert_hook_metrics(correction.token_metrics, expected, samples)
    assert_values({name: metric.value() for name, metric in correction.metrics.items()}, expected, samples)


@searching(60)
@given(point=drawn_points(), samples=drawn_samples())
def test_any_gates_and_any_weight_are_those_of_the_judge(point, samples) -> None:
    expected = judge(point, samples)
    assume(expected.margin > MARGIN)
    assert_judged(point, samples, expected)


def test_every_choice_has_its_turn() -> None:
    """Samples have every kind of response, one without a generated token among them."""
    choose, judged = Balanced(Random(0)), 0
    for seed in range(120):
        point, samples = draw_point(choose), broken_batch([5, 1, 9, 3, 0, 7, 4, 12], seed=seed)
        samples.masks[3].zero_()
        expected = judge(point, samples)
        if expected.margin > MARGIN:
            assert_judged(point, samples, expected)
            judged += 1
    assert judged > 60
