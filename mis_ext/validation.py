# SPDX-License-Identifier: Apache-2.0
"""Checks of configuration values, with errors that name key, value, and legal values. The class of all warnings."""

from __future__ import annotations

import difflib
import operator
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar

_Choice = TypeVar("_Choice", bound=str)


class MismatchWarning(UserWarning):
    """Data, configuration, or setup make the correction weak, useless, suspicious, or slow."""


class Errors(list[Exception]):
    """Errors of several keys, which are raised together. A ``with`` block collects one error."""

    def __enter__(self) -> Errors:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, (TypeError, ValueError)):
            self.append(error)
            return True
        return False

    def refuse(self, reasons: Iterable[str]) -> Errors:
        """Collect an error for each reason; return these errors."""
        self += map(ValueError, reasons)
        return self

    def raise_all(self) -> None:
        """Raise the collected errors, one per line: a ``TypeError`` if all are of this type, else a ``ValueError``."""
        if self:
            kind = TypeError if all(isinstance(error, TypeError) for error in self) else ValueError
            raise kind("\n".join(dict.fromkeys("\n".join(map(str, self)).splitlines()))) from None


@contextmanager
def errors_of(key: str) -> Iterator[None]:
    """Prefix errors with the name of the mapping."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None


def check_number(
    key: str, value: Any, *, low: float, high: float, open_low: bool = False, open_high: bool = False
) -> float:
    """Return ``value`` as a float in ``[low, high]``; ``open_low``, ``open_high`` exclude an end. NaN is illegal."""
    legal = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{key} must be a number in {legal}, got {value!r}{_yaml_hint(value)}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{key} must be in {legal}, got an integer beyond {sys.float_info.max:.1e}")
    number = float(value)
    is_above = low < number or (low == number and not open_low)
    is_below = number < high or (high == number and not open_high)
    if not (is_above and is_below):
        raise ValueError(f"{key} must be in {legal}, got {value!r}")
    return number


def check_integer(key: str, value: Any, *, low: int | None = None) -> int:
    """Return ``value`` as an int, at least ``low`` if that is given. Booleans, floats, and strings raise an error."""
    legal = "an integer" if low is None else f"an integer of at least {low}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{key} must be {legal}, got {value!r}{_yaml_hint(value)}")
    if low is not None and number < low:
        raise ValueError(f"{key} must be {legal}, got {number}")
    return number


def check_bool(key: str, value: Any) -> bool:
    """Return ``value``, which must be ``True`` or ``False``."""
    if not isinstance(value, bool):
        hint = " (remove the quotes)" if isinstance(value, str) and value.lower() in ("true", "false") else ""
        raise TypeError(f"{key} must be true or false, got {value!r}{hint}")
    return value


def check_instance(key: str, value: Any, kinds: type | tuple[type, ...]) -> Any:
    """Return ``value``, which must be an instance of ``kinds``."""
    if not isinstance(value, kinds):
        names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        raise TypeError(f"{key} must be a {' or '.join(names)}, got {value!r}")
    return value


def check_choice(key: str, value: Any, choices: Collection[_Choice]) -> _Choice:
    """Return ``value``, which must be one of ``choices``."""
    for choice in choices:
        if isinstance(value, str) and value == choice:
            return choice
    legal = " | ".join(choices) if len(choices) <= _FEW else f"{len(choices)} words"
    hint = _TRUTH if isinstance(value, bool) else did_you_mean(value, choices)
    raise ValueError(f"{key} must be one of {legal}, got {value!a}{hint}")


def check_known(where: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Raise an error for keys outside ``known``, each with the nearest known key."""
    # In ASCII, because a Cyrillic letter would look like the intended letter.
    hints = [f"{key!a}{did_you_mean(key, known)}" for key in keys if key not in known]
    if hints:
        listed = f". Known: {', '.join(sorted(known))}" if len(known) <= _FEW else ""
        raise ValueError(f"unknown {where}: {'; '.join(hints)}{listed}")


def check_mapping(key: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``value``, which must be a mapping whose keys are strings."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{key} must be a mapping, got {value!r}")
    for inner in value:
        if not isinstance(inner, str):
            raise TypeError(f"keys of {key} must be strings, got {inner!r}{_TRUTH * isinstance(inner, bool)}")
    return dict(value)


def check_tensors(given: Mapping[str, Any]) -> None:
    """Raise an error that names a value that is not a tensor."""
    from torch import Tensor  # Where keys alone are checked, torch need not be loaded.

    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_lengths(key: str, value: Any) -> tuple[int, ...]:
    """Return ``value`` as a tuple; it must be a list of integers of at least 0."""
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise TypeError(f"{key} must be a list of integers of at least 0, got {value!r}")
    lengths = tuple(value)
    # A fast path: every micro-batch has new lengths.
    if {*map(type, lengths)} <= {int} and min(lengths, default=0) >= 0:
        return lengths
    return tuple(check_integer(f"{key}[{index}]", length, low=0) for index, length in enumerate(lengths))


def check_entries(what: str, given: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Raise an error if a mapping lacks a ``needed`` name."""
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}")


_TRUTH = " (YAML reads yes, no, on and off as true and false: quote them)"
_FEW = 10
"""An error lists all legal names up to this number; of more names it lists the three nearest."""
_LIKE = 0.65
"""Cutoff of difflib. A typo in a name of three letters leaves a similarity of two thirds; unrelated words are below."""


def did_you_mean(value: Any, choices: Collection[str]) -> str:
    """Return up to three similar names, to append to an error; if none is similar, the nearest three of many."""
    said = str(value).casefold()
    # A name that begins with the given words is nearer than a short name with similar letters.
    begun = [choice for choice in choices if choice.startswith(f"{said}_")]
    near = list(dict.fromkeys((*begun, *difflib.get_close_matches(said, choices, 3, _LIKE))))[:3]
    if near:
        return f" (did you mean {' or '.join(map(repr, near))}?)"
    return "" if len(choices) <= _FEW else f" (nearest: {', '.join(difflib.get_close_matches(said, choices, 3, 0.0))})"


def _yaml_hint(value: Any) -> str:
    """Return the YAML spelling of a number that was given as a string."""
    try:
        number = float(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    import yaml  # Only for an error.

    return f" (YAML reads this as a string; write {yaml.safe_dump(number).split()[0]})"
