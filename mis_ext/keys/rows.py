# SPDX-License-Identifier: Apache-2.0
"""Every key of a file in one row: legal values, default, description, unit.

The check, the error, the JSON Schema, the reference page, and the output of ``mis-ext keys NAME`` follow from the row.
Below the rows: names that are not keys, and the schema. ``reading`` makes configuration objects from keys and rejects
combinations.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from mis_ext.correction import config
from mis_ext.correction.tokens import STATISTICS, UNKNOWN_LAG
from mis_ext.loss.words import KlType, LossDenominator, Mode, PenaltyTokens, Proximal, Scoring
from mis_ext.validation import (
    Errors,
    check_bool,
    check_choice,
    check_instance,
    check_known,
    check_mapping,
    check_number,
    errors_of,
)

Baseline = Literal["mean", "leave_one_out"]
BaselineOver = Literal["all", "trained", "kept"]
PREFIXES = ("tis_", "rs_", "mis_")


class Values(NamedTuple):
    """Legal values: a check that returns the value or raises an error about its key, a description, and JSON Schema."""

    check: Callable[[str, Any], Any]
    legal: str
    schema: Mapping[str, Any]


class Key(NamedTuple):
    """One key. A default of None means unset, or a default that ``text`` describes."""

    values: Values
    default: Any
    text: str
    unit: str = ""


def number(legal: str) -> Values:
    """The numbers in an interval, such as ``(0, inf]``."""
    low, high = map(float, legal[1:-1].split(","))
    opens = legal[0] == "(", legal[-1] == ")"
    ends = {"exclusiveMinimum" if opens[0] else "minimum": low, "exclusiveMaximum" if opens[1] else "maximum": high}
    # JSON has no infinity, so an infinite bound is omitted.
    schema = {"type": "number"} | {end: bound for end, bound in ends.items() if math.isfinite(bound)}
    check = partial(check_number, low=low, high=high, open_low=opens[0], open_high=opens[1])
    return Values(check, f"number in {legal}", schema)


def _read_upper_bound(key: str, value: Any) -> float:
    if isinstance(value, float) and value == math.inf:
        advice = "use tis_mode: unbounded for the weight, rs_upper_bound: .inf for the filter"
        raise ValueError(f"{key} must be in (0, inf), got inf ({advice})")
    return check_number(key, value, low=0.0, high=math.inf, open_low=True, open_high=True)


def words(*choices: Any) -> Values:
    """Words, or the words of a ``Literal``."""
    legal = [word for each in choices for word in ([each] if isinstance(each, str) else get_args(each))]
    return Values(partial(check_choice, choices=legal), " | ".join(legal), {"enum": legal})


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


# --- values other than a single number or word


def read_gates(key: str, value: Any) -> tuple[config.Gate, ...]:
    """The filters of a list of mappings."""
    gates, wrong = [], Errors()
    for place, fields in enumerate(check_instance(key, value, (list, tuple))):
        where = f"{key}[{place}]"
        with wrong:
            given = check_mapping(where, fields)
            gone = _removed([f"rs_gates.{old}" for name in given for old in (name, f"{name}: {given[name]}")])
            wrong.refuse(gone)
            check_known(f"keys of {where}", [name for name in given if f"rs_gates.{name}" not in REMOVED], GATE_ROWS)
            if not gone:
                with errors_of(where):
                    gates.append(config.Gate(**given))
    wrong.raise_all()
    return tuple(gates)


def _read_metrics(key: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value in get_args(config.MetricChoice):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        Errors().refuse(_removed(value)).raise_all()
        return tuple(value)
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{key} must be all, core or a list of names, got {value!r}")


def _read_guards(key: str, value: Any) -> frozenset[str]:
    """The guards that only warn."""
    if not isinstance(value, Mapping):
        return frozenset(config.GUARD_NAMES) if _HOW.check(key, value) == "warn" else frozenset()
    choices = check_mapping(key, value)
    check_known(f"guards in {key}", choices, config.GUARD_NAMES)
    return frozenset(name for name in choices if _HOW.check(f"{key}.{name}", choices[name]) == "warn")


def _read_compile(key: str, value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise TypeError(f"{key} must be auto, true or false, got {value!r}")


def _read_method(key: str, value: Any) -> Any:
    from mis_ext.methods.catalogue import choose_method  # All methods: a loss without one needs none.

    return choose_method(key, value)


UPPER_BOUND = number("(0, inf)")._replace(check=_read_upper_bound)
SWITCH = Values(check_bool, "true | false", {"type": "boolean"})
TEXT = Values(partial(check_instance, kinds=str), "text", {"type": "string"})
COMPILE = Values(_read_compile, "auto | true | false", {"enum": ["auto", True, False]})
GATES = Values(read_gates, "list of mappings", {"type": "array", "items": {"$ref": "#/definitions/gate"}})
_HOW = words("error", "warn")
_EACH = _object(dict.fromkeys(config.GUARD_NAMES, _HOW.schema))
GUARDS = Values(_read_guards, "error | warn, or mapping from guard to one of them", {"anyOf": [_HOW.schema, _EACH]})
_NAMES = {"type": "array", "items": {"type": "string"}}
METRICS = Values(_read_metrics, "core | all, or list of names", {"anyOf": [{"enum": ["core", "all"]}, _NAMES]})
METHOD = Values(_read_method, "name, or mapping with name and parameters", {"$ref": "#/definitions/method"})


# --- the rows

_MODES = "; ".join(f"{mode}: {row.text}" for mode, row in config.BOUNDS.items())
_own = config.CorrectionConfig()
CORRECTION_ROWS: dict[str, Key] = {
    "use_tis": Key(SWITCH, None, "Corrects the loss; false only measures. Default: the flag --use-tis."),
    "use_rs": Key(SWITCH, False, "Rejects tokens or responses outside of the rs bounds."),
    "tis_level": Key(
        words(config.Level, "none"), "token", "The ratio used as the weight, of a token or of a response."
    ),
    "tis_mode": Key(words(*config.BOUNDS), "truncate", f"How the weight is bounded. {_MODES}."),
    "tis_lower_bound": Key(number("[0, inf)"), None, "Lower bound of a weight. Default: 1 / tis_upper_bound.", "ratio"),
    "tis_upper_bound": Key(UPPER_BOUND, config.DEFAULT_UPPER_BOUND, "Upper bound of the weight.", "ratio"),
    "tis_when": Key(
        words(config.When), "always", "stale: only tokens of stale weights get a weight. Needs mis_staleness."
    ),
    "rs_level": Key(
        words(config.Level, "none"), "token", "The ratio that is compared with the rs bounds; none: only rs_gates."
    ),
    "rs_lower_bound": Key(number("[0, inf)"), None, "Lower bound of kept ratios. Default: tis_lower_bound.", "ratio"),
    "rs_upper_bound": Key(number("(0, inf]"), None, "Upper bound of kept ratios. Default: tis_upper_bound.", "ratio"),
    "rs_gates": Key(GATES, (), "Further filters, each a mapping."),
    "rs_veto_threshold": Key(number("(0, 1]"), None, "Rejects a response with any ratio below it.", "ratio"),
    "rs_veto_upper_threshold": Key(number("[1, inf)"), None, "Rejects a response with any ratio above it.", "ratio"),
    "rs_veto_probability": Key(number("(0, 1]"), None, "Rejects a response with a trainer probability below it."),
    "rs_veto_requires_rs": Key(SWITCH, False, "Applies the vetoes only with use_rs."),
    "rs_max_staleness": Key(
        number(f"[0, {UNKNOWN_LAG:g})"), None, "Rejects tokens of staler weights. Needs mis_staleness.", "updates"
    ),
    "rs_staleness_level": Key(
        words("token", "sequence_max"), "token", "What rs_max_staleness rejects: the token, or its response."
    ),
    "tis_batch_normalize": Key(SWITCH, False, "Divides the weights by their mean."),
    "tis_normalize_scope": Key(
        words(config.Scope), "data_parallel", "Samples of tis_batch_normalize and of mis_denominator: kept."
    ),
    "tis_normalize_over": Key(words(config.NormalizeOver), "kept", "Tokens in the mean of tis_batch_normalize."),
    "mis_denominator": Key(
        words(config.Denominator),
        "fixed",
        "The denominator of the loss. fixed: the framework's divisor, which counts rejected tokens. kept: only kept "
        "tokens count, because weights are multiplied by all / kept of tis_normalize_scope.",
    ),
    "mis_staleness": Key(SWITCH, False, "The rollout stores the weight version of each token."),
    "mis_metrics": Key(METRICS, "core", "The metrics that are reported."),
    "mis_metric_max": Key(number("[0, inf]"), _own.metric_max, "Cap of a token in k3_kl, a response in chi2_*."),
    "mis_guard": Key(GUARDS, "error", "The reaction of all guards, or of each guard."),
    "mis_compile": Key(COMPILE, "auto", "Runs the correction as graphs of torch.compile; auto: on a GPU."),
    "mis_max_reject_fraction": Key(
        number("[0, 1]"), _own.max_reject_fraction, "Warns if a larger share is rejected.", "share"
    ),
}
"""Keys of a correction."""

VETOES: dict[str, tuple[str, config.Reduce, str]] = {
    "rs_veto_threshold": ("ratio", "min", "low"),
    "rs_veto_upper_threshold": ("ratio", "max", "high"),
    "rs_veto_probability": ("proximal_probability", "min", "low"),
}
"""Statistic, reduction and bound of the gate of each key."""

GROUP_ROWS: dict[str, Key] = {
    "mis_group_baseline": Key(words(Baseline), "mean", "The mean that is subtracted from a reward."),
    "mis_group_over": Key(words(BaselineOver), "trained", "Trajectories that count in the mean of a prompt."),
    "mis_prompt_mean": Key(SWITCH, False, "Gives every prompt the same weight."),
}
"""Keys of the responses to one prompt. In slime and Miles, functions of the whole rollout read them."""

DEFAULT_SCORING: Scoring = "fused"
LOSS_ROWS: dict[str, Key] = {
    "mis_loss_method": Key(METHOD, None, "A published method instead of mis_loss_mode, by name or with parameters."),
    "mis_loss_mode": Key(words(Mode), "baseline", "The policy gradient of the full policy loss."),
    "mis_loss_denominator": Key(words(LossDenominator), "original", "The divisor of a response's sum."),
    "mis_loss_constant": Key(number("(0, inf)"), None, "The divisor of mis_loss_denominator: constant.", "tokens"),
    "mis_loss_kl_tokens": Key(words(PenaltyTokens), "kept", "Tokens that have a KL penalty."),
    "mis_loss_entropy_tokens": Key(words(PenaltyTokens), "kept", "Tokens that have an entropy bonus."),
    "mis_loss_unbiased_kl": Key(SWITCH, False, "Multiplies the KL penalty by current / behavior."),
    "mis_loss_proximal": Key(words(Proximal), "stored", "Where the proximal log-probs come from."),
    "mis_loss_scoring": Key(words(Scoring), DEFAULT_SCORING, "The function that turns logits into log-probs."),
    "mis_loss_inplace": Key(SWITCH, False, "The gradient replaces the logits in memory."),
}
"""Keys of the full policy loss, which also reads flags of the frameworks."""

FRAMEWORK_ROWS: dict[str, Key] = {
    "get_mismatch_metrics": Key(SWITCH, False, "A flag of the framework: calls mis_ext for its metrics."),
    "calculate_per_token_loss": Key(SWITCH, False, "A flag of the framework: averages over tokens, not samples."),
    "use_rollout_logprobs": Key(SWITCH, False, "A flag of the framework: the engine is the old policy."),
}
"""Flags of the frameworks that a file of keys may set too."""

ROWS = CORRECTION_ROWS | GROUP_ROWS | LOSS_ROWS | FRAMEWORK_ROWS
FLAT_KEYS = (*CORRECTION_ROWS, *GROUP_ROWS, *LOSS_ROWS)
TIS_OF_FRAMEWORKS = {"tis_clip": 2, "tis_clip_low": 0}
"""Bounds of the frameworks' built-in correction, which mis_ext replaces, with the defaults that every args has."""

