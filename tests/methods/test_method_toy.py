# SPDX-License-Identifier: Apache-2.0
"""What coefficients estimate, by enumerating every response of a small policy: expectations are exact sums in float64.

The current policy is the toy's proximal one. An expected gradient is given per state and action: the expected sum of
coefficients of that action, taken in that state.
"""

import math

import pytest
import torch
from toy import Toy

from mis_ext import PackedLayout
from mis_ext.correction.config import Gate
from mis_ext.correction.tokens import TOTAL
from mis_ext.methods import METHODS, KlTerm, Method, RatioWeight, Score

each_seed = pytest.mark.parametrize("seed", range(3))


def coefficients(toy: Toy, method: Method, value=None) -> dict[tuple, torch.Tensor]:
    """Of each response's tokens, with its value as advantage."""
    value = toy.value if value is None else value
    current = torch.cat([toy.log_probs(toy.proximal, y) for y in toy.responses])
    result = method(
        behavior_logprobs_T=torch.cat([toy.log_probs(toy.behavior, y) for y in toy.responses]),
        proximal_logprobs_T=current,
        current_logprobs_T=current,
        reference_logprobs_T=current,
        advantages_T=torch.tensor([value[y] for y in toy.responses for _ in y], dtype=torch.float64),
        response_mask_T=torch.ones_like(current),
        layout=PackedLayout.whole([len(y) for y in toy.responses]),
    )
    parts = result.coefficient_T.split([len(y) for y in toy.responses])
    return dict(zip(toy.responses, parts, strict=True))


def expected(toy: Toy, method: Method, value=None) -> dict[tuple, float]:
    """Under the behavior policy, by state and action."""
    out: dict[tuple, float] = {}
    for y, c in coefficients(toy, method, value).items():
        for t in range(len(y)):
            out[y[: t + 1]] = out.get(y[: t + 1], 0.0) + toy.probability(toy.behavior, y) * float(c[t])
    return out


def truth(toy: Toy, *, states, actions, after) -> dict[tuple, float]:
    """The gradient with states, actions and continuations of the given policies."""
    longer = {y[: t + 1] for y in toy.responses for t in range(len(y))}
    return {
        s: toy.prefix_probability(states, s[:-1]) * float(actions[s[:-1]][s[-1]]) * toy.value_after(after, s)
        for s in longer
    }


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for key, number in found.items():
        assert math.isclose(number, wanted[key], rel_tol=1e-9, abs_tol=1e-12), key


def distance(found: dict, wanted: dict) -> float:
    return math.dist(list(found.values()), [wanted[key] for key in found]) / math.hypot(*wanted.values())


SEQUENCE_IS = Method(surrogate=Score(), factors=(RatioWeight(pair=TOTAL, level="sequence"),))
PREFIX_IS = Method(surrogate=Score(), factors=(RatioWeight(pair=TOTAL, level="prefix"),))


@each_seed
@pytest.mark.parametrize("stops", [True, False])
def test_unbounded_sequence_weights_give_the_gradient_of_the_current_policy(seed, stops) -> None:
    toy = Toy(seed=seed, stops=stops)
    pi = toy.proximal
    assert_same(expected(toy, SEQUENCE_IS), truth(toy, states=pi, actions=pi, after=pi))


@each_seed
def test_token_weights_mend_the_action_prefix_weights_the_state_too_and_neither_what_follows(seed) -> None:
    toy = Toy(seed=seed)
    mu, pi = toy.behavior, toy.proximal
    wanted = truth(toy, states=pi, actions=pi, after=pi)
    token, prefix = (expected(toy, method) for method in (METHODS["reinforce_token_is"].method, PREFIX_IS))
    assert_same(token, truth(toy, states=mu, actions=pi, after=mu))
    assert_same(prefix, truth(toy, states=pi, actions=pi, after=mu))
    assert distance(token, wanted) > 0.01
    assert distance(prefix, wanted) > 0.01


@each_seed
def test_the_expected_weight_up_to_any_token_is_one(seed) -> None:
    toy = Toy(seed=seed, stops=False)
    ones = dict.fromkeys(toy.responses, 1.0)
    for method in (PREFIX_IS, METHODS["reinforce_token_is"].method):
        c = coefficients(toy, method, ones)
        for t in range(len(toy.responses[0])):
            mean = sum(toy.probability(toy.behavior, y) * float(c[y][t]) for y in toy.responses)
            assert mean == pytest.approx(1.0, rel=1e-12)
    geometric = Method(surrogate=Score(), factors=(RatioWeight(pair=TOTAL, level="geometric"),))
    c = coefficients(toy, geometric, ones)
    assert sum(toy.probability(toy.behavior, y) * float(c[y][0]) for y in toy.responses) < 1.0 - 1e-4


