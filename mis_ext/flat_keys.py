"""The two spellings of a configuration: the hosts' flat keys, and the native ``mis:`` mapping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mis_ext.checks import check_bool, check_choice, check_known, check_number
from mis_ext.config import (
    DEFAULT_UPPER_BOUND,
    GUARD_NAMES,
    Band,
    CorrectionConfig,
    Denominator,
    GateFactor,
    Level,
    NormalizeOver,
    Scope,
    WeightFactor,
    WeightMode,
)

PREFIXES = ("tis_", "rs_", "mis_")
HOST_FLAGS = frozenset({"tis_clip", "tis_clip_low"})
"""Flags of the hosts' built-in correction: present on every ``args``, and not ours."""

SWITCHES = ("use_tis", "use_rs")
WEIGHT_KEYS = ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound")
GATE_KEYS = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_gates")
VETO_KEYS = ("rs_veto_threshold", "rs_veto_upper_threshold", "rs_veto_probability", "rs_veto_requires_rs")
NORMALIZE_KEYS = ("tis_batch_normalize", "tis_normalize_scope", "tis_normalize_over", "mis_denominator")
REPORT_KEYS = ("mis_metrics", "mis_metric_max", "mis_guard", "mis_max_reject_fraction")
FLAT_KEYS = SWITCHES + WEIGHT_KEYS + GATE_KEYS + VETO_KEYS + NORMALIZE_KEYS + REPORT_KEYS
NATIVE_KEY = "mis"

_Mapping = Mapping[str, Any]


def config_from_flat_keys(mapping: _Mapping) -> CorrectionConfig:
    """The configuration that ``mapping`` spells; a key with value None counts as unset.

    Keys outside our prefixes belong to the host and are ignored, but for ``calculate_per_token_loss`` and
    ``get_mismatch_metrics``.
    """
    given = {key: value for key, value in mapping.items() if value is not None}
    ours = {key: value for key, value in given.items() if key.startswith(PREFIXES) and key not in HOST_FLAGS}
    check_known("keys", ours, FLAT_KEYS)
    ours |= {key: given[key] for key in SWITCHES if key in given}
    per_token_loss = bool(given.get("calculate_per_token_loss", False))
    measure_only = not check_bool("use_tis", ours.get("use_tis", not given.get("get_mismatch_metrics", False)))
    if NATIVE_KEY in given:
        mixed = sorted(set(ours) - {"use_tis"})
        if mixed:
            raise ValueError(f"{NATIVE_KEY}: and flat keys ({', '.join(mixed)}) are two spellings; use one of them")
        return _from_native(given[NATIVE_KEY], measure_only=measure_only, per_token_loss=per_token_loss)
    return _from_flat(ours, measure_only=measure_only, per_token_loss=per_token_loss)


def _from_flat(keys: _Mapping, *, measure_only: bool, per_token_loss: bool) -> CorrectionConfig:
    # Every value is checked, also those of features that are off: a misspelling must not wait for its feature.
    weight = _flat_weight(keys)
    gates = (*_flat_band_gates(keys), *_flat_vetoes(keys))
    normalize_over, scope, denominator = _flat_normalization(keys, weight=weight)
    return CorrectionConfig(
        weight=None if measure_only else weight,
        gates=() if measure_only else gates,
        normalize_over=None if measure_only else normalize_over,
        scope=scope,
        denominator="fixed" if measure_only else denominator,
        per_token_loss=per_token_loss,
        metrics_only=measure_only,
        **_reporting(keys, prefix="mis_"),
    )


def _flat_weight(keys: _Mapping) -> WeightFactor | None:
    level = check_choice("tis_level", keys.get("tis_level", "token"), (*get_args(Level), "none"))
    mode = check_choice("tis_mode", keys.get("tis_mode", "truncate"), get_args(WeightMode))
    low, high = _flat_weight_bounds(keys)
    inherited = check_bool("use_rs", keys.get("use_rs", False)) and (
        "rs_lower_bound" not in keys or "rs_upper_bound" not in keys
    )
    if level == "none":
        _refuse_idle(keys, ["tis_mode"], because="tis_level is none")
        if not inherited:
            _refuse_idle(keys, ["tis_lower_bound", "tis_upper_bound"], because="tis_level is none")
        return None
    if mode == "unbounded":
        if not inherited:
            _refuse_idle(keys, ["tis_lower_bound", "tis_upper_bound"], because="tis_mode is unbounded")
        return WeightFactor(level=level, mode=mode, band=Band())  # type: ignore[arg-type]
    if mode == "truncate" and "tis_lower_bound" in keys and not inherited:
        # Existing files carry this pair: the lower bound never had an effect there.
        warnings.warn(
            f"tis_lower_bound={low:g} has no effect with tis_mode: truncate; remove it or use tis_mode: clip",
            stacklevel=4,
        )
    if mode != "truncate" and not low < high:
        raise ValueError(f"tis_lower_bound must be below tis_upper_bound, got {low:g} and {high:g}")
    band = Band(high=high) if mode == "truncate" else Band(low=low, high=high)
    return WeightFactor(level=level, mode=mode, band=band)  # type: ignore[arg-type]