_KINDS = "; ".join(f"{row.name}: {row.text}" for row in STATISTICS.values())
GATE_ROWS: dict[str, Key] = {
    "statistic": Key(words(*STATISTICS), "ratio", f"The value that is compared with the bounds. {_KINDS}"),
    "reduce": Key(words(config.Reduce), "token", "Reduction over the tokens of a response."),
    "low": Key(number("[-inf, inf]"), None, "Smallest value that is kept."),
    "high": Key(number("[-inf, inf]"), None, "Largest value that is kept."),
    "action": Key(words(config.Action), "reject", "reject: masks the token; zero: gives it weight 0."),
    "name": Key(TEXT, None, "Prefix of its metric names."),
}
"""Keys of a filter in ``rs_gates``. :class:`Gate` checks them and their combination."""

STEPS_OF_ROLLOUT = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
FLAGS: dict[str, Key] = {
    name: Key(values, None, "A flag of the framework.")
    for values, names in (
        (number("[0, inf]"), ("eps_clip", "eps_clip_high")),
        (number("(-inf, inf)"), ("entropy_coef", "kl_coef", "kl_loss_coef")),
        (number("(1, inf]"), ("eps_clip_c",)),
        (number("[-inf, inf]"), ("opsm_delta",)),
        (words(KlType), ("kl_loss_type",)),
        (number("[0, inf)"), ("rollout_temperature", "update_weights_interval", *STEPS_OF_ROLLOUT)),
        (number("(0, 1]"), ("rollout_top_p",)),
        (TEXT, ("advantage_estimator", "loss_type", "qkv_format", "train_backend")),
        (TEXT, ("custom_pg_loss_reducer_function_path", "custom_tis_function_path")),
    )
    for name in names
}
"""Flags of the frameworks that a file can also set. Values that make a loss fail or NaN raise an error."""
_OTHERS = (
    *("allgather_cp", "context_parallel_size", "custom_advantage_function_path", "custom_generate_function_path"),
    *("custom_reward_post_process_path", "grpo_std_normalization", "load_debug_rollout_data", "normalize_advantages"),
    *("on_policy_tokens", "observe_training_entropy", "recompute_loss_function", "rewards_normalization"),
    *("rollout_data_postprocess_path", "skip_actor_forward_only", "true_on_policy_mode"),
    *("use_dynamic_global_batch_size", "use_kl_loss", "use_opd", "use_opsm", "use_score_centering", "use_unbiased_kl"),
)
"""Arguments that the parsers of the frameworks check."""
ARGUMENTS = (*ROWS, *FLAGS, *TIS_OF_FRAMEWORKS, *_OTHERS)
"""Every argument that is read. Other names are only compared with these."""


