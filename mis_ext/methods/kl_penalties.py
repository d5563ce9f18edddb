"""GRPO with a KL term: PPO's objective, and a penalty of the distance to the reference policy on every valid token."""

from __future__ import annotations

from mis_ext.correction.statistics import TOTAL, Pair
from mis_ext.methods.kl_terms import Estimator, KlTerm
from mis_ext.methods.method import Method
from mis_ext.methods.published import NotNegative, published
from mis_ext.methods.surrogates import Ratio

_PPO = "min(r A, clip(r, 0.8, 1.2) A)"


def _with_kl(estimator: Estimator, beta: float, importance: Pair | None = None) -> Method:
    term = KlTerm(estimator=estimator, scale=beta, importance=importance)
    return Method(surrogate=Ratio(low=0.8, high=1.2), terms=(term,))


@published(
    formula=f"{_PPO} - beta (exp(-d) - 1 + d), d = log(current / reference)",
    paper="Shao et al., DeepSeekMath (GRPO), arXiv:2402.03300; k3 of Schulman, Approximating KL Divergence, 2020",
)
def grpo_k3(*, beta: NotNegative = 1e-3) -> Method:
    """The estimate that is unbiased as a value, used as a loss.

    When: near the reference policy.
    Claims: low variance, never negative.
    Counter-claims: its gradient is that of the other KL, and explodes where the policy has left a token the reference
    likes (DeepSeek-V3.2).
    """
    return _with_kl("k3", beta)


@published(
    formula=f"{_PPO} - beta d^2 / 2, d = log(current / reference)",
    paper="Schulman, Approximating KL Divergence, 2020",
)
def grpo_k2(*, beta: NotNegative = 1e-3) -> Method:
    """The estimate whose gradient is that of KL(current, reference) on-policy.

    When: on-policy data.
    Claims: right gradient without an importance ratio.
    Counter-claims: biased as a value, and off-policy as a gradient.
    """
    return _with_kl("k2", beta)


@published(
    formula=f"{_PPO} - beta w (exp(-d) - 1 + d), d = log(current / reference), gradient through w too",
    paper="DeepSeek-AI, DeepSeek-V3.2 (unbiased KL estimate), arXiv:2512.02556",
)
def grpo_unbiased_kl(*, beta: NotNegative = 1e-3) -> Method:
    """Unbiased for any behavior policy: the coefficient is ``w d``.

    When: a KL term off-policy, or with a mismatch of trainer and engine.
    Claims: no exploding gradient where the policy left the reference's tokens.
    Counter-claims: with ``r`` instead of ``w``, as some frameworks have it, it is unbiased for data of the proximal
    policy only; without the gradient of ``w`` it is another KL.
    """
    return _with_kl("k3", beta, importance=TOTAL)


FAMILY = (grpo_k3, grpo_k2, grpo_unbiased_kl)