@each_seed
def test_truncation_loses_exactly_the_weight_above_the_bound_and_masking_loses_more(seed) -> None:
    toy = Toy(seed=seed)
    value = {y: abs(v) for y, v in toy.value.items()}
    bound = 1.5

    def estimate(method):
        c = coefficients(toy, method, value)
        return sum(toy.probability(toy.behavior, y) * float(c[y][0]) for y in toy.responses)

    excess = sum(
        max(toy.probability(toy.proximal, y) - bound * toy.probability(toy.behavior, y), 0.0) * value[y]
        for y in toy.responses
    )
    target = estimate(SEQUENCE_IS)
    truncated = estimate(METHODS["reinforce_sequence_tis"](high=bound))
    gate = Gate(pair=TOTAL, reduce="sum", high=bound)
    masked = estimate(Method(surrogate=Score(), factors=(*SEQUENCE_IS.factors, gate)))
    assert target - truncated == pytest.approx(excess, rel=1e-9)
    assert target - masked > target - truncated > 0.0


@each_seed
def test_a_mask_with_weights_estimates_the_target_on_what_it_keeps(seed) -> None:
    toy = Toy(seed=seed)
    gate = Gate(pair=TOTAL, reduce="sum", low=0.5, high=2.0)
    c = coefficients(toy, Method(surrogate=Score(), factors=(*SEQUENCE_IS.factors, gate)))
    found = sum(toy.probability(toy.behavior, y) * float(c[y][0]) for y in toy.responses)
    kept = [y for y in toy.responses if 0.5 <= toy.probability(toy.proximal, y) / toy.probability(toy.behavior, y) <= 2]
    assert found == pytest.approx(sum(toy.probability(toy.proximal, y) * toy.value[y] for y in kept), rel=1e-9)
    assert 0 < len(kept) < len(toy.responses)


@each_seed
def test_the_naive_gradient_drifts_away_from_the_behavior_policy_where_advantages_are_negative(seed) -> None:
    toy = Toy(seed=seed, max_length=1)
    minus_one = dict.fromkeys(toy.responses, -1.0)
    # In logits: sum over actions of E[c] (1 - pi), which is pi - mu for advantage -1.
    naive, weighted = (expected(toy, METHODS[n].method, minus_one) for n in ("reinforce", "reinforce_token_is"))
    pi = toy.proximal[()]
    drift, none = (
        torch.tensor([c[(a,)] for a in range(3)], dtype=torch.float64) - pi * sum(c.values()) for c in (naive, weighted)
    )
    torch.testing.assert_close(drift, pi - toy.behavior[()])
    torch.testing.assert_close(none, torch.zeros(3, dtype=torch.float64))


def kl_gradient(policy: torch.Tensor, other: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Of KL(policy, other), or of KL(other, policy), in the policy's logits."""
    logits = policy.log().clone().requires_grad_()
    p = logits.softmax(0)
    kl = (other * (other / p).log()).sum() if reverse else (p * (p / other).log()).sum()
    (gradient,) = torch.autograd.grad(kl, logits)
    return gradient


@pytest.mark.parametrize(
    ("estimator", "off_policy", "wanted"),
    [
        ("unbiased", True, "forward"),
        ("unbiased", False, "forward"),
        ("k2", False, "forward"),
        ("k3", False, "reverse"),
        ("k1", False, "nothing"),
        ("k3", True, "another"),
        ("k2", True, "another"),
    ],
)
def test_whose_gradient_each_kl_estimate_has_in_expectation(estimator, off_policy, wanted) -> None:
    generator = torch.Generator().manual_seed(5)
    policy, reference, behavior = torch.randn(3, 6, generator=generator, dtype=torch.float64).softmax(-1)
    behavior = behavior if off_policy else policy
    weighed = {"estimator": "k3", "importance": TOTAL} if estimator == "unbiased" else {"estimator": estimator}
    result = Method(surrogate=Score(), terms=(KlTerm(scale=1.0, **weighed),))(
        behavior_logprobs_T=behavior.log(),
        current_logprobs_T=policy.log(),
        reference_logprobs_T=reference.log(),
        advantages_T=torch.zeros(6, dtype=torch.float64),
        response_mask_T=torch.ones(6),
        layout=PackedLayout.whole([1] * 6),
    )
    # E over actions of the coefficient times the gradient of log pi in the logits.
    c = -behavior * result.coefficient_T
    found = c - policy * c.sum()
    forward, reverse = (kl_gradient(policy, reference, reverse=r) for r in (False, True))
    if wanted == "another":
        assert not torch.allclose(found, forward, rtol=1e-3)
        assert not torch.allclose(found, reverse, rtol=1e-3)
    else:
        torch.testing.assert_close(found, {"forward": forward, "reverse": reverse, "nothing": 0 * forward}[wanted])
    if estimator in ("unbiased", "k3"):
        value = float((behavior * result.loss_T).sum())
        kl = float((policy * (policy / reference).log()).sum())
        is_unbiased = estimator == "unbiased" or not off_policy
        assert (abs(value - kl) < 1e-12) is is_unbiased