def read_rows(rows: Mapping[str, Key], given: Mapping[str, Any], wrong: Errors) -> dict[str, Any]:
    """The given values of these rows after their check; errors go to ``wrong``."""
    read = {}
    for key, row in rows.items():
        if given.get(key) is not None:
            with wrong:
                read[key] = row.values.check(key, given[key])
    return read


# --- names that are not keys

OF_OTHERS = {
    "mis": "flat keys since 0.6, such as tis_level, tis_mode and rs_gates; see mis-ext keys",
    "use_mis": "use_tis: true, and use_rs: true for a filter",
    # verl
    "rollout_correction": "the output of mis-ext convert verl FILE",
    "rollout_is": "tis_level",
    "rollout_is_threshold": "tis_upper_bound",
    "rollout_is_batch_normalize": "tis_batch_normalize",
    "rollout_rs": "use_rs: true and rs_level",
    "rollout_rs_threshold": "rs_upper_bound and rs_lower_bound",
    "rollout_token_veto_threshold": "rs_veto_threshold",
    "bypass_mode": "mis_loss_mode: bypass",
    # TRL
    "vllm_importance_sampling_correction": "use_tis: true",
    "vllm_importance_sampling_mode": "tis_level and tis_mode",
    "vllm_importance_sampling_cap": "tis_upper_bound",
}
"""Other names that raise an error, and their replacements."""
REMOVED = {
    "mis_loss_compile": "remove the key",
    "rs_gates.level": "use reduce: token, sum (for sequence), mean (geometric), min, or max",
    "rs_gates.after": "remove the key: a filter reads all tokens of the response mask",
    "rs_gates.target_accept": "use low and high; mis-ext report shows the share that each bound keeps",
    "rs_gates.target_gain": "remove the key",
    "rs_gates.statistic: squared_log_ratio": "use statistic: k2, with half of the bound",
    **{f"mis_lr_multiplier_{kind}": f"take the root of mis_ess_ratio_{kind}" for kind in ("token", "seq")},
    "mis_ratio_above_2_fraction": "use mis_tis_truncate_fraction, or mis_ratio_max",
    "mis_ratio_below_half_fraction": "use mis_tis_truncate_fraction_low, or mis_ratio_min",
    "mis_train_rollout_logprob_abs_diff_invalid": "use mis_nonfinite_token_fraction, which is the same",
    **dict.fromkeys(("mis_log_ppl_diff_min", "mis_log_ppl_diff_max"), "use mis_log_ppl_diff, or mis_ratio_max"),
    "mis_tis_weight_std": "use mis_tis_weight_ess: (standard deviation / mean)^2 is 1 / mis_tis_weight_ess - 1",
    **{f"mis_ess_ratio_token_{age}": f"use mis_k3_kl_{age}" for age in ("fresh", "stale")},
}
"""Replacements of keys, ``rs_gates.KEY``, ``rs_gates.KEY: value``, and metrics in files for 0.5."""
NO_NULL = {"tis_level": "none", "tis_mode": "unbounded", "rs_level": "none"}
"""Keys for which null could mean two things: the default, and this word."""


