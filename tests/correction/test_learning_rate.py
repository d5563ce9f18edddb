# SPDX-License-Identifier: Apache-2.0
"""The learning-rate multiplier: 1 on-policy, falling with the mismatch, and that of any base from one number."""

import itertools
import math

import pytest
import torch

import mis_ext

NAMES = ("mis_lr_multiplier_token", "mis_lr_multiplier_seq")


def multipliers(scale: float, *, num: int = 32, length: int = 8) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    train = [-torch.rand(length, generator=generator) for _ in range(num)]
    rollout = [x + scale * torch.randn(length, generator=generator) for x in train]
    config = mis_ext.CorrectionConfig(metrics=NAMES)
    masks = [torch.ones(length)] * num
    found = mis_ext.compute_mis_weights(config, train_log_probs=train, rollout_log_probs=rollout, loss_masks=masks)[2]
    return [float(found[name]) for name in NAMES]


def test_it_is_one_on_policy_and_falls_as_the_engines_part() -> None:
    assert multipliers(0.0) == [1.0, 1.0]
    steps = [multipliers(scale) for scale in (0.0, 0.05, 0.1, 0.2, 0.4)]
    for narrow, wide in itertools.pairwise(steps):
        assert all(0.0 < b < a for a, b in zip(narrow, wide, strict=True))
    # A product of eight ratios is further from 1 than one of them.
    assert all(of_sequence < of_token for of_token, of_sequence in steps[1:])


def test_one_sequence_in_a_call_says_nothing_about_sequences() -> None:
    of_token, of_sequence = multipliers(0.4, num=1)
    assert of_sequence == 1.0
    assert of_token < 1.0


@pytest.mark.parametrize("base", [1.0, 0.55, 0.9])
def test_any_other_base_follows_from_the_number(base) -> None:
    _, multiplier = multipliers(0.2)
    published = math.sqrt(min(1.0, multiplier**2 / base))
    assert min(1.0, multiplier / math.sqrt(base)) == pytest.approx(published, rel=1e-12)
    assert (published == 1.0) is (base <= multiplier**2)
