"""All presets by name."""

from __future__ import annotations

from itertools import chain

from mis_ext.checks import did_you_mean
from mis_ext.methods import (
    control_variates,
    covariance,
    decoupled,
    kernels,
    kl_penalties,
    masks,
    ppo,
    reinforce,
    second_moment,
    sequence_ratio,
    trust_region,
)
from mis_ext.methods.preset import Preset

_FAMILIES = (
    ppo,
    decoupled,
    masks,
    reinforce,
    trust_region,
    sequence_ratio,
    kernels,
    second_moment,
    covariance,
    kl_penalties,
    control_variates,
)

PRESETS: dict[str, Preset] = {row.name: row for row in chain.from_iterable(family.FAMILY for family in _FAMILIES)}
"""All presets of methods by name, family after family."""


def find_preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"no method {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
