"""All published methods by name, and the one that a configuration file chooses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

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
from mis_ext.methods.method import Method
from mis_ext.methods.published import PublishedMethod
from mis_ext.validation import check_mapping, nearest

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
        raise ValueError(f"no method {name!r}: {nearest(name, METHODS)}; mis-ext methods lists all")
    return METHODS[name]


@dataclass(frozen=True, slots=True)
class ChosenMethod:
    """``name`` of a published method, the parameters that were given, and the method that they make."""

    name: str
    parameters: tuple[tuple[str, Any], ...]
    method: Method


def choose_method(key: str, value: Any) -> ChosenMethod:
    """The method that a name spells, or a mapping of ``name`` and parameters.

    Args:
        key: What the user wrote before it, for messages.
        value: ``"icepop"``, or ``{"name": "icepop", "high": 2.0}``.

    Raises:
        ValueError: There is no such method, it has no such parameter, or a number is not legal.
        TypeError: A value has the wrong type, as ``1e-4`` has in YAML.
    """
    given = {"name": value} if isinstance(value, str) else check_mapping(key, value)
    if not isinstance(given.get("name"), str):
        raise TypeError(f"{key} must be the name of a method, or a mapping with the key name, got {value!r}")
    name = given.pop("name")
    try:
        row = find_method(name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    where = f"{key}: {name}"
    parameters = row.checked(where, given)
    return ChosenMethod(row.name, tuple(parameters.items()), row.make(**parameters))