def _flat_weight_bounds(keys: _Mapping) -> tuple[float, float]:
    high = check_number("tis_upper_bound", keys.get("tis_upper_bound", DEFAULT_UPPER_BOUND), low=1.0, high=math.inf)
    return check_number("tis_lower_bound", keys.get("tis_lower_bound", 1.0 / high), low=0.0, high=1.0), high


def _flat_band_gates(keys: _Mapping) -> tuple[GateFactor, ...]:
    level = check_choice("rs_level", keys.get("rs_level", "token"), get_args(Level))
    tis_low, tis_high = _flat_weight_bounds(keys)
    low = check_number("rs_lower_bound", keys.get("rs_lower_bound", tis_low), low=0.0, high=1.0)
    high = check_number("rs_upper_bound", keys.get("rs_upper_bound", tis_high), low=1.0, high=math.inf)
    further = tuple(_gate(f"rs_gates[{i}]", gate) for i, gate in enumerate(_as_list("rs_gates", keys)))
    if not keys.get("use_rs", False):
        if "use_rs" not in keys:
            _refuse_idle(keys, GATE_KEYS, because="use_rs is not set")
        return ()
    if not low < high:
        raise ValueError(f"rs_lower_bound must be below rs_upper_bound, got {low:g} and {high:g}")
    inherited = [key for key in ("rs_lower_bound", "rs_upper_bound") if key not in keys]
    if level == "geometric" and inherited and keys.get("tis_level", "token") != "geometric":
        warnings.warn(
            f"{' and '.join(inherited)} of the geometric gate come from the {keys.get('tis_level', 'token')}-level "
            f"tis bounds [{tis_low:g}, {tis_high:g}]; a geometric band is much narrower: set them, e.g. 0.99 and 1.001",
            stacklevel=4,
        )
    return (GateFactor(level=level, band=Band(low=low, high=high)), *further)  # type: ignore[arg-type]


def _flat_vetoes(keys: _Mapping) -> tuple[GateFactor, ...]:
    gates: list[GateFactor] = []
    if "rs_veto_threshold" in keys:
        low = check_number("rs_veto_threshold", keys["rs_veto_threshold"], low=math.ulp(0.0), high=1.0)
        gates.append(GateFactor(level="sequence_min", band=Band(low=low)))
    if "rs_veto_upper_threshold" in keys:
        high = check_number("rs_veto_upper_threshold", keys["rs_veto_upper_threshold"], low=1.0, high=1e300)
        gates.append(GateFactor(level="sequence_max", band=Band(high=high)))
    if "rs_veto_probability" in keys:
        low = check_number("rs_veto_probability", keys["rs_veto_probability"], low=math.ulp(0.0), high=1.0)
        gates.append(GateFactor(level="sequence_min", band=Band(low=low), statistic="proximal_probability"))
    requires_rs = check_bool("rs_veto_requires_rs", keys.get("rs_veto_requires_rs", False))
    if requires_rs and not gates:
        _refuse_idle(keys, ["rs_veto_requires_rs"], because="no veto is set")
    return () if requires_rs and not keys.get("use_rs", False) else tuple(gates)


def _flat_normalization(
    keys: _Mapping, *, weight: WeightFactor | None
) -> tuple[NormalizeOver | None, Scope, Denominator]:
    enabled = check_bool("tis_batch_normalize", keys.get("tis_batch_normalize", False))
    over = check_choice("tis_normalize_over", keys.get("tis_normalize_over", "kept"), get_args(NormalizeOver))
    scope = check_choice("tis_normalize_scope", keys.get("tis_normalize_scope", "data_parallel"), get_args(Scope))
    denominator = check_choice("mis_denominator", keys.get("mis_denominator", "fixed"), get_args(Denominator))
    if enabled and weight is None:
        raise ValueError("tis_batch_normalize: true has no effect with tis_level: none; remove one of them")
    if "tis_batch_normalize" not in keys:
        idle = ["tis_normalize_over"] if denominator == "kept" else ["tis_normalize_over", "tis_normalize_scope"]
        _refuse_idle(keys, idle, because="tis_batch_normalize is not set")
    return (over if enabled else None), scope, denominator  # type: ignore[return-value]


