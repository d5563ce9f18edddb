# SPDX-License-Identifier: Apache-2.0
"""Every preset's coefficient is the finite difference of its paper's loss; no part of a preset is idle in that test."""

import dataclasses
import math

import method_losses
import pytest
import torch
from method_cases import apply, each_preset, make_data, parameters
from method_losses import Data

from mis_ext import Gate, Weight
from mis_ext.methods import METHODS, Method, Ratio

STEP = 1e-6


def finite_difference(name: str, data: Data) -> torch.Tensor:
    """Minus the derivative of the paper's loss by every log-prob."""
    moves = STEP * torch.eye(len(data.x), dtype=torch.float64)
    loss = getattr(method_losses, name)
    up, down = (loss(data.x + sign * moves, data, **parameters(name)) for sign in (1.0, -1.0))
    return -(up - down) / (2 * STEP)


@each_preset
@pytest.mark.parametrize("seed", [0, 1])
def test_the_coefficient_is_the_finite_difference_of_the_papers_loss(name, seed) -> None:
    data, mask, layout = make_data(seed=seed)
    result = apply(METHODS[name](**parameters(name)), data, mask, layout)
    torch.testing.assert_close(result.coefficient_T, finite_difference(name, data), rtol=1e-6, atol=1e-8)
    assert torch.equal(result.valid_T, mask)
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


def variants(method: Method):
    """The method with one thing changed: without a factor or term, with another pair, bound, condition or reduction."""
    for i in range(len(method.factors)):
        yield f"without factor {i}", dataclasses.replace(method, factors=method.factors[:i] + method.factors[i + 1 :])
    for i, factor in enumerate(method.factors):
        for key, changed in changes(factor):
            factors = (*method.factors[:i], changed, *method.factors[i + 1 :])
            yield f"factor {i} with {key}", dataclasses.replace(method, factors=factors)
    for key, changed in changes(method.surrogate):
        yield f"surrogate with {key}", dataclasses.replace(method, surrogate=changed)
    if method.normalize_over is not None:
        for over in (None, "tokens"):
            yield f"normalize_over={over}", dataclasses.replace(method, normalize_over=over)
    for i, term in enumerate(method.terms):
        yield f"without term {i}", dataclasses.replace(method, terms=method.terms[:i] + method.terms[i + 1 :])
        for key, changed in changes(term):
            yield f"term {i} with {key}", dataclasses.replace(method, terms=(*method.terms[:i], changed))


def changes(part):
    for field in dataclasses.fields(part):
        if not field.init:
            continue
        value = getattr(part, field.name)
        changed: object = None
        numbers = ("low", "high", "power", "mix", "scale", "dual", "positive", "negative", "share")
        if field.name in (*numbers, "ratio_low", "ratio_high") and value is not None:
            if isinstance(value, tuple):
                changed = (value[0] * 1.5, value[1])
            elif isinstance(value, float) and not (field.name == "low" and value == 0.0):
                changed = value * 1.5 + 0.01
                if field.name == "low" and isinstance(part, (Gate, Weight)) and changed > (part.high or math.inf):
                    changed = value * 0.5
            elif dataclasses.is_dataclass(value):
                number = "log_bound" if hasattr(value, "log_bound") else "gain"
                changed = dataclasses.replace(value, **{number: getattr(value, number) * 2})
        elif field.name == "pair":
            others = [p for p in ("behavior", "proximal", "current", "reference") if p not in value]
            changed = (value[0], others[0])
        elif field.name == "when" and value == "always":
            changed = "positive"
        elif field.name in ("when", "of_tokens") and value != "always":
            changed = "always"
        elif field.name == "sides":
            # Without a bound it means nothing.
            changed = {"both": "outward", "outward": "both"}[value] if part.low is not None else None
        elif field.name == "level":
            changed = "token" if value != "token" else "geometric"
        elif field.name == "reduce":
            # What a statistic counts means nothing of a single token.
            counts_all = getattr(part, "of_tokens", "always") == "always"
            changed = "token" if value != "token" and counts_all else "mean"
        elif field.name == "seed":
            changed = value + 1
        elif field.name == "spread" and value == "sequence":
            changed = "token"
        elif field.name == "estimator":
            changed = "k1"
        if changed is not None:
            yield f"{field.name}={changed}", dataclasses.replace(part, **{field.name: changed})


@each_preset
def test_every_change_of_a_preset_changes_its_coefficients(name) -> None:
    found = [make_data(seed=seed) for seed in (0, 1)]
    method = METHODS[name](**parameters(name))
    before = [apply(method, *given).coefficient_T for given in found]
    for what, variant in variants(method):
        after = [apply(variant, *given).coefficient_T for given in found]
        is_equal = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(after, before, strict=True))
        assert not is_equal, f"{name} {what} gives the same coefficients: no test sees it"


@each_preset
def test_both_sides_of_every_gate_and_clip_are_taken_for_both_signs(name) -> None:
    data, mask, layout = make_data(seed=0)
    method = METHODS[name](**parameters(name))
    # Without its penalty, which is not zero outside of a gate.
    result = apply(dataclasses.replace(method, terms=()), data, mask, layout)
    has_gate = any(isinstance(factor, Gate) for factor in method.factors)
    has_clip = isinstance(method.surrogate, Ratio) and (method.surrogate.low or method.surrogate.high) is not None
    for sign in (1.0, -1.0):
        meant = result.valid_T & (data.advantages * sign > 0)
        assert result.coefficient_T[meant].ne(0).any()
        if has_clip:
            assert result.clipped_T[meant].any()
        if has_gate and name != "opsm":
            assert (result.coefficient_T[meant] == 0).any()


def test_at_least_35_presets_have_a_loss_of_their_own_here() -> None:
    assert len(METHODS) >= 35
    assert all(callable(getattr(method_losses, name)) for name in METHODS)


def test_default_weights_have_an_upper_bound_or_say_that_they_have_none() -> None:
    for name, row in METHODS.items():
        weights = [factor for factor in row.method.factors if isinstance(factor, Weight)]
        assert all(math.isfinite(weight.high) for weight in weights if weight.high is not None), name
