# SPDX-License-Identifier: Apache-2.0
"""Parts of a configuration: gates as mappings, what is measured and watched, and the checks of all together."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from mis_ext.correction.config import (
    GUARD_NAMES,
    REDUCTIONS,
    Action,
    CorrectionConfig,
    Gate,
    HookLevel,
    HookReduce,
    MetricChoice,
    Reduce,
    Weight,
)
from mis_ext.correction.tokens import STATISTICS
from mis_ext.validation import (
    Errors,
    Key,
    check_choice,
    check_known,
    check_list,
    check_mapping,
    check_text,
    number,
    one_of,
)

LEVELS: dict[str, Reduce] = {level: REDUCTIONS[level] for level in get_args(HookLevel)} | {
    "sequence_min": "min",
    "sequence_max": "max",
}
"""What the hosts' word for a level says about the tokens of a sequence."""

GATE_ROWS: dict[str, Key] = {
    "statistic": Key(one_of(*STATISTICS), "ratio", "What is compared with the bounds."),
    "reduce": Key(one_of(*get_args(HookReduce)), "token", "Reduction over the tokens of a response."),
    "level": Key(one_of(*LEVELS), None, "Replaces reduce, in the words of rs_level."),
    "low": Key(number(-math.inf, math.inf), None, "Smallest value that is kept."),
    "high": Key(number(-math.inf, math.inf), None, "Largest value that is kept."),
    "action": Key(one_of(*get_args(Action)), "reject", "reject: masks the token; zero: gives it weight 0."),
    "after": Key(check_text, None, "Name of the filter whose tokens this one ignores."),
    "name": Key(check_text, None, "First part of the names of its metrics."),
}
"""Keys of a filter in ``rs_gates``. :class:`Gate` checks them, together."""
KEYS_OF_GATE = tuple(GATE_ROWS)

_NEAR_ONE = 0.02
"""The standard deviation of a token's log-ratio at a k3 of 2e-4, sqrt(2 * k3): chance alone moves a ratio so far."""

_Mapping = Mapping[str, Any]


def checked_config(
    *,
    weight: Weight | None,
    gates: tuple[Gate, ...],
    scaling: _Mapping,
    reporting: _Mapping,
    measure_only: bool,
) -> CorrectionConfig:
    """The configuration of these parts; what is switched off is checked as if it were on."""
    if weight is not None or gates or not measure_only:
        config = CorrectionConfig(weight=weight, gates=gates, **scaling, **reporting)
        if config.staleness and not reporting.get("staleness"):
            raise ValueError(
                "a gate on the lag, or a weight of stale tokens, needs mis_staleness: true, with which the rollout "
                "stores the version of each token"
            )
        if not measure_only:
            _warn_narrow_bands(config.all_gates.values())
            return config
    return CorrectionConfig(weight=None, metrics_only=True, **reporting)


def _warn_narrow_bands(gates: Iterable[Gate]) -> None:
    """Warn of bands that only geometric means have, where something else is compared with them."""
    for gate in gates:
        if gate.statistic != "ratio" or gate.reduce.endswith("mean"):
            continue
        if all(edge is not None and abs(edge - 1.0) < _NEAR_ONE for edge in (gate.low, gate.high)):
            warnings.warn(
                f"a gate on ratio, reduce: {gate.reduce}, with bounds {gate.low:g} to {gate.high:g} rejects much by "
                f"chance: at a k3 of 2e-4 the ratio of a token differs from 1 by {_NEAR_ONE:g}. Such a narrow band is "
                "for a geometric mean (reduce: mean, level: geometric)",
                stacklevel=5,
            )


def read_gates(key: str, value: Any) -> tuple[Gate, ...]:
    """The gates that a list of mappings spells."""
    gates, wrong = [], Errors()
    for place, gate in enumerate(check_list(key, value)):
        with wrong:
            gates.append(read_gate(f"{key}[{place}]", gate))
    wrong.raise_all()
    return tuple(gates)


def read_gate(key: str, value: Any) -> Gate:
    """The gate that a mapping spells; ``level`` is another spelling of ``reduce``."""
    fields = _fields(key, value, KEYS_OF_GATE)
    if "level" in fields and "reduce" in fields:
        raise ValueError(f"{key}: level and reduce are two spellings; use one of them")
    with errors_of(key):
        if "reduce" in fields:  # A gate of a method can use more words.
            check_choice("reduce", fields["reduce"], get_args(HookReduce))
        if "level" in fields:
            fields["reduce"] = LEVELS[check_choice("level", fields.pop("level"), LEVELS)]
        gate = Gate(**fields)
        # Said here, where the key is known.
        if gate.hook_obstacle is not None:
            raise ValueError(gate.hook_obstacle)
        return gate


def read_compile(key: str, value: Any) -> Any:
    """``auto``, or whether graphs of ``torch.compile`` are used."""
    if value == "auto" or isinstance(value, bool):
        return value
    raise TypeError(f"{key} must be auto, true or false, got {value!r}")


def changed_fields(gate: Gate) -> dict[str, Any]:
    """The mapping that spells a gate."""
    return {
        field.name: getattr(gate, field.name)
        for field in dataclasses.fields(gate)
        if field.name in KEYS_OF_GATE and getattr(gate, field.name) != field.default
    }


def _fields(key: str, value: Any, known: Sequence[str]) -> dict[str, Any]:
    fields = check_mapping(key, value)
    check_known(f"keys of {key}", fields, known)
    return fields


def read_metrics(key: str, value: Any) -> str | tuple[str, ...]:
    """``core``, ``all``, or the names of a list."""
    if isinstance(value, str) and value in get_args(MetricChoice):
        return value
    legal = f"{key} must be all, core or a list of names"
    if isinstance(value, str):
        raise ValueError(f"{legal}, got {value!r}")
    if isinstance(value, Mapping):
        raise TypeError(f"{legal}, got the mapping {value!r}: list the names that you want")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{legal}, got {value!r}")
    return tuple(value)


def read_guards(key: str, value: Any) -> frozenset[str]:
    """The guards that only warn."""
    if not isinstance(value, Mapping):
        return frozenset(GUARD_NAMES) if check_choice(key, value, ("error", "warn")) == "warn" else frozenset()
    per_guard = check_mapping(key, value)
    check_known(f"guards in {key}", per_guard, GUARD_NAMES)
    choices = {name: check_choice(f"{key}.{name}", choice, ("error", "warn")) for name, choice in per_guard.items()}
    return frozenset(name for name, choice in choices.items() if choice == "warn")


@contextmanager
def errors_of(key: str) -> Iterator[None]:
    """Say in which mapping an error is."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None
