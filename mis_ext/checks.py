"""Checks of configuration values; every message names the key, the value and what is legal."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from typing import Any


def check_number(key: str, value: Any, *, low: float, high: float) -> float:
    """``value`` as a float in ``[low, high]``; NaN is never legal."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{key} must be a number in [{low:g}, {high:g}], got {value!r}{_yaml_hint(value)}")
    if not low <= value <= high:
        raise ValueError(f"{key} must be in [{low:g}, {high:g}], got {value!r}")
    return float(value)


def check_bool(key: str, value: Any) -> bool:
    """``value``, which must be ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be true or false, got {value!r}")
    return value


def check_choice(key: str, value: Any, choices: Collection[str]) -> str:
    """``value``, which must be one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{key} must be one of {' | '.join(choices)}, got {value!r}{did_you_mean(value, choices)}")
    return value


def check_known(where: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Refuse keys outside ``known``; a misspelling gets the nearest known key."""
    unknown = [key for key in keys if key not in known]
    if unknown:
        hints = "; ".join(f"{key!r}{did_you_mean(key, known)}" for key in unknown)
        raise ValueError(f"unknown {where}: {hints}. Known: {', '.join(sorted(known))}")


def did_you_mean(value: Any, choices: Collection[str]) -> str:
    """A suggestion to append to an error message, or nothing."""
    near = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _yaml_hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return " (YAML writes infinity as .inf)"
    mantissa, _, exponent = value.lower().partition("e")
    if not exponent:
        return " (remove the quotes)"
    dotted = mantissa if "." in mantissa else f"{mantissa}.0"
    signed = exponent if exponent[0] in "+-" else f"+{exponent}"
    return f" (YAML reads this as a string; write {dotted}e{signed}, not {value})"
