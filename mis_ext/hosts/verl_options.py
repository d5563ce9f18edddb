# SPDX-License-Identifier: Apache-2.0
"""Conversion of verl's options of its rollout correction to keys that give the same weights and masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mis_ext.correction.config import CorrectionConfig, Weight
from mis_ext.keys.reading import config_from_mapping, flat_keys
from mis_ext.keys.rows import read_gates
from mis_ext.validation import check_bool, check_choice, check_known

KNOWN = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
)
PLACES = (
    "algorithm.rollout_correction",
    "rollout_correction",
    "actor_rollout_ref.actor.policy_loss.rollout_correction",
)
"""Places of the options in a configuration of verl; the first existing place counts."""

_SWITCHES = ("bypass_mode", "rollout_is_batch_normalize")
_REDUCTIONS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
_CRITERIA = tuple(
    f"{level}_{estimate}"
    for level in _REDUCTIONS
    for estimate in ("k1", "k2", "k3")
    if f"{level}_{estimate}" != "seq_max_k1"
)
WHOLE_CONFIGURATION = (
    "Give the .hydra/config.yaml that verl writes into the outputs of a run, or what the command of your script prints "
    "with --cfg job at its end, which starts no run: both hold the defaults and every override"
)

_FP16, _BF16 = ("float16", "fp16", "half"), ("bfloat16", "bf16")


class Converted(NamedTuple):
    """``keys``: the keys for mis_ext. ``remarks``: sentences about settings that keys cannot express."""

    keys: dict[str, Any]
    remarks: tuple[str, ...]


def options_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options in a whole configuration of verl, or in a file with only these options."""
    for place in PLACES:
        found = _at(content, place)
        if isinstance(found, Mapping):
            return found
    if content.keys() & {*KNOWN}:
        return content
    raise ValueError(
        f"no rollout correction of verl: found none of {', '.join((*PLACES, *KNOWN))}. {WHOLE_CONFIGURATION}"
    )


def dtype_remarks(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what to change if a whole configuration of verl has its trainer in fp16 and its engine in bf16."""
    rollout = _at(content, "actor_rollout_ref.rollout.dtype")
    places = [f"actor_rollout_ref.actor.{key}.dtype" for key in ("fsdp_config", "megatron")]
    return tuple(
        f"{place} is {_at(content, place)}, and actor_rollout_ref.rollout.dtype is {rollout}: updates below the "
        "bf16 resolution do not reach the engine, and our runs lost reward. Use the same dtype for both."
        for place in places
        if _at(content, place) in _FP16 and rollout in _BF16
    )


def _at(content: Mapping[str, Any], place: str) -> Any:
    """Return the value at a dotted place, or None if there is none."""
    found: Any = content
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def convert_verl(options: Mapping[str, Any]) -> Converted:
    """The keys that give verl's weights and masks; a missing option has the default of verl's YAML."""
    given = {name: value for name, value in options.items() if name != "_target_"}
    check_known("options of verl", given, KNOWN)
    loss_type = check_choice("loss_type", given.get("loss_type") or "ppo_clip", ("ppo_clip", "reinforce"))
    is_bypass, is_normalized = (check_bool(name, given.get(name) or False) for name in _SWITCHES)
    remarks = []
    level, threshold = given.get("rollout_is"), given.get("rollout_is_threshold", 2.0)
    parts: dict[str, Any] = {"weight": None, "gates": []}
    if level is not None and threshold is not None:
        check_choice("rollout_is", level, ("token", "sequence"))
        if is_bypass and loss_type == "ppo_clip":
            remarks.append("bypass_mode with loss_type: ppo_clip ignores rollout_is, in verl too: no weight.")
        else:
            parts |= _weight(level, threshold, is_normalized=is_normalized)
    if given.get("rollout_rs") is not None:
        parts["gates"] = [*parts["gates"], *_gates(str(given["rollout_rs"]), given.get("rollout_rs_threshold"))]
    if is_bypass:
        remarks.append(f"Keep in verl's configuration: bypass_mode: true, loss_type: {loss_type}.")
        remarks.append(
            "Add to it too, otherwise verl corrects nothing: "
            "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
            "+actor_rollout_ref.actor.policy_loss.rollout_correction='${algorithm.rollout_correction}'"
        )
        if "normalize_over" in parts:
            remarks.append(
                "In bypass mode, verl's mean of weights is over all ranks; here it is over the rank's micro-batch."
            )
    if not any(parts.values()):
        remarks.append("Nothing is corrected, as in verl: metrics only.")
        return Converted({"use_tis": False}, tuple(remarks))
    weight = None if parts["weight"] is None else Weight(**parts.pop("weight"))
    keys = flat_keys(CorrectionConfig(**parts | {"weight": weight, "gates": read_gates("gates", parts["gates"])}))
    config_from_mapping(keys)
    return Converted(keys, tuple(remarks))


def _weight(level: str, threshold: Any, *, is_normalized: bool) -> dict[str, Any]:
    if not isinstance(threshold, str) or "_" not in threshold:
        high = _number("rollout_is_threshold", threshold)
        mean = {"normalize_over": "valid", "scope": "micro_batch"} if is_normalized else {}
        return {"weight": {"level": level, "mode": "truncate", "high": high}, "gates": [], **mean}
    if is_normalized:
        raise ValueError(
            f"rollout_is_batch_normalize with the range rollout_is_threshold={threshold!r}: verl's mean counts "
            "values outside as 0, which no key of a correction does; for tokens use mis_loss_method: {name: icepop, "
            "low: LOW, high: HIGH, normalize_over: all_tokens}, which is then per micro-batch"
        )
    low, high = (_number("rollout_is_threshold", part) for part in threshold.split("_", 1))
    band = {"reduce": "token" if level == "token" else "sum", "low": low, "high": high, "action": "zero"}
    return {"weight": {"level": level, "mode": "unbounded"}, "gates": [band]}


def _gates(criteria: str, thresholds: Any) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name.strip() for name in criteria.split(",") if name.strip()))
    check_known("criteria of rollout_rs", names, _CRITERIA)
    if not names:
        raise ValueError(f"rollout_rs={criteria!r} has no criterion: use null to disable it, or {', '.join(_CRITERIA)}")
    specs = [spec.strip() for spec in str(thresholds).split(",") if spec.strip()] if thresholds is not None else []
    if len(specs) not in (1, len(names)):
        raise ValueError(f"rollout_rs_threshold={thresholds!r} needs one threshold for all of {names}, or one for each")
    each = specs * len(names) if len(specs) == 1 else specs
    return [_gate(name, spec) for name, spec in zip(names, each, strict=True)]


def _gate(name: str, spec: str) -> dict[str, Any]:
    level, _, estimate = name.rpartition("_")
    gate: dict[str, Any] = {"reduce": _REDUCTIONS[level]}
    if estimate != "k1":
        return gate | {"statistic": estimate, "high": _number(f"rollout_rs_threshold of {name}", spec)}
    numbers = [_number(f"rollout_rs_threshold of {name}", part) for part in spec.split("_", 1)]
    low, high = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
    # verl's bounds are for behavior / proximal, ours for proximal / behavior.
    return gate | {"low": 1.0 / high, "high": 1.0 / low}


def _number(name: str, value: Any) -> float:
    try:
        number = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not number > 0.0:
        raise ValueError(f"{name}={value!r} must be a number above 0")
    return number