def refuse_names(given: Mapping[str, Any], wrong: Errors) -> None:
    """Collect errors for names that look like keys of mis_ext. An option of another framework may be null or false."""
    known = {*ROWS, *TIS_OF_FRAMEWORKS, *REMOVED}
    names = [name for name in given if name not in known]
    with wrong:
        check_known("keys", [name for name in names if name.startswith(PREFIXES)], FLAT_KEYS)
    hints = [f"{name!a}{hint}" for name in names if not name.startswith(PREFIXES) and (hint := near_miss(name, ROWS))]
    hints += [f"{name!r} (use {key})" for name, key in OF_OTHERS.items() if given.get(name) not in (None, False)]
    wrong.refuse([f"no keys of mis_ext: {'; '.join(hints)}"] if hints else [])
    wrong.refuse(
        f"{key}: null could mean {word} or the default; use {key}: {word}, or remove the key"
        for key, word in NO_NULL.items()
        if key in given and given[key] is None
    )
    wrong.refuse(_removed(given))


def _removed(names: Collection[str]) -> list[str]:
    return [f"{name} was removed in mis_ext 0.6: {cure}" for name, cure in REMOVED.items() if name in names]


def near_miss(name: str, keys: Collection[str]) -> str:
    """The key that ``name`` means, misspelled or without its prefix, to append to an error; empty if there is none."""
    spelled = re.sub(r"[\s.-]+", "_", name.strip()).casefold()
    exact = [spelled] if spelled in keys else []
    slips = [] if spelled.startswith("misc_") else [key for key in keys if _is_slip(spelled, key)]
    # A single word may belong to another program.
    bare = [prefix + spelled for prefix in PREFIXES if "_" in spelled and prefix + spelled in keys]
    meant = [*exact, *slips, *bare]
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def _is_slip(name: str, key: str) -> bool:
    """Return True if at most one letter in six differs. A last word of two letters, as in ``use_rs``, must be equal."""
    most = len(key) // 6
    # The checks of length and letters are fast, and exclude nearly all names.
    if abs(len(name) - len(key)) > most or len({*name}.symmetric_difference(key)) > most:
        return False
    last_word = key.rpartition("_")[2]
    if len(last_word) < 3 and not name.endswith(f"_{last_word}") and not name.startswith(key):
        return False
    num_same = sum(block.size for block in SequenceMatcher(None, name, key, autojunk=False).get_matching_blocks())
    return sorted(name) == sorted(key) or len(name) + len(key) - 2 * num_same <= most


