# SPDX-License-Identifier: Apache-2.0
"""Drift control and score centering, by enumerating a small policy: what each takes away, and what it leaves."""

import pytest
import torch
from test_method_toy import each_seed
from toy import Toy

from mis_ext import PackedLayout
from mis_ext.methods import METHODS, Method, expected_score

VOCABULARY = 3


def gradient(toy: Toy, method: Method, advantage, value) -> dict[tuple, torch.Tensor]:
    """The expected gradient under the behavior policy in the logits of every state; arguments are of a prefix."""
    tokens = [(y, t) for y in toy.responses for t in range(len(y))]
    current = torch.cat([toy.log_probs(toy.proximal, y) for y in toy.responses])
    result = method(
        behavior_logprobs_T=torch.cat([toy.log_probs(toy.behavior, y) for y in toy.responses]),
        current_logprobs_T=current,
        advantages_T=torch.tensor([advantage(y, t) for y, t in tokens], dtype=torch.float64),
        state_values_T=torch.tensor([value(y[:t]) for y, t in tokens], dtype=torch.float64),
        response_mask_T=torch.ones_like(current),
        layout=PackedLayout.whole([len(y) for y in toy.responses]),
    )
    coefficients: dict[tuple, torch.Tensor] = {}
    for (y, t), c in zip(tokens, result.coefficient_T.tolist(), strict=True):
        of_actions = coefficients.setdefault(y[:t], torch.zeros(VOCABULARY, dtype=torch.float64))
        of_actions[y[t]] += toy.probability(toy.behavior, y) * c
    # d log pi(a) / d logits = 1[a] - pi.
    return {s: c - toy.proximal[s] * c.sum() for s, c in coefficients.items()}


def of_response(toy: Toy):
    return lambda y, _t: toy.value[y]


def mean_value(toy: Toy):
    return lambda state: toy.value_after(toy.behavior, state)


def some_number(state: tuple) -> float:
    return 0.7 - 0.4 * len(state) + 0.3 * sum(state)


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for state, numbers in found.items():
        torch.testing.assert_close(numbers, wanted[state], rtol=1e-9, atol=1e-12)


def drift(toy: Toy, state: tuple) -> torch.Tensor:
    """What a common advantage of 1 in a state pushes the logits by."""
    return toy.prefix_probability(toy.behavior, state) * (toy.behavior[state] - toy.proximal[state])


@each_seed
def test_with_the_mean_of_the_advantage_only_what_depends_on_the_action_is_left(seed) -> None:
    toy = Toy(seed=seed)
    v = mean_value(toy)
    found = gradient(toy, METHODS["drift_control"].method, of_response(toy), v)
    wanted = {}
    for s in found:
        excess = [toy.value_after(toy.behavior, (*s, a)) - v(s) for a in range(VOCABULARY)]
        wanted[s] = (
            toy.prefix_probability(toy.behavior, s) * toy.behavior[s] * torch.tensor(excess, dtype=torch.float64)
        )
    assert_same(found, wanted)
    naive = gradient(toy, METHODS["reinforce"].method, of_response(toy), v)
    assert_same(naive, {s: wanted[s] + v(s) * drift(toy, s) for s in wanted})
    assert any(float((v(s) * drift(toy, s)).abs().max()) > 0.01 for s in wanted)


@each_seed
def test_any_number_of_the_state_takes_away_its_own_drift_and_nothing_else(seed) -> None:
    toy = Toy(seed=seed)
    found = gradient(toy, METHODS["drift_control"].method, of_response(toy), some_number)
    naive = gradient(toy, METHODS["reinforce"].method, of_response(toy), some_number)
    assert_same(found, {s: naive[s] - some_number(s) * drift(toy, s) for s in naive})


@each_seed
def test_a_shift_of_advantages_and_values_by_a_number_of_the_state_changes_no_expectation(seed) -> None:
    toy = Toy(seed=seed)
    v = mean_value(toy)

    def shifted_advantage(y, t):
        return toy.value[y] + some_number(y[:t])

    plain = gradient(toy, METHODS["drift_control"].method, of_response(toy), v)
    shifted = gradient(toy, METHODS["drift_control"].method, shifted_advantage, lambda s: v(s) + some_number(s))
    assert_same(shifted, plain)
    naive = [gradient(toy, METHODS["reinforce"].method, a, v) for a in (of_response(toy), shifted_advantage)]
    assert any(float((naive[1][s] - naive[0][s]).abs().max()) > 0.01 for s in plain)


