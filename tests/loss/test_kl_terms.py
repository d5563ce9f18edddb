# SPDX-License-Identifier: Apache-2.0
"""KL terms: every estimator, alone, with an importance ratio that carries gradient, and with a cap."""

import itertools

import pytest
import torch

from mis_ext import PackedLayout
from mis_ext.methods import KlTerm
from mis_ext.methods.batch import TOTAL, UPDATE, Batch, Reductions

ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
    "squared": lambda d: d.square(),
}
POLICIES = ("behavior", "proximal", "current", "reference")


@pytest.mark.parametrize(
    ("estimator", "importance", "cap"), [*itertools.product(ESTIMATES, (None, TOTAL, UPDATE), (None, 0.4))]
)
def test_value_and_slope_are_those_of_the_formula(estimator, importance, cap) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(4, 40, generator=generator, dtype=torch.float64)
    log_probs = dict(zip(POLICIES, rows, strict=True))
    current = log_probs["current"].clone().requires_grad_()
    value = ESTIMATES[estimator](current - log_probs["reference"])
    if importance is not None:
        value = value * (current - log_probs[importance[1]]).exp()
    if cap is not None:
        assert ((value.abs() > cap).any(), (value.abs() < cap).any()) == (True, True)
        value = value.clamp(-cap, cap)
    (slope,) = torch.autograd.grad(value.sum(), current)
    batch = Batch(
        log_probs,
        advantages_T=torch.zeros(40, dtype=torch.float64),
        response_mask_T=torch.ones(40, dtype=torch.bool),
        reductions=Reductions(PackedLayout.whole([40])),
        whole_sequences=False,
    )
    found = KlTerm(estimator=estimator, scale=1.0, importance=importance, cap=cap).evaluate(batch)
    torch.testing.assert_close(tuple(found), (value.detach(), slope))


@pytest.mark.parametrize(("estimator", "value", "slope"), [("k2", 1800.0, 60.0), ("squared", 3600.0, 120.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_square_has_no_bound_where_an_exponent_would_have_one(estimator, value, slope, sign) -> None:
    """As in the hosts; 60 nats from the reference policy are more than any ratio of ours."""
    log_probs = {policy: torch.tensor([-61.0]) for policy in POLICIES} | {"reference": torch.tensor([-1.0])}
    if sign < 0.0:
        log_probs["current"], log_probs["reference"] = log_probs["reference"], log_probs["current"]
    batch = Batch(
        log_probs,
        advantages_T=torch.zeros(1),
        response_mask_T=torch.ones(1, dtype=torch.bool),
        reductions=Reductions(PackedLayout.whole([1])),
        whole_sequences=False,
    )
    found = KlTerm(estimator=estimator, scale=1.0).evaluate(batch)
    assert (float(found.value_T), float(found.slope_T)) == (value, -sign * slope)
