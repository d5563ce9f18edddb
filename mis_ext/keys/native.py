# SPDX-License-Identifier: Apache-2.0
"""The native spelling: a weight, gates and their settings as they are in :class:`~mis_ext.CorrectionConfig`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

from mis_ext.correction.config import GUARD_NAMES, CorrectionConfig, MetricChoice
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import Reduce
from mis_ext.correction.weights import REDUCTIONS, Denominator, HookLevel, HookWhen, NormalizeOver, Scope, Weight
from mis_ext.validation import check_bool, check_choice, check_known, check_list, check_mapping, check_number

NATIVE_KEY = "mis"
LEVELS: dict[str, Reduce] = {level: REDUCTIONS[level] for level in get_args(HookLevel)} | {
    "sequence_min": "min",
    "sequence_max": "max",
}
"""What the hosts' word for a level says about the tokens of a sequence."""

_SCALING_CHOICES = {"normalize_over": NormalizeOver, "scope": Scope, "denominator": Denominator}
_REPORTING_KEYS = ("staleness", "metrics", "metric_max", "guard", "max_reject_fraction")
NATIVE_KEYS = ("weight", "gates", *_SCALING_CHOICES, *_REPORTING_KEYS)
KEYS_OF_WEIGHT = ("level", "mode", "low", "high", "when")
KEYS_OF_GATE = (
    "statistic",
    "reduce",
    "level",
    "low",
    "high",
    "action",
    "after",
    "name",
)

_NEAR_ONE = 0.02
"""The standard deviation of a token's log-ratio at a k3 of 2e-4, sqrt(2 * k3): chance alone moves a ratio so far."""

_Mapping = Mapping[str, Any]
_Part = TypeVar("_Part", Weight, Gate)


def config_from_native_keys(mapping: Any, *, measure_only: bool, per_token_loss: bool) -> CorrectionConfig:
    """The configuration that the mapping under ``mis:`` spells; a key with value None counts as unset."""
    if mapping is None or mapping == {}:
        raise ValueError(
            f"{NATIVE_KEY}: is empty; remove it, or write what to compute, e.g. "
            f"{NATIVE_KEY}: {{weight: {{level: token, mode: truncate, high: 2.0}}}}"
        )
    keys = {key: value for key, value in check_mapping(NATIVE_KEY, mapping).items() if value is not None}
    check_known(f"keys of {NATIVE_KEY}", keys, NATIVE_KEYS)
    weight = native_weight("weight", keys["weight"]) if "weight" in keys else None
    scaling = {
        key: check_choice(key, keys[key], get_args(choices)) for key, choices in _SCALING_CHOICES.items() if key in keys
    }
    if "normalize_over" not in keys and scaling.get("denominator", "fixed") == "fixed":
        refuse_idle(keys, ["scope"], because="there is neither normalize_over nor denominator: kept")
    return checked_config(
        weight=weight,
        gates=native_gates("gates", keys.get("gates", [])),
        scaling=scaling,
        reporting={**reporting(keys, prefix=""), "per_token_loss": per_token_loss},
        measure_only=measure_only,
    )


def native_keys(config: CorrectionConfig) -> dict[str, Any]:
    """The mapping under ``mis:`` that spells ``config``; what is at its default is left out.

    Raises:
        ValueError: It measures only, which is said by the host's switches.
    """
    if config.metrics_only:
        raise ValueError("metrics_only is spelled use_tis: false, outside of the mapping")
    default = CorrectionConfig()
    changed = {
        key: getattr(config, key)
        for key in (*_SCALING_CHOICES, "staleness", "metrics", "metric_max", "max_reject_fraction")
        if getattr(config, key) != getattr(default, key)
    }
    keys: dict[str, Any] = {}
    if config.weight is not None:
        keys["weight"] = {"level": config.weight.level, "mode": config.weight.mode}
        keys["weight"] |= _changed_fields(config.weight, KEYS_OF_WEIGHT)
    if config.gates:
        keys["gates"] = [_changed_fields(gate, KEYS_OF_GATE) for gate in config.gates]
    if isinstance(config.metrics, tuple):
        changed["metrics"] = list(config.metrics)
    if config.warn_only:
        changed["guard"] = dict.fromkeys(sorted(config.warn_only), "warn")
    return keys | changed


