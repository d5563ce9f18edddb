# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov and KL-Cov: which tokens are held back, as many as the share says, by a chance that can be repeated."""

import dataclasses
import math

import pytest
import torch
from method_cases import apply, make_data
from method_losses import Data, covariance

from mis_ext import PackedLayout
from mis_ext.methods import METHODS

BAND = {"low": 0.15, "high": 0.25, "cov_low": 0.1, "cov_high": 0.6}


def dropped(data, mask, layout, **numbers) -> list[int]:
    """The tokens that Clip-Cov holds back, of those that PPO's clip does not stop."""
    result = apply(METHODS["clip_cov"](**BAND | numbers), data, mask, layout)
    is_dropped_T = result.valid_T & (result.coefficient_T == 0.0) & ~result.clipped_T
    return is_dropped_T.nonzero().flatten().tolist()


@pytest.mark.parametrize("share", [1e-6, 0.02, 0.05, 1.0])
def test_as_many_tokens_are_held_back_as_the_share_says_at_least_one_and_at_most_those_of_the_band(share) -> None:
    data, mask, layout = make_data(num_sequences=60)
    everything = dropped(data, mask, layout, share=1.0)
    number = max(math.floor(share * int(mask.sum())), 1)
    found = dropped(data, mask, layout, share=share)
    assert len(found) == min(number, len(everything))
    assert set(found) <= set(everything)
    inside = {t for t, c in covariance(data).items() if 0.1 < c < 0.6}
    assert set(everything) <= inside
    assert len(everything) > 10


def test_an_empty_band_holds_nothing_back() -> None:
    data, mask, layout = make_data()
    assert dropped(data, mask, layout, cov_low=1e6, cov_high=2e6, share=0.5) == []
    nothing = torch.zeros_like(mask)
    assert not apply(METHODS["clip_cov"].method, data, nothing, layout).coefficient_T.any()
    assert not apply(METHODS["kl_cov"].method, data, nothing, layout).coefficient_T.any()


def test_the_choice_is_the_same_again_for_sequences_in_another_order() -> None:
    data, mask, layout = make_data(num_sequences=20)
    lengths = list(layout.response_lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    order = [*range(10, 20), *range(10)]
    moved = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in order])
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(Data) if f.name != "sequences"}
    again = Data(**{name: values[moved] for name, values in fields.items()}, sequences=[])
    found = dropped(again, mask[moved], PackedLayout.whole([lengths[i] for i in order]), share=0.05)
    wanted = dropped(data, mask, layout, share=0.05)
    assert sorted(moved[found].tolist()) == wanted
    assert len(wanted) > 1


def test_a_token_under_the_mask_changes_no_covariance() -> None:
    data, mask, layout = make_data()
    spoilt = dataclasses.replace(
        data, x=torch.where(mask, data.x, math.nan), advantages=torch.where(mask, data.advantages, 1e30)
    )
    for name in ("clip_cov", "kl_cov"):
        method = METHODS[name](share=0.1)
        first, second = (apply(method, each, mask, layout).coefficient_T for each in (data, spoilt))
        assert torch.equal(first, second)


def test_the_largest_covariances_are_chosen_also_where_all_are_negative() -> None:
    log_prob = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    advantages = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    data = Data(log_prob, log_prob, log_prob - 0.5, log_prob, advantages, [torch.arange(4)], log_prob)
    result = apply(
        METHODS["kl_cov"](share=0.5, scale=0.25), data, torch.ones(4, dtype=torch.bool), PackedLayout.whole([4])
    )
    # Of -4.5, -0.5, -0.5 and -4.5 the two in the middle; their ratio is above 1, so that the penalty pulls down.
    wanted = math.exp(0.5) * advantages - torch.tensor([0.0, 0.25, 0.25, 0.0])
    torch.testing.assert_close(result.coefficient_T, wanted, rtol=1e-12, atol=1e-12)