# --- the rows as JSON Schema


def json_schema() -> dict[str, Any]:
    """The schema (draft 7) of a file for ``--custom-config-path``, with which editors complete and check it.

    It describes each key separately. The reader of a file rejects everything that the schema rejects, and also wrong
    parameter values of a method and wrong combinations of keys.
    """
    from mis_ext.methods.catalogue import METHODS

    ours = "|".join([*ROWS, *TIS_OF_FRAMEWORKS])
    methods = {
        f"method_{name}": _object(
            {"name": {"const": name}}
            | {key: {"description": f"In {row.legal[key]}."} | _default(value) for key, value in row.defaults.items()},
            description=row.formula,
            required=["name"],
        )
        for name, row in METHODS.items()
    }
    gate = {key: _node(row, or_null=row.default is None) for key, row in GATE_ROWS.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of mis_ext",
        "description": "For --custom-config-path of slime and Miles. Keys without our prefixes belong to the "
        "framework.",
        "type": "object",
        "properties": {key: _node(row, or_null=key not in NO_NULL) for key, row in ROWS.items()},
        "patternProperties": {
            f"^(?!({ours})$)({'|'.join(PREFIXES)})": {"not": {}, "errorMessage": "mis_ext has no such key"}
        },
        "definitions": {
            "gate": _object(gate, description="A filter: values outside of its bounds are dropped."),
            "method": {"anyOf": [{"enum": [*METHODS]}, *({"$ref": f"#/definitions/{name}"} for name in methods)]},
            **methods,
        },
    }


def described(name: str) -> dict[str, Any]:
    """The row of a key, for ``mis-ext keys``."""
    (_, legal, _), default, text, unit = ROWS[name]
    default = json.dumps(default) if isinstance(default, bool) else default
    return {"key": name, "legal": legal, "default": default or None, "unit": unit or None, "what": text}


def _node(row: Key, *, or_null: bool) -> dict[str, Any]:
    values = {"anyOf": [row.values.schema, {"type": "null"}]} if or_null else row.values.schema
    text = f"{row.text} In {row.unit}." if row.unit else row.text
    return {**values, "description": text} | _default(row.default)


def _default(value: Any) -> dict[str, Any]:
    return {} if value in (None, ()) else {"default": [*value] if isinstance(value, tuple) else value}
