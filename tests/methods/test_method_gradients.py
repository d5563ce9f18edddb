# SPDX-License-Identifier: Apache-2.0
"""Every preset's coefficient is the finite difference of its paper's loss."""

import math

import method_losses
import pytest
import torch
from method_cases import apply, each_preset, make_data, parameters
from method_losses import Data

from mis_ext import Weight
from mis_ext.methods import METHODS

STEP = 1e-6
REJECTING = (
    *("token_mis", "sequence_mis", "geometric_rs", "segment_rs", "geometric_rs_token_tis", "veto", "trm"),
    *("sequence_error", "intellect_3", "mis_po", "opsm"),
)
"""Presets that change the mask. The other ones only set weights to 0."""


def finite_difference(name: str, data: Data) -> torch.Tensor:
    """Minus the derivative of the paper's loss by every log-prob."""
    moves = STEP * torch.eye(len(data.x), dtype=torch.float64)
    loss = getattr(method_losses, name)
    up, down = (loss(data.x + sign * moves, data, **parameters(name)) for sign in (1.0, -1.0))
    return -(up - down) / (2 * STEP)


@each_preset
@pytest.mark.parametrize("seed", [0, 3])
def test_the_coefficient_is_the_finite_difference_of_the_papers_loss(name, seed) -> None:
    data, mask, layout = make_data(seed=seed)
    result = apply(METHODS[name](**parameters(name)), data, mask, layout)
    torch.testing.assert_close(result.coefficient_T, finite_difference(name, data), rtol=1e-6, atol=1e-8)
    assert torch.equal(result.valid_T, mask)
    assert torch.equal(result.kept_T, mask) == (name not in REJECTING)
    assert not result.coefficient_T.requires_grad


@each_preset
def test_the_loss_has_the_papers_value_and_minus_the_coefficient_as_gradient(name) -> None:
    data, mask, layout = make_data(seed=2)
    current = data.x.clone().requires_grad_()
    result = apply(METHODS[name](**parameters(name)), data, mask, layout, current_logprobs_T=current)
    result.loss_T.sum().backward()
    assert torch.equal(current.grad, -result.coefficient_T)
    wanted = getattr(method_losses, name)(data.x[None], data, **parameters(name))[0]
    if name == "reinforce_token_is":
        # Written there as a ratio: another value, the same gradient.
        wanted = method_losses.score(data.x[None], data, method_losses.omega(data))[0]
    torch.testing.assert_close(result.loss_T.sum().detach(), wanted, rtol=1e-9, atol=1e-9)


def test_icepop_can_count_what_it_masks_in_the_mean_of_its_weights() -> None:
    data, mask, layout = make_data(seed=2)
    numbers = {"low": 0.5, "high": 2.0, "normalize_over": "all_tokens"}
    moves = STEP * torch.eye(len(data.x), dtype=torch.float64)
    up, down = (method_losses.icepop(data.x + sign * moves, data, **numbers) for sign in (1.0, -1.0))
    result = apply(METHODS["icepop"](**numbers), data, mask, layout)
    torch.testing.assert_close(result.coefficient_T, -(up - down) / (2 * STEP), rtol=1e-6, atol=1e-8)
    weights = method_losses.rho(data) * method_losses.inside(method_losses.rho(data), 0.5, 2.0)
    assert 0 < (weights[data.valid] == 0).sum() < len(data.valid)
    # The mean over the others is larger: with it every coefficient would be smaller.
    others = apply(METHODS["icepop"](**numbers | {"normalize_over": "tokens"}), data, mask, layout)
    share = (weights[data.valid] != 0).double().mean()
    torch.testing.assert_close(others.coefficient_T, result.coefficient_T * share, rtol=1e-9, atol=1e-12)


def test_default_weights_have_an_upper_bound_or_say_that_they_have_none() -> None:
    for name, row in METHODS.items():
        weights = [factor for factor in row.method.factors if isinstance(factor, Weight)]
        assert all(math.isfinite(weight.high) for weight in weights if weight.high is not None), name