def _from_native(mapping: Any, *, measure_only: bool, per_token_loss: bool) -> CorrectionConfig:
    keys = _as_mapping(NATIVE_KEY, mapping)
    known = ("weight", "gates", "normalize_over", "scope", "denominator")
    reporting = tuple(key.removeprefix("mis_") for key in REPORT_KEYS)
    check_known(f"keys of {NATIVE_KEY}:", keys, (*known, *reporting))
    weight = _weight(keys["weight"]) if keys.get("weight") is not None else None
    gates = tuple(_gate(f"gates[{i}]", gate) for i, gate in enumerate(_as_list("gates", keys)))
    fields = {key: keys[key] for key in ("normalize_over", "scope", "denominator") if key in keys}
    if keys.get("normalize_over") is None and keys.get("denominator", "fixed") == "fixed":
        _refuse_idle(keys, ["scope"], because="there is neither normalize_over nor denominator: kept")
    return CorrectionConfig(
        weight=None if measure_only else weight,
        gates=() if measure_only else gates,
        metrics_only=measure_only,
        per_token_loss=per_token_loss,
        **({} if measure_only else fields),
        **_reporting(keys, prefix=""),
    )


def _weight(mapping: Any) -> WeightFactor:
    keys = _as_mapping("weight", mapping)
    check_known("keys of weight:", keys, ("level", "mode", "low", "high"))
    mode = keys.get("mode", "truncate")
    default = {} if mode == "unbounded" else {"high": DEFAULT_UPPER_BOUND}
    bounds = default | {key: keys[key] for key in ("low", "high") if key in keys}
    if mode in ("clip", "mask") and "low" not in bounds:
        bounds["low"] = 1.0 / check_number("weight.high", bounds["high"], low=1.0, high=math.inf)
    return WeightFactor(level=keys.get("level", "token"), mode=mode, band=Band(**bounds))


def _gate(name: str, mapping: Any) -> GateFactor:
    keys = _as_mapping(name, mapping)
    check_known(f"keys of {name}:", keys, ("level", "low", "high", "statistic"))
    if "level" not in keys:
        raise ValueError(f"{name} needs a level")
    try:
        band = Band(**{key: keys[key] for key in ("low", "high") if key in keys})
        return GateFactor(level=keys["level"], band=band, statistic=keys.get("statistic", "ratio"))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}.{error}") from None


def _reporting(keys: _Mapping, *, prefix: str) -> dict[str, Any]:
    metrics = keys.get(f"{prefix}metrics", "all")
    if isinstance(metrics, list):
        metrics = tuple(_as_list(f"{prefix}metrics", keys))
    given: dict[str, Any] = {"metrics": metrics, "warn_only": _warn_only(f"{prefix}guard", keys)}
    for name, high in (("metric_max", math.inf), ("max_reject_fraction", 1.0)):
        if prefix + name in keys:
            given[name] = check_number(prefix + name, keys[prefix + name], low=0.0, high=high)
    return given


def _warn_only(key: str, keys: _Mapping) -> frozenset[str]:
    guard = keys.get(key, "error")
    if not isinstance(guard, Mapping):
        return frozenset(GUARD_NAMES) if check_choice(key, guard, ("error", "warn")) == "warn" else frozenset()
    per_guard = _as_mapping(key, guard)
    check_known(f"guards in {key}", per_guard, GUARD_NAMES)
    choices = {name: check_choice(f"{key}.{name}", choice, ("error", "warn")) for name, choice in per_guard.items()}
    return frozenset(name for name, choice in choices.items() if choice == "warn")


def _refuse_idle(keys: _Mapping, names: Sequence[str], *, because: str) -> None:
    idle = [f"{name}={keys[name]!r}" for name in names if name in keys]
    if idle:
        raise ValueError(f"{', '.join(idle)}: no effect, because {because}")


def _as_mapping(key: str, value: Any) -> _Mapping:
    if not isinstance(value, Mapping):
        raise TypeError(f"{key} must be a mapping, got {value!r}")
    return {str(k): v for k, v in value.items()}


def _as_list(key: str, keys: _Mapping) -> list[Any]:
    value = keys.get(key, [])
    if not isinstance(value, list):
        raise TypeError(f"{key} must be a list, got {value!r}")
    return list(value)
