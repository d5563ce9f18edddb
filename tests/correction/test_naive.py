# SPDX-License-Identifier: Apache-2.0
"""The page that a reader meets first: it says what the float64 judge says, and the pipeline computes it."""

import math
from collections.abc import Iterator
from random import Random

import pytest
import torch
from cases import assert_close, flat
from drawn_configs import Balanced, Point, broken_batch, correct_point, draw_point
from naive_correction import naive_correction
from reference import Corrected, Samples, correct

import mis_ext

pytestmark = pytest.mark.filterwarnings("ignore:a gate on", "ignore:a geometric")


def drawn_cases(count: int) -> Iterator[tuple[Point, Samples, Corrected]]:
    """Points with every choice among them, samples with every kind of response, and what the judge says of them."""
    choose = Balanced(Random(0))
    while count > 0:
        point, samples = draw_point(choose), broken_batch([5, 1, 9, 3, 0, 7, 4, 12], seed=count)
        # A response without a generated token.
        samples.masks[3].zero_()
        (expected,) = correct([samples], point.rules, per_token_loss=point.config.per_token_loss)
        # The pipeline compares float32.
        if expected.margin > 1e-5:
            yield point, samples, expected
            count -= 1


def test_any_correction_is_that_of_the_judge_and_of_the_pipeline() -> None:
    for point, samples, expected in drawn_cases(80):
        weights, keeps = naive_correction(
            proximal=samples.train,
            behavior=samples.rollout,
            masks=samples.masks,
            config=point.config,
            lags=samples.lags,
        )
        # The same few operations in float64; the sum over a response may have another order.
        wanted = flat(expected.weights)
        torch.testing.assert_close(flat(weights), wanted, rtol=1e-13, atol=0.0, msg=f"weights of {point.config}")
        assert flat(keeps).tolist() == flat(expected.masks).tolist(), point.config
        found = correct_point(point._replace(config=point.config.replace(metrics="core")), samples)
        assert_close(found.weights_T, flat(weights), what=f"weights of the pipeline, {point.config}")
        assert torch.equal(found.keep_mask_R, torch.cat(keeps)), point.config


def test_measuring_changes_nothing() -> None:
    config = mis_ext.CorrectionConfig(weight=None, metrics_only=True)
    given = torch.tensor([-1.0, math.nan, -3.0])
    weights, keeps = naive_correction(
        proximal=[given], behavior=[given.flip(0)], masks=[torch.tensor([1, 1, 0])], config=config
    )
    assert [each.tolist() for each in weights] == [[1.0, 1.0, 1.0]]
    assert [each.tolist() for each in keeps] == [[True, True, False]]


def test_a_huge_log_ratio_is_as_extreme_as_the_largest_one() -> None:
    config = mis_ext.CorrectionConfig(weight=None, gates=(mis_ext.Gate(statistic="k3", high=1.0),))
    proximal, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1e9, -1.1])
    _, keeps = naive_correction(proximal=[proximal], behavior=[behavior], masks=[torch.ones(3)], config=config)
    assert keeps[0].tolist() == [True, False, True]
