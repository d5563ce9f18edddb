# SPDX-License-Identifier: Apache-2.0
"""Score centering, by enumerating the actions of one state: what it takes away, and what it leaves."""

import pytest
import torch

from mis_ext.methods import expected_score

each_seed = pytest.mark.parametrize("seed", range(3))


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"high": -1.0}, ValueError, r"high must be in \(0, inf\], got -1.0"),
        (
            {"behavior_TK": torch.zeros(2, 4)},
            ValueError,
            r"current_TK has shape \[2, 3\], and behavior_TK has \[2, 4\]",
        ),
        ({"behavior_TK": [[0.0]]}, TypeError, "behavior_TK must be a tensor, got list"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, message) -> None:
    given = {"current_TK": torch.full((2, 3), -1.5), "behavior_TK": torch.full((2, 3), -1.4)} | change
    with pytest.raises(error, match=message):
        expected_score(**given)
