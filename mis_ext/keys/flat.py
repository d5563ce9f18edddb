# SPDX-License-Identifier: Apache-2.0
"""The flat keys, the configuration that they spell and back, and what a caller may give."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from mis_ext.correction.config import (
    BOUNDS,
    DEFAULT_UPPER_BOUND,
    REDUCTIONS,
    CorrectionConfig,
    Denominator,
    Gate,
    HookLevel,
    HookReduce,
    HookWhen,
    NormalizeOver,
    Scope,
    Weight,
)
from mis_ext.correction.tokens import LAG, UNKNOWN_LAG
from mis_ext.files import read_yaml
from mis_ext.keys.effects import APPLIED, KeysInUse, refuse_idle_keys
from mis_ext.keys.parts import (
    LEVELS,
    changed_fields,
    checked_config,
    read_compile,
    read_gates,
    read_guards,
    read_metrics,
)
from mis_ext.keys.removed import REMOVED, refuse_removed
from mis_ext.keys.strays import (
    HOST_CLIPS,
    PREFIXES,
    advice_on_strays,
    refuse_host_clips,
    refuse_near_misses,
    refuse_strays,
)
from mis_ext.validation import Errors, Key, check_bool, check_known, check_mapping, number, one_of

Baseline = Literal["mean", "leave_one_out"]
BaselineOver = Literal["all", "trained", "kept"]
Keys = Mapping[str, Any] | str | Path
"""What spells a configuration: a mapping, or the path of a YAML file."""

_MODES = "; ".join(f"{row.name}: {row.text}" for row in BOUNDS.values())
_default = CorrectionConfig()
CORRECTION_ROWS: dict[str, Key] = {
    "use_tis": Key(check_bool, None, "Corrects the loss; false measures only. Default: the flag --use-tis."),
    "use_rs": Key(check_bool, False, "Rejects what lies outside of the rs bounds."),
    "tis_level": Key(one_of(*get_args(HookLevel), "none"), "token", "What the weight is the ratio of."),
    "tis_mode": Key(one_of(*BOUNDS), "truncate", f"How the weight is bounded. {_MODES}."),
    "tis_lower_bound": Key(
        number(0.0, math.inf, open_high=True), None, "Lower bound of the weight. Default: 1 / tis_upper_bound.", "ratio"
    ),
    "tis_upper_bound": Key(
        number(0.0, math.inf, open_low=True), DEFAULT_UPPER_BOUND, "Upper bound of the weight.", "ratio"
    ),
    "tis_when": Key(
        one_of(*get_args(HookWhen)), "always", "stale: weighs tokens of stale weights only. Needs mis_staleness."
    ),
    "rs_level": Key(
        one_of(*get_args(HookLevel), "none"), "token", "What is compared with the rs bounds; none for rs_gates alone."
    ),
    "rs_lower_bound": Key(
        number(0.0, math.inf, open_high=True),
        None,
        "Lower bound of what is kept. Default: that of the weight.",
        "ratio",
    ),
    "rs_upper_bound": Key(
        number(0.0, math.inf, open_low=True), None, "Upper bound of what is kept. Default: that of the weight.", "ratio"
    ),
    "rs_gates": Key(read_gates, (), "Further filters, each a mapping."),
    "rs_veto_threshold": Key(
        number(0.0, 1.0, open_low=True), None, "Rejects a response if any of its ratios is below.", "ratio"
    ),
    "rs_veto_upper_threshold": Key(
        number(1.0, math.inf, open_high=True), None, "Rejects a response if any of its ratios is above.", "ratio"
    ),
    "rs_veto_probability": Key(
        number(0.0, 1.0, open_low=True), None, "Rejects a response if the trainer's probability of any token is below."
    ),
    "rs_veto_requires_rs": Key(check_bool, False, "Applies the vetoes only with use_rs."),
    "rs_max_staleness": Key(
        number(0.0, UNKNOWN_LAG, open_high=True),
        None,
        "Rejects tokens of staler weights. Needs mis_staleness.",
        "updates",
    ),
    "rs_staleness_level": Key(
        one_of("token", "sequence_max"), "token", "Whether such a token is rejected alone or with its response."
    ),
    "tis_batch_normalize": Key(check_bool, False, "Divides the weights by their mean."),
    "tis_normalize_scope": Key(one_of(*get_args(Scope)), "data_parallel", "The samples of that mean."),
    "tis_normalize_over": Key(one_of(*get_args(NormalizeOver)), "kept", "The tokens of that mean."),
    "mis_denominator": Key(one_of(*get_args(Denominator)), "fixed", "fixed: rejected tokens count in it."),
    "mis_staleness": Key(check_bool, False, "The rollout stores the weight version of each token."),
    "mis_metrics": Key(read_metrics, "core", "The metrics that are reported."),
    "mis_metric_max": Key(
        number(0.0, math.inf), _default.metric_max, "The most that a token counts in k3_kl, a response in chi2_*."
    ),
    "mis_guard": Key(read_guards, "error", "What a guard does, for all or for each."),
    "mis_compile": Key(read_compile, "auto", "Runs the correction as graphs of torch.compile; auto: on a GPU."),
    "mis_max_reject_fraction": Key(
        number(0.0, 1.0), _default.max_reject_fraction, "Warns when more is rejected.", "share"
    ),
}
"""Keys of a correction."""
CORRECTION_KEYS = tuple(CORRECTION_ROWS)
GROUP_ROWS: dict[str, Key] = {
    "mis_group_baseline": Key(one_of(*get_args(Baseline)), "mean", "What a reward is compared with."),
    "mis_group_over": Key(one_of(*get_args(BaselineOver)), "trained", "Which trajectories of a prompt count in it."),
    "mis_prompt_mean": Key(check_bool, False, "Gives every prompt the same weight."),
}
"""Of what responses to one prompt share; functions of the whole rollout read them, in slime and Miles."""
HOST_ROWS: dict[str, Key] = {
    "get_mismatch_metrics": Key(check_bool, False, "A flag of the framework: calls mis_ext for its metrics."),
    "calculate_per_token_loss": Key(check_bool, False, "A flag of the framework: averages over tokens, not samples."),
    "use_rollout_logprobs": Key(check_bool, False, "A flag of the framework: the engine is the old policy."),
}
"""Flags of the frameworks that a file of keys may set too."""
LOSS_KEYS = (
    "mis_loss_method",
    "mis_loss_mode",
    "mis_loss_denominator",
    "mis_loss_constant",
    "mis_loss_kl_tokens",
    "mis_loss_entropy_tokens",
    "mis_loss_unbiased_kl",
    "mis_loss_proximal",
    "mis_loss_scoring",
    "mis_loss_inplace",
)
"""Keys of the whole loss; what else it reads are flags of the hosts. The last two say how, not what, it computes."""
FLAT_KEYS = (*CORRECTION_KEYS, *GROUP_ROWS, *LOSS_KEYS)
READ_KEYS = (*FLAT_KEYS, *HOST_ROWS)
"""Every key that is read; the names of all others are only compared with ours."""
STRAY_KEYS = advice_on_strays(FLAT_KEYS)
"""What to do about names that nobody reads at the top level."""

_REPORTING = ("mis_staleness", "mis_metrics", "mis_metric_max", "mis_guard", "mis_max_reject_fraction", "mis_compile")
_VETOES: dict[str, tuple[str, HookReduce, str]] = {
    "rs_veto_threshold": ("ratio", "min", "low"),
    "rs_veto_upper_threshold": ("ratio", "max", "high"),
    "rs_veto_probability": ("proximal_probability", "min", "low"),
}
"""Statistic, reduction and bound of the gate that each is."""
INSTEAD_OF_NULL = {
    "tis_level": "tis_level: none for no weight",
    "tis_mode": "tis_mode: unbounded for no bound, tis_level: none for no weight",
    "rs_level": "rs_level: none for rs_gates alone, use_rs: false for no gate",
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


def config_from_mapping(mapping: Mapping[str, Any]) -> CorrectionConfig:
    """The configuration in ``mapping``.

    A key with value None counts as unset. Keys without the prefixes of mis_ext belong to the host and are ignored,
    except for ``HOST_ROWS``.

    Raises:
        ValueError: A key is unknown, misspelt, in the wrong place or without effect, or its value is out of range.
        TypeError: A value has the wrong type. Example: YAML reads ``1e-4`` as a string.
    """
    every = check_mapping("the configuration", mapping)
    wrong = Errors()
    _check_names(every, wrong)
    given = {key: value for key, value in every.items() if value is not None}
    read = _checked_values(given, wrong)
    measures = given.get("get_mismatch_metrics", False)
    measure_only = not given.get("use_tis", not measures)
    if measures or not measure_only:
        with wrong:
            refuse_host_clips(given)
    keys = {key: given[key] for key in CORRECTION_KEYS if key in given}
    if not any(key in given for key in _VETOES) and any(key in every for key in _VETOES):
        keys.pop("rs_veto_requires_rs", None)  # A veto that was set to null takes its condition with it.
    values = {key: read[key] if key in keys and key in read else row.default for key, row in CORRECTION_ROWS.items()}
    if keys.keys() & {*APPLIED} <= read.keys():
        with wrong:
            refuse_idle_keys(KeysInUse(keys, values, corrects=not measure_only))
    wrong.raise_all()
    reporting = {key.removeprefix("mis_"): read[key] for key in _REPORTING if key in keys}
    reporting["warn_only"] = reporting.pop("guard", frozenset())
    if values["tis_lower_bound"] is None:
        values["tis_lower_bound"] = 1.0 / values["tis_upper_bound"]
    weight = _weight(keys, values)
    return checked_config(
        weight=weight,
        gates=(*_band_gates(keys, values), *_vetoes(keys, values), *_staleness_gate(keys, values)),
        scaling={
            "normalize_over": values["tis_normalize_over"] if values["tis_batch_normalize"] else None,
            "scope": values["tis_normalize_scope"],
            "denominator": values["mis_denominator"],
        },
        reporting={**reporting, "per_token_loss": given.get("calculate_per_token_loss", False)},
        measure_only=measure_only,
    )


def _checked_values(given: Mapping[str, Any], wrong: Errors) -> dict[str, Any]:
    """Every value as it is read, also of features that are off: a misspelling must not wait for its feature."""
    read = {}
    for key, row in (CORRECTION_ROWS | GROUP_ROWS | HOST_ROWS).items():
        if key in given:
            with wrong:
                read[key] = row.check(key, given[key])
    return read


def _check_names(mapping: Mapping[str, Any], wrong: Errors) -> None:
    with wrong:
        refuse_removed(mapping)
    names = [key for key in mapping if key not in REMOVED]
    with wrong:
        with_prefix = [key for key in names if key.startswith(PREFIXES) and key not in HOST_CLIPS]
        check_known("keys", with_prefix, FLAT_KEYS, meant=_OTHER_WORDS)
    with wrong:
        known = {*READ_KEYS, *STRAY_KEYS}
        refuse_near_misses((key for key in names if not key.startswith(PREFIXES) and key not in known), keys=READ_KEYS)
    with wrong:
        refuse_strays(mapping, advice=STRAY_KEYS)
    for key, instead in INSTEAD_OF_NULL.items():
        if key in mapping and mapping[key] is None:
            with wrong:
                raise ValueError(f"{key}: null could mean none or the default; write {instead}, or remove the key")


def _weight(keys: Mapping[str, Any], values: Mapping[str, Any]) -> Weight | None:
    level, mode, low, high = (values[f"tis_{each}"] for each in ("level", "mode", "lower_bound", "upper_bound"))
    if level == "none":
        return None
    kind: dict[str, Any] = {"level": level, "mode": mode, "when": values["tis_when"]}
    if not BOUNDS[mode].has_high:
        return Weight(**kind)
    if high == math.inf:
        raise ValueError("tis_upper_bound must be in (0, inf), got inf; write tis_mode: unbounded for no bound")
    if BOUNDS[mode].has_low:
        _check_order(keys, "tis", low, high)
        return Weight(**kind, low=low, high=high)
    if "tis_lower_bound" in keys and not KeysInUse(keys, values).reads_low:
        # Existing files carry this pair: the lower bound never had an effect there.
        warnings.warn(
            f"tis_lower_bound={low:g} has no effect with tis_mode: {mode}; remove it or use tis_mode: clip",
            stacklevel=4,
        )
    return Weight(**kind, high=high)


def _check_order(keys: Mapping[str, Any], prefix: str, low: float, high: float) -> None:
    if low < high:
        return
    default = "" if f"{prefix}_lower_bound" in keys else " (from tis_lower_bound, by default 1 / tis_upper_bound)"
    raise ValueError(f"{prefix}_lower_bound must be below {prefix}_upper_bound, got {low!r}{default} and {high!r}")


def _band_gates(keys: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Gate, ...]:
    if not values["use_rs"]:
        return ()
    level, weight_level = values["rs_level"], values["tis_level"]
    if level == "none":
        if not values["rs_gates"]:
            raise ValueError("rs_level: none needs rs_gates; write use_rs: false for no gate")
        return tuple(values["rs_gates"])
    unset = [key for key in ("rs_lower_bound", "rs_upper_bound") if key not in keys]
    low, high = (
        values[f"{'rs' if f'rs_{bound}' in keys else 'tis'}_{bound}"] for bound in ("lower_bound", "upper_bound")
    )
    _check_order(keys, "rs", low, high)
    if low == 0.0 and high == math.inf:
        raise ValueError("use_rs: rs_lower_bound=0 and rs_upper_bound=inf reject nothing")
    # Without a weight its bounds are the gate's alone.
    if unset and weight_level not in (level, "none"):
        warnings.warn(
            f"{' and '.join(unset)} of the {level}-level gate come from the {weight_level}-level tis bounds "
            f"[{values['tis_lower_bound']:g}, {values['tis_upper_bound']:g}]: a band of one level is too wide or too "
            f"narrow at another. Set them (usual at this level: {_USUAL[level]}), or rs_level",
            stacklevel=4,
        )
    return (Gate(reduce=REDUCTIONS[level], low=low, high=high), *values["rs_gates"])


def _vetoes(keys: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Gate, ...]:
    gates = tuple(
        Gate(statistic=statistic, reduce=reduce, **{bound: values[key]})
        for key, (statistic, reduce, bound) in _VETOES.items()
        if key in keys
    )
    return () if values["rs_veto_requires_rs"] and not values["use_rs"] else gates


def _staleness_gate(keys: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Gate, ...]:
    if values["rs_max_staleness"] is None:
        return ()
    reduce = LEVELS[values["rs_staleness_level"]]
    return (Gate(statistic=LAG, reduce=reduce, high=values["rs_max_staleness"], name="rs_staleness"),)


def flat_keys(config: CorrectionConfig) -> dict[str, Any]:
    """The keys that spell ``config``; what is at its default is left out.

    Raises:
        ValueError: It measures only, which is said by the host's switches.
    """
    if config.metrics_only:
        raise ValueError("metrics_only is spelled use_tis: false")
    keys: dict[str, Any] = {"use_tis": True}
    weight = config.weight
    if weight is None:
        keys["tis_level"] = "none"
    else:
        of_weight = {"level": weight.level, "mode": weight.mode, "lower_bound": weight.low, "upper_bound": weight.high}
        keys |= {f"tis_{name}": value for name, value in of_weight.items() if value is not None}
        keys |= {"tis_when": weight.when} if weight.when != "always" else {}
    keys |= _keys_of_gates(config.gates)
    if config.normalize_over is not None:
        keys["tis_batch_normalize"] = True
        # Where nothing is rejected both words say the same, and one of them is refused.
        if config.gates or (weight is not None and weight.bound.rejects):
            keys["tis_normalize_over"] = config.normalize_over
    if config.is_scaled and config.scope != "data_parallel":
        keys["tis_normalize_scope"] = config.scope
    default = CorrectionConfig()
    for name in ("denominator", "staleness", "metric_max", "max_reject_fraction", "metrics", "compile"):
        value = getattr(config, name)
        if value != getattr(default, name):
            keys[f"mis_{name}"] = list(value) if isinstance(value, tuple) else value
    if config.warn_only:
        keys["mis_guard"] = dict.fromkeys(sorted(config.warn_only), "warn")
    return keys


def _keys_of_gates(gates: Sequence[Gate]) -> dict[str, Any]:
    """``rs_gates`` for what no other key spells: gates keep their order."""
    rest = [{"statistic": gate.statistic, "reduce": gate.reduce} | changed_fields(gate) for gate in gates]
    vetoes: dict[str, Any] = {}
    for name, (statistic, reduce, bound) in reversed(_VETOES.items()):
        if (
            rest
            and bound in rest[-1]
            and rest[-1] == {"statistic": statistic, "reduce": reduce, bound: rest[-1][bound]}
        ):
            vetoes[name] = rest.pop()[bound]
    band = rest[0] if rest and rest[0].keys() <= {"statistic", "reduce", "low", "high"} else {}
    level = next((word for word in get_args(HookLevel) if REDUCTIONS[word] == band.get("reduce")), None)
    keys: dict[str, Any] = {}
    if level is not None and band["statistic"] == "ratio":
        rest.pop(0)
        low, high = band.get("low", 0.0), band.get("high", math.inf)
        keys = {"use_rs": True, "rs_level": level, "rs_lower_bound": low, "rs_upper_bound": high}
    elif rest:
        keys = {"use_rs": True, "rs_level": "none"}
    return keys | ({"rs_gates": rest} if rest else {}) | vetoes


def config_given(config: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """``config`` itself, or what a mapping of keys spells."""
    if isinstance(config, CorrectionConfig):
        return config
    if isinstance(config, Mapping):
        found = config_from_mapping(config)
        refuse_group_keys([key for key in GROUP_ROWS if config.get(key) is not None])
        idle = [key for key in LOSS_KEYS if config.get(key) is not None]
        if idle:
            raise ValueError(f"{', '.join(idle)}: no effect on a correction alone; give them to a full policy loss")
        return found
    hint = "; of an argparse namespace give vars(args)" if hasattr(config, "__dict__") else ""
    raise TypeError(f"config must be a CorrectionConfig or a mapping of keys, got {type(config).__name__}{hint}")


def refuse_group_keys(keys: Sequence[str]) -> None:
    """Refuse what only a function of the whole rollout reads, where there is none."""
    if keys:
        raise ValueError(
            f"{', '.join(keys)}: no effect here: slime and Miles alone show mis_ext the answers to a prompt; compute "
            "advantages with mis_ext.group_advantages, and give the loss divisors"
        )


def read_keys(keys: Keys) -> dict[str, Any]:
    """The keys themselves, or those in the file."""
    found: Any = read_yaml(keys) if isinstance(keys, (str, Path)) else keys
    if not isinstance(found, Mapping):
        raise TypeError(f"{keys}: expected a mapping of keys to values, got {type(found).__name__}")
    return dict(found)


def says_whole_loss(keys: Mapping[str, Any]) -> bool:
    """Whether a key is of the whole loss, not of the correction alone."""
    return any(keys.get(key) is not None for key in LOSS_KEYS)


def interned_keys(keys: Keys, **more: Any) -> dict[str, Any]:
    """``keys`` and ``more``: for the same ones the same object, by which sessions know a run."""
    return _interned(json.dumps(keys if isinstance(keys, str) else read_keys(keys)), json.dumps(more))


@functools.lru_cache(maxsize=64)
def _interned(keys: str, more: str) -> dict[str, Any]:
    return {**read_keys(json.loads(keys)), **json.loads(more)}
