"""The hosts' flat keys, and the choice between them and the native ``mis:`` mapping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.normalization import Denominator, NormalizeOver, Scope
from mis_ext.correction.weights import BOUNDS, DEFAULT_UPPER_BOUND, REDUCTIONS, HookLevel, Weight
from mis_ext.keys.native import (
    NATIVE_KEY,
    checked_config,
    config_from_native_keys,
    native_gates,
    refuse_idle,
    reporting,
)
from mis_ext.keys.near_misses import refuse_near_misses
from mis_ext.keys.stray import (
    HOST_CLIPS,
    PREFIXES,
    advice_on_strays,
    refuse_host_clips,
    refuse_strays,
)
from mis_ext.loss.settings import LOSS_KEYS
from mis_ext.validation import check_bool, check_choice, check_known, check_mapping, check_number

SWITCHES = ("use_tis", "use_rs")
WEIGHT_KEYS = ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound")
GATE_KEYS = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_gates")
VETOES = ("rs_veto_threshold", "rs_veto_upper_threshold", "rs_veto_probability")
NORMALIZE_KEYS = ("tis_batch_normalize", "tis_normalize_scope", "tis_normalize_over", "mis_denominator")
REPORT_KEYS = ("mis_metrics", "mis_metric_max", "mis_guard", "mis_max_reject_fraction")
CORRECTION_KEYS = (*SWITCHES, *WEIGHT_KEYS, *GATE_KEYS, *VETOES, "rs_veto_requires_rs", *NORMALIZE_KEYS, *REPORT_KEYS)
FLAT_KEYS = (*CORRECTION_KEYS, *LOSS_KEYS)
HOST_SWITCHES = ("get_mismatch_metrics", "calculate_per_token_loss", "use_rollout_logprobs")
READ_KEYS = (*FLAT_KEYS, NATIVE_KEY, *HOST_SWITCHES)
"""Every key that is read; the names of all others are only compared with ours."""
STRAY_KEYS = advice_on_strays(FLAT_KEYS)
"""What to do about names that nobody reads at the top level."""

_INSTEAD_OF_NULL = {
    "tis_level": "tis_level: none for no weight",
    "tis_mode": "tis_mode: unbounded for no bound, tis_level: none for no weight",
    "rs_level": "use_rs: false for no gate",
}

_OTHER_WORDS = {
    f"{prefix}_{word}": f"{prefix}_{bound}"
    for prefix in ("tis", "rs")
    for bound, words in {
        "upper_bound": ("cap", "max", "high", "threshold", "imp_ratio_cap", "clip_high"),
        "lower_bound": ("min", "low", "floor"),
    }.items()
    for word in words
} | {"mis_veto": "rs_veto_threshold"}
"""What others call a key: too far from its name for a comparison of letters."""

_USUAL = {"token": "0.5 and 2", "sequence": "0.5 and 2 for short responses", "geometric": "0.99 and 1.001"}
"""Bounds of a gate, by level."""

_Mapping = Mapping[str, Any]


def config_from_mapping(mapping: _Mapping) -> CorrectionConfig:
    """The configuration in ``mapping``: flat keys, or the native form under ``mis:``.

    A key with value None counts as unset. Keys without the prefixes of mis_ext belong to the host and are ignored,
    except for ``HOST_SWITCHES``.

    Raises:
        ValueError: A key is unknown, misspelt, in the wrong place or without effect, or its value is out of range.
        TypeError: A value has the wrong type. Example: YAML reads ``1e-4`` as a string.
    """
    every = check_mapping("the configuration", mapping)
    _check_names(every)
    given = {key: value for key, value in every.items() if value is not None}
    host = {key: check_bool(key, given.get(key, False)) for key in HOST_SWITCHES}
    per_token_loss = host["calculate_per_token_loss"]
    measure_only = not check_bool("use_tis", given.get("use_tis", not host["get_mismatch_metrics"]))
    if host["get_mismatch_metrics"] or not measure_only:
        refuse_host_clips(given)
    ours = {key: given[key] for key in CORRECTION_KEYS if key in given}
    if NATIVE_KEY in every:
        mixed = sorted(set(ours) - {"use_tis"})
        if mixed:
            raise ValueError(f"{NATIVE_KEY}: and flat keys ({', '.join(mixed)}) are two spellings; use one of them")
        return config_from_native_keys(every[NATIVE_KEY], measure_only=measure_only, per_token_loss=per_token_loss)
    if not any(key in given for key in VETOES) and any(key in every for key in VETOES):
        ours.pop("rs_veto_requires_rs", None)  # A veto that was set to null takes its condition with it.
    weight = _weight(ours)
    return checked_config(
        weight=weight,
        gates=(*_band_gates(ours), *_vetoes(ours)),
        scaling=_scaling(ours, weight=weight),
        reporting={**reporting(ours, prefix="mis_"), "per_token_loss": per_token_loss},
        measure_only=measure_only,
    )


def _check_names(mapping: _Mapping) -> None:
    with_prefix = [key for key in mapping if key.startswith(PREFIXES) and key not in HOST_CLIPS]
    check_known("keys", with_prefix, FLAT_KEYS, meant=_OTHER_WORDS)
    known = {*READ_KEYS, *STRAY_KEYS}
    refuse_near_misses((key for key in mapping if not key.startswith(PREFIXES) and key not in known), keys=READ_KEYS)
    refuse_strays(mapping, advice=STRAY_KEYS)
    for key, instead in _INSTEAD_OF_NULL.items():
        if key in mapping and mapping[key] is None:
            raise ValueError(f"{key}: null could mean none or the default; write {instead}, or remove the key")


def _weight(keys: _Mapping) -> Weight | None:
    # Every value is checked, also those of features that are off: a misspelling must not wait for its feature.
    level = check_choice("tis_level", keys.get("tis_level", "token"), (*get_args(HookLevel), "none"))
    mode = check_choice("tis_mode", keys.get("tis_mode", "truncate"), BOUNDS)
    low, high = _weight_bounds(keys)
    bound = BOUNDS[mode]
    has_rs = check_bool("use_rs", keys.get("use_rs", False))
    is_inherited = has_rs and not {"rs_lower_bound", "rs_upper_bound"} <= set(keys)
    idle_bounds = [] if is_inherited else ["tis_lower_bound", "tis_upper_bound"]
    if level == "none":
        refuse_idle(keys, ["tis_mode", *idle_bounds], because="tis_level is none")
        return None
    if not bound.has_high:
        refuse_idle(keys, idle_bounds, because=f"tis_mode is {mode}")
        return Weight(level=level, mode=mode)
    if high == math.inf:
        raise ValueError("tis_upper_bound must be in (0, inf), got inf; write tis_mode: unbounded for no bound")
    if bound.has_low:
        _check_order(keys, "tis", low, high)
        return Weight(level=level, mode=mode, low=low, high=high)
    if "tis_lower_bound" in keys and not is_inherited:
        # Existing files carry this pair: the lower bound never had an effect there.
        warnings.warn(
            f"tis_lower_bound={low:g} has no effect with tis_mode: {mode}; remove it or use tis_mode: clip",
            stacklevel=4,
        )
    return Weight(level=level, mode=mode, high=high)


def _weight_bounds(keys: _Mapping) -> tuple[float, float]:
    high = _upper_bound(keys, "tis", DEFAULT_UPPER_BOUND)
    return _lower_bound(keys, "tis", 1.0 / high), high


def _lower_bound(keys: _Mapping, prefix: str, default: float) -> float:
    key = f"{prefix}_lower_bound"
    return check_number(key, keys[key], low=0.0, high=math.inf, open_high=True) if key in keys else default


def _upper_bound(keys: _Mapping, prefix: str, default: float) -> float:
    key = f"{prefix}_upper_bound"
    return check_number(key, keys[key], low=0.0, high=math.inf, open_low=True) if key in keys else default


def _check_order(keys: _Mapping, prefix: str, low: float, high: float) -> None:
    if low < high:
        return
    default = "" if f"{prefix}_lower_bound" in keys else " (from tis_lower_bound, by default 1 / tis_upper_bound)"
    raise ValueError(f"{prefix}_lower_bound must be below {prefix}_upper_bound, got {low!r}{default} and {high!r}")


def _band_gates(keys: _Mapping) -> tuple[Gate, ...]:
    level = check_choice("rs_level", keys.get("rs_level", "token"), get_args(HookLevel))
    tis_low, tis_high = _weight_bounds(keys)
    low, high = _lower_bound(keys, "rs", tis_low), _upper_bound(keys, "rs", tis_high)
    further = native_gates("rs_gates", keys.get("rs_gates", []))
    if not keys.get("use_rs", False):
        if "use_rs" not in keys:
            refuse_idle(keys, GATE_KEYS, because="use_rs is not set")
        return ()
    _check_order(keys, "rs", low, high)
    if low == 0.0 and high == math.inf:
        raise ValueError("use_rs: rs_lower_bound=0 and rs_upper_bound=inf reject nothing")
    _warn_inherited_band(
        [key for key in ("rs_lower_bound", "rs_upper_bound") if key not in keys],
        level=level,
        weight_level=keys.get("tis_level", "token"),
        low=tis_low,
        high=tis_high,
    )
    return (Gate(reduce=REDUCTIONS[level], low=low, high=high), *further)


def _warn_inherited_band(keys: Iterable[str], *, level: str, weight_level: str, low: float, high: float) -> None:
    """Warn where bounds of a gate come from a weight that has another level.

    Args:
        keys: The bounds that are not set.
        level: Of the gate.
        weight_level: Of the weight, ``none`` where there is no weight: then its bounds are the gate's alone.
        low: Lower bound of the weight.
        high: Upper bound of the weight.
    """
    unset = " and ".join(keys)
    if unset and weight_level not in (level, "none"):
        warnings.warn(
            f"{unset} of the {level}-level gate come from the {weight_level}-level tis bounds [{low:g}, {high:g}]: a "
            f"band of one level is too wide or too narrow at another. Set them (usual at this level: {_USUAL[level]}), "
            "or rs_level",
            stacklevel=5,
        )


def _vetoes(keys: _Mapping) -> tuple[Gate, ...]:
    gates: list[Gate] = []
    if "rs_veto_threshold" in keys:
        low = check_number("rs_veto_threshold", keys["rs_veto_threshold"], low=0.0, high=1.0, open_low=True)
        gates.append(Gate(reduce="min", low=low))
    if "rs_veto_upper_threshold" in keys:
        value = keys["rs_veto_upper_threshold"]
        high = check_number("rs_veto_upper_threshold", value, low=1.0, high=math.inf, open_high=True)
        gates.append(Gate(reduce="max", high=high))
    if "rs_veto_probability" in keys:
        low = check_number("rs_veto_probability", keys["rs_veto_probability"], low=0.0, high=1.0, open_low=True)
        gates.append(Gate(statistic="proximal_probability", reduce="min", low=low))
    requires_rs = check_bool("rs_veto_requires_rs", keys.get("rs_veto_requires_rs", False))
    if requires_rs and not gates:
        refuse_idle(keys, ["rs_veto_requires_rs"], because="no veto is set")
    return () if requires_rs and not keys.get("use_rs", False) else tuple(gates)


def _scaling(keys: _Mapping, *, weight: Weight | None) -> dict[str, Any]:
    enabled = check_bool("tis_batch_normalize", keys.get("tis_batch_normalize", False))
    over = check_choice("tis_normalize_over", keys.get("tis_normalize_over", "kept"), get_args(NormalizeOver))
    scope = check_choice("tis_normalize_scope", keys.get("tis_normalize_scope", "data_parallel"), get_args(Scope))
    denominator = check_choice("mis_denominator", keys.get("mis_denominator", "fixed"), get_args(Denominator))
    if enabled and weight is None:
        raise ValueError("tis_batch_normalize: true has no effect with tis_level: none; remove one of them")
    if "tis_batch_normalize" not in keys:
        idle = ["tis_normalize_over"] if denominator == "kept" else ["tis_normalize_over", "tis_normalize_scope"]
        refuse_idle(keys, idle, because="tis_batch_normalize is not set")
    return {"normalize_over": over if enabled else None, "scope": scope, "denominator": denominator}
