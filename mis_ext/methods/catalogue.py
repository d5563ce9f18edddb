"""All published methods by name."""

from __future__ import annotations

from itertools import chain

from mis_ext.checks import did_you_mean
from mis_ext.methods import (
    control_variates,
    covariance,
    decoupled,
    kl_penalties,
    masks,
    ppo,
    reinforce,
    second_moment,
    sequence_ratio,
    smooth,
    trust_region,
)
from mis_ext.methods.published import PublishedMethod

_FAMILIES = (
    ppo,
    decoupled,
    masks,
    reinforce,
    trust_region,
    sequence_ratio,
    smooth,
    second_moment,
    covariance,
    kl_penalties,
    control_variates,
)

METHODS: dict[str, PublishedMethod] = {
    row.name: row for row in chain.from_iterable(family.FAMILY for family in _FAMILIES)
}
"""All published methods by name, family after family."""


def find_method(name: str) -> PublishedMethod:
    """The method called ``name``.

    Raises:
        ValueError: There is no such method.
    """
    if name not in METHODS:
        raise ValueError(f"no method {name!r}{did_you_mean(name, METHODS)}; there are {', '.join(METHODS)}")
    return METHODS[name]
