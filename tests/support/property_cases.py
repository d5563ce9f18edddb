# SPDX-License-Identifier: Apache-2.0
"""What the tests of mathematical properties share: settings, weights of a configuration, parts of samples."""

import itertools

import pytest
import torch
from cases import GATES, WEIGHTS
from reference import Samples
from rows import for_each
from searching import searching

import mis_ext

FUZZ = searching(25)
LENGTHS = [5, 1, 9, 3, 12, 1, 2]
LEVELS = ["token", "sequence", "geometric"]
ALL = {"use_tis": True, "mis_guard": "warn", "mis_metrics": "all"}
weights_of_grid = pytest.mark.parametrize("weight", WEIGHTS, ids=" ".join)
# Each weight has one or two of the four gates, each gate four or five weights; the judge is asked of all.
points_of_grid = for_each("weight, gate", [*itertools.product(WEIGHTS, GATES)][::3])


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
