"""Every preset's coefficient is the finite difference of its paper's loss; no part of a preset is idle in that test."""

import dataclasses
import math

import method_losses
import pytest
import torch
from method_losses import Data

from mis_ext import PackedLayout
from mis_ext.methods import METHODS, Keep, Method, Ratio, RatioWeight

STEP = 1e-6
# The preset's own numbers where they fire on random data, else wider or narrower ones.
PARAMETERS = {
    "ppo": {"low": 0.15, "high": 0.25},
    "bypass": {"low": 0.15, "high": 0.25},
    "dual_clip": {"low": 0.15, "high": 0.25, "dual": 1.5},
    "kimi_k2_5": {"tau": 0.1},
    "sequence_mis": {"low": 0.3, "high": 3.0},
    "geometric_rs": {"low": 0.8, "high": 1.2},
    "geometric_rs_token_tis": {"low": 0.8, "high": 1.2, "bound": 1.2},
    "sequence_mask_tis": {"low": 0.8, "high": 1.2},
    "icepop": {"high": 2.0},
    "glm_5_reasoning": {"beta": 1.5},
    "veto": {"low": 0.4},
    "trm": {"high_max": 0.5, "high_mean": 0.12},
    "sequence_error": {"high": 1.6},
    "aipo": {"high": 1.5},
    "reinforce_sequence_psis": {"high": 2.5},
    "cispo": {"low": 0.6, "high": 1.3},
    "minirl": {"cap": 1.5},
    "aspo": {"cap": 1.5},
    "ctpo": {"low": 0.2, "high": 0.3, "dual": 0.4},
    "kpop": {"phi": 0.03},
    "intellect_3": {"high": 2.0, "veto": 0.6},
    "mis_po": {"low_sequence": 0.75, "high_sequence": 1.25},
    "dppo_tv": {"delta": 0.05, "cap": 1.5},
    "dppo_kl": {"cap": 1.5},
    "prime_rl": {"low": 0.05, "high": 0.08, "tau": 0.1},
    "dro": {"beta": 0.3},
    "clip_cov": {"low": 0.15, "high": 0.25, "cov_low": 0.1, "cov_high": 0.6, "share": 0.1, "seed": 3},
    "kl_cov": {"share": 0.1, "scale": 0.5},
    "ipo": {"tau": 0.1},
    "gspo": {"low": 0.05, "high": 0.1},
    "gspo_token": {"low": 0.05, "high": 0.1},
    "luspo": {"low": 0.05, "high": 0.1},
    "dispo": {"positive": (0.8, 1.2), "negative": (0.7, 1.3)},
    "maspo": {"scale": 0.3, "power": 0.5, "high": 0.6, "positive": 8.0, "negative": 9.0},
    "m2po": {"budget": 0.1},
    "vaco": {"delta": 0.15},
    "grpo_k3": {"beta": 0.1},
    "grpo_k2": {"beta": 0.1},
    "grpo_unbiased_kl": {"beta": 0.1},
    "opsm": {"delta": 0.1},
}
each_preset = pytest.mark.parametrize("name", METHODS)


def parameters(name: str) -> dict:
    return METHODS[name].defaults | PARAMETERS.get(name, {})


def make_data(*, seed: int = 0, token_advantages: bool = True, num_sequences: int = 32):
    """Responses of several turns, some masked through, log-probs apart by several tenths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 11, (num_sequences,), generator=generator).tolist()
    total = sum(lengths)

    def normal(scale, size=total):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    behavior = -0.05 - 2 * torch.rand(total, generator=generator, dtype=torch.float64)
    proximal = (behavior + normal(0.4)).clamp_max(-1e-3)
    current = (proximal + normal(0.3)).clamp_max(-1e-3)
    advantages = normal(1.0)
    mask = torch.rand(total, generator=generator) < 0.75
    starts = [sum(lengths[:i]) for i in range(num_sequences)]
    sequences = [torch.arange(s, s + n)[mask[s : s + n]] for s, n in zip(starts, lengths, strict=True)]
    if not token_advantages:
        for s, n in zip(starts, lengths, strict=True):
            advantages[s : s + n] = normal(1.0, 1)
    sequences = [tokens for tokens in sequences if len(tokens)]
    data = Data(current, behavior, proximal, behavior + normal(0.5), advantages, sequences, values=normal(0.5))
    return data, mask, PackedLayout.whole(lengths)


def apply(method: Method, data: Data, mask, layout, **more):
    given = {
        "current_logprobs_T": data.x,
        "behavior_logprobs_T": data.behavior,
        "proximal_logprobs_T": data.proximal,
        "reference_logprobs_T": data.reference,
        "advantages_T": data.advantages,
        "state_values_T": data.values,
        "response_mask_T": mask,
    }
    return method(**given | more, layout=layout)


def finite_difference(name: str, data: Data) -> torch.Tensor:
    """Minus the derivative of the paper's loss by every log-prob."""
    moves = STEP * torch.eye(len(data.x), dtype=torch.float64)
    loss = getattr(method_losses, name)
    up, down = (loss(data.x + sign * moves, data, **parameters(name)) for sign in (1.0, -1.0))
    return -(up - down) / (2 * STEP)


def needs_one_advantage(name: str) -> bool:
    return name in ("gmpo", "luspo")


@each_preset
@pytest.mark.parametrize("seed", [0, 1])
def test_the_coefficient_is_the_finite_difference_of_the_papers_loss(name, seed) -> None:
    data, mask, layout = make_data(seed=seed, token_advantages=not needs_one_advantage(name))
    result = apply(METHODS[name](**parameters(name)), data, mask, layout)
    torch.testing.assert_close(result.coefficient_T, finite_difference(name, data), rtol=1e-6, atol=1e-8)
    assert torch.equal(result.valid_T, mask)
    assert not result.coefficient_T.requires_grad


@each_preset
def test_the_loss_has_the_papers_value_and_minus_the_coefficient_as_gradient(name) -> None:
    data, mask, layout = make_data(seed=2, token_advantages=not needs_one_advantage(name))
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
        value = getattr(part, field.name)
        changed: object = None
        numbers = ("low", "high", "power", "mix", "scale", "dual", "positive", "negative", "share")
        if field.name in (*numbers, "ratio_low", "ratio_high") and value is not None:
            if isinstance(value, tuple):
                changed = (value[0] * 1.5, value[1])
            elif isinstance(value, float) and not (field.name == "low" and value == 0.0):
                changed = value * 1.5 + 0.01
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
            changed = "token" if value != "token" else "mean"
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
    found = [make_data(seed=seed, token_advantages=not needs_one_advantage(name)) for seed in (0, 1)]
    method = METHODS[name](**parameters(name))
    before = [apply(method, *given).coefficient_T for given in found]
    for what, variant in variants(method):
        after = [apply(variant, *given).coefficient_T for given in found]
        is_equal = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(after, before, strict=True))
        assert not is_equal, f"{name} {what} gives the same coefficients: no test sees it"


@each_preset
def test_both_sides_of_every_gate_and_clip_are_taken_for_both_signs(name) -> None:
    data, mask, layout = make_data(seed=0, token_advantages=not needs_one_advantage(name))
    method = METHODS[name](**parameters(name))
    # Without its penalty, which is not zero outside of a gate.
    result = apply(dataclasses.replace(method, terms=()), data, mask, layout)
    has_gate = any(isinstance(factor, Keep) for factor in method.factors)
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
        weights = [factor for factor in row.method.factors if isinstance(factor, RatioWeight)]
        assert all(math.isfinite(weight.high) for weight in weights if weight.high is not None), name