def _changed_fields(part: Weight | Gate, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in names and value != field.default:
            found[field.name] = value
    return found


def checked_config(
    *,
    weight: Weight | None,
    gates: tuple[Gate, ...],
    scaling: _Mapping,
    reporting: _Mapping,
    measure_only: bool,
    staleness_key: str = "staleness",
) -> CorrectionConfig:
    """The configuration of these parts; what is switched off is checked as if it were on."""
    if weight is not None or gates or not measure_only:
        config = CorrectionConfig(weight=weight, gates=gates, **scaling, **reporting)
        if config.staleness and not reporting.get("staleness"):
            raise ValueError(
                f"a gate on the lag, or a weight of stale tokens, needs {staleness_key}: true, with which the rollout "
                "stores the version of each token"
            )
        if not measure_only:
            _warn_narrow_bands(config.all_gates)
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


def native_weight(key: str, value: Any) -> Weight:
    """The weight that a mapping spells."""
    fields = _fields(key, value, KEYS_OF_WEIGHT)
    with errors_of(key):
        if "when" in fields:
            check_choice("when", fields["when"], get_args(HookWhen))
        return _for_the_hook(Weight(**fields))


def native_gates(key: str, value: Any) -> tuple[Gate, ...]:
    """The gates that a list of mappings spells."""
    return tuple(native_gate(f"{key}[{i}]", gate) for i, gate in enumerate(check_list(key, value)))


def native_gate(key: str, value: Any) -> Gate:
    """The gate that a mapping spells; ``level`` is another spelling of ``reduce``."""
    fields = _fields(key, value, KEYS_OF_GATE)
    if "level" in fields and "reduce" in fields:
        raise ValueError(f"{key}: level and reduce are two spellings; use one of them")
    with errors_of(key):
        if "level" in fields:
            fields["reduce"] = LEVELS[check_choice("level", fields.pop("level"), LEVELS)]
        return _for_the_hook(Gate(**fields))


def _for_the_hook(part: _Part) -> _Part:
    # Said here, where the key is known.
    if part.hook_obstacle is not None:
        raise ValueError(part.hook_obstacle)
    return part


def reporting(keys: _Mapping, *, prefix: str) -> dict[str, Any]:
    """What is measured and watched, whatever is corrected."""
    given: dict[str, Any] = {"warn_only": _warn_only(f"{prefix}guard", keys.get(f"{prefix}guard", "error"))}
    if f"{prefix}metrics" in keys:
        given["metrics"] = _metrics(f"{prefix}metrics", keys[f"{prefix}metrics"])
    if f"{prefix}staleness" in keys:
        given["staleness"] = check_bool(f"{prefix}staleness", keys[f"{prefix}staleness"])
    for name, high in (("metric_max", math.inf), ("max_reject_fraction", 1.0)):
        if prefix + name in keys:
            given[name] = check_number(prefix + name, keys[prefix + name], low=0.0, high=high)
    return given


def refuse_idle(keys: _Mapping, names: Sequence[str], *, because: str) -> None:
    """Refuse the keys among ``names`` that are set although they would have no effect."""
    idle = [f"{name}={keys[name]!r}" for name in names if name in keys]
    if idle:
        raise ValueError(f"{', '.join(idle)}: no effect, because {because}")


def _fields(key: str, value: Any, known: Sequence[str]) -> dict[str, Any]:
    fields = check_mapping(key, value)
    check_known(f"keys of {key}", fields, known)
    return fields


def _metrics(key: str, value: Any) -> str | tuple[str, ...]:
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


def _warn_only(key: str, value: Any) -> frozenset[str]:
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