@each_seed
def test_the_mean_of_the_coefficient_in_a_state_stays_what_it_was(seed) -> None:
    toy = Toy(seed=seed, max_length=1)
    log_pi, log_mu = toy.proximal[()].log(), toy.behavior[()].log()
    advantages = torch.tensor([toy.value[y] for y in toy.responses], dtype=torch.float64)
    order = torch.tensor([y[0] for y in toy.responses])
    result = METHODS["drift_control"].method(
        behavior_logprobs_T=log_mu[order],
        current_logprobs_T=log_pi[order],
        advantages_T=advantages,
        state_values_T=torch.full_like(advantages, 1.7),
        response_mask_T=torch.ones_like(advantages),
        layout=PackedLayout.whole([1] * len(order)),
    )
    probability = toy.behavior[()][order]
    assert float((probability * result.coefficient_T).sum()) == pytest.approx(float((probability * advantages).sum()))
    assert not torch.allclose(result.coefficient_T, advantages)


@each_seed
def test_between_no_correction_and_the_token_ratio(seed) -> None:
    toy = Toy(seed=seed)

    def zero(_state):
        return 0.0

    found = gradient(toy, METHODS["drift_control"].method, of_response(toy), zero)
    assert_same(found, gradient(toy, METHODS["reinforce"].method, of_response(toy), zero))
    # An advantage that is a number of the state, as value too, is the token's importance ratio.
    both = gradient(toy, METHODS["drift_control"].method, lambda y, t: some_number(y[:t]), some_number)
    assert_same(both, gradient(toy, METHODS["reinforce_token_is"].method, lambda y, t: some_number(y[:t]), zero))
    for numbers in both.values():
        torch.testing.assert_close(numbers, torch.zeros_like(numbers), rtol=0.0, atol=1e-12)


def one_state(seed: int, *, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, what samples, and advantages of eight actions; beyond the head both policies agree up to its mass."""
    generator = torch.Generator().manual_seed(seed)
    logits, shift, advantages = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(3))
    p, q = logits.softmax(0), (logits + shift).softmax(0)
    q[head:] = p[head:] * (q[head:].sum() / p[head:].sum())
    return logits, q, advantages


def centered_gradient(logits, q, advantages, *, head: int, high: float | None, given: int) -> torch.Tensor:
    """By autograd: the expected gradient of the loss that ``expected_score`` says; of its head some are given."""
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    weight = (log_p.exp() / q).detach().clamp_max(high) if high is not None else 1.0
    behavior = q.log()[:head].masked_fill(torch.arange(head) >= given, -torch.inf)
    score = expected_score(log_p[None, :head], behavior[None], high=high)
    loss = q * (-weight * advantages * log_p + advantages * score)
    (gradient,) = torch.autograd.grad(-loss.sum(), logits)
    return gradient


@each_seed
@pytest.mark.parametrize("high", [None, 1.2, 1e30])
@pytest.mark.parametrize(("head", "given"), [(8, 8), (3, 3), (5, 3)])
def test_centered_scores_leave_the_covariance_of_advantage_and_score(seed, high, head, given) -> None:
    logits, q, advantages = one_state(seed, head=given)
    p = logits.softmax(0)
    weight = (p / q).clamp_max(high) if high is not None else torch.ones(8, dtype=torch.float64)
    weighted_score = weight[:, None] * (torch.eye(8, dtype=torch.float64) - p)
    naive = (q * advantages) @ weighted_score
    wanted = naive - (q @ advantages) * (q @ weighted_score)
    found = centered_gradient(logits, q, advantages, head=head, high=high, given=given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    # With the whole ratio the score has no mean.
    assert (high == 1e30) == torch.allclose(naive, wanted, rtol=1e-6)


def test_a_token_that_top_p_cut_off_in_the_trainer_is_of_the_tail() -> None:
    current = torch.tensor([[-0.2, -2.0, -torch.inf]], requires_grad=True)
    behavior = torch.tensor([[-0.3, -1.8, -4.0]])
    score = expected_score(current, behavior)
    (gradient,) = torch.autograd.grad(score.sum(), current)
    fewer = expected_score(current[:, :2], behavior[:, :2])
    assert float(score.detach()) == float(fewer.detach())
    assert gradient.isfinite().all()
