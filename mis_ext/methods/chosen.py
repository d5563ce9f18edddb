"""A published method as a configuration file chooses it: a name, and parameters other than its defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mis_ext.checks import check_bool, check_choice, check_known, check_list, check_mapping, check_number
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.factors import Keep, RatioWeight
from mis_ext.methods.method import Method
from mis_ext.methods.published import PublishedMethod
from mis_ext.methods.statistics import METHOD_STATISTICS
from mis_ext.methods.surrogates import Ratio


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
    check_known(f"parameters of {where}", given, row.defaults)
    words = _words(row)
    parameters = {
        name: check_choice(f"{where}: {name}", each, words[name])
        if name in words
        else _like_default(f"{where}: {name}", each, row.defaults[name])
        for name, each in given.items()
        if each is not None
    }
    method = row(**parameters)
    _check_bounds(where, method)
    return ChosenMethod(row.name, tuple(parameters.items()), method)


def _words(row: PublishedMethod) -> dict[str, tuple[str, ...]]:
    """The legal words of the parameters that take a word."""
    found: dict[str, tuple[str, ...]] = {}
    for name, hint in get_type_hints(row.make).items():
        literals = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
        if literals:
            found[name] = tuple(chain.from_iterable(map(get_args, literals)))
    return found


def _like_default(key: str, value: Any, default: Any) -> Any:
    """The value as its parameter takes it, of the kind that its default has."""
    if isinstance(default, bool):
        return check_bool(key, value)
    if isinstance(default, tuple):
        values = check_list(key, value)
        if len(values) != len(default):
            raise ValueError(f"{key} must be a list of {len(default)} numbers, got {value!r}")
        return tuple(_like_default(f"{key}[{i}]", each, default[i]) for i, each in enumerate(values))
    number = check_number(key, value, low=-math.inf, high=math.inf, open_low=True, open_high=True)
    if isinstance(default, int):
        if number != int(number):
            raise ValueError(f"{key} must be a whole number, got {value!r}")
        return int(number)
    return number


def _check_bounds(where: str, method: Method) -> None:
    """Refuse bands that are empty, and bounds that no value of what they bound can have."""
    for part in (method.surrogate, *method.factors):
        if not isinstance(part, (Ratio, RatioWeight, Keep)):
            continue
        statistic = METHOD_STATISTICS[part.statistic if isinstance(part, Keep) else "ratio"]
        edges = [*_numbers(part)]
        for edge in edges:
            if not statistic.low <= edge <= statistic.high:
                raise ValueError(
                    f"{where}: its bound of the {statistic.name} would be {edge:g}, which must be in "
                    f"[{statistic.low:g}, {statistic.high:g}]"
                )
        if len(edges) == 2 and not edges[0] < edges[1]:
            raise ValueError(
                f"{where}: its band of the {statistic.name} would be [{edges[0]:g}, {edges[1]:g}]: the lower bound "
                "must be below the upper one"
            )


def _numbers(part: Ratio | RatioWeight | Keep) -> Iterator[float]:
    for bound in (part.low, part.high):
        if isinstance(bound, (int, float)):
            yield bound
