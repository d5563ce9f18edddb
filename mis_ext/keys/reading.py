# SPDX-License-Identifier: Apache-2.0
"""Read keys and flags into configuration objects, and raise all errors at once, also for keys without effect.

``rows`` has the legal values of a single key. ``loss_keys`` has the combinations of the full policy loss; the hook does
not load it. ``check_setup`` rejects keys that need other launch flags.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mis_ext.correction.config import BOUNDS, REDUCTIONS, CorrectionConfig, Gate, Reduce, Weight
from mis_ext.correction.tokens import LAG
from mis_ext.keys import rows
from mis_ext.validation import Errors, MismatchWarning, check_mapping, errors_of

if TYPE_CHECKING:
    from mis_ext.keys.loss_keys import WholeLoss  # The hook has none, and does not load it.

Keys = Mapping[str, Any] | str | Path
"""Keys of a configuration: a mapping, or the path of a YAML file."""


# --- a correction


def config_from_mapping(mapping: Mapping[str, Any]) -> CorrectionConfig:
    """Read the configuration in ``mapping``.

    A key with value None counts as unset. Among keys without a prefix of mis_ext, only ``FRAMEWORK_ROWS`` are read.

    Raises:
        ValueError: A key is unknown, misspelled, in the wrong place or without effect, or its value is out of range.
        TypeError: A value has the wrong type. Example: YAML reads ``1e-4`` as a string.
    """
    return _read_correction(check_mapping("the configuration", mapping), whole_loss=False)


def _read_correction(given: Mapping[str, Any], *, whole_loss: bool) -> CorrectionConfig:
    """:func:`config_from_mapping`; the full policy loss corrects only with ``use_tis``."""
    wrong = Errors()
    rows.refuse_names(given, wrong)
    # Also read keys of disabled features, so that a misspelling is found before its feature is enabled.
    read = rows.read_rows(rows.CORRECTION_ROWS | rows.GROUP_ROWS | rows.FRAMEWORK_ROWS, given, wrong)
    values = {key: row.default for key, row in rows.CORRECTION_ROWS.items()} | read
    corrects = given.get("use_tis")
    if corrects is None:
        corrects = not given.get("get_mismatch_metrics") and not whole_loss
    if all(key in read for key in _APPLIED if given.get(key) is not None):
        # A key with an illegal value gets no second error.
        legal = {key: given.get(key) for key in (*read, *rows.TIS_OF_FRAMEWORKS)}
        wrong.refuse(without_effect(_idle_keys(given, values, corrects=corrects, whole_loss=whole_loss), legal))
    wrong.raise_all()
    reporting = {field: read[key] for key, field in REPORTING.items() if key in read}
    if not corrects:
        return CorrectionConfig(weight=None, metrics_only=True, **reporting)
    weight, gates, bound = None, list[Gate](), BOUNDS[values["tis_mode"]]
    sides = ("low", "tis_lower_bound", bound.has_low), ("high", "tis_upper_bound", bound.has_high)
    bounds = {side: values[key] for side, key, is_used in sides if is_used}
    with wrong, errors_of(", ".join(key for key in read if key.startswith("tis_"))):
        if values["tis_level"] != "none":
            weight = Weight(level=values["tis_level"], mode=values["tis_mode"], when=values["tis_when"], **bounds)
    with wrong, errors_of(", ".join(key for key in read if key == "use_rs" or key.endswith("_bound"))):
        gates = _gates(values)
    if values["use_rs"] and values["rs_level"] == "none" and not values["rs_gates"]:
        wrong.refuse(["rs_level: none needs rs_gates; set use_rs: false to have no filter"])
    if not values["mis_staleness"] and _reads_lag(values):
        wrong.refuse(["rs_max_staleness, tis_when: stale, and a gate on the lag need mis_staleness: true"])
    wrong.raise_all()
    if values["tis_mode"] == "truncate" and "tis_lower_bound" in read and not _inherits_bound(values, "lower"):
        # Existing files have this key with truncate, where it never had an effect.
        said = f"tis_lower_bound={read['tis_lower_bound']:g} has no effect with tis_mode: truncate"
        warnings.warn(f"{said}; remove the key or use tis_mode: clip", MismatchWarning, stacklevel=2)
    return CorrectionConfig(
        weight=weight,
        gates=tuple(gates),
        normalize_over=values["tis_normalize_over"] if values["tis_batch_normalize"] else None,
        scope=values["tis_normalize_scope"],
        denominator=values["mis_denominator"],
        **reporting,
    )


REPORTING = {
    **{f"mis_{name}": name for name in ("metrics", "metric_max", "max_reject_fraction", "compile", "staleness")},
    **{"mis_guard": "warn_only", "calculate_per_token_loss": "per_token_loss"},
}
"""Keys that are fields of a :class:`CorrectionConfig`, with and without a correction."""


def _gates(values: Mapping[str, Any]) -> list[Gate]:
    gates = []
    if values["use_rs"] and values["rs_level"] != "none":
        lower = values["rs_lower_bound"], values["tis_lower_bound"], 1.0 / values["tis_upper_bound"]
        low = next(bound for bound in lower if bound is not None)
        high = values["tis_upper_bound"] if values["rs_upper_bound"] is None else values["rs_upper_bound"]
        gates.append(Gate(reduce=REDUCTIONS[values["rs_level"]], low=low, high=high))
    if values["use_rs"]:
        gates += values["rs_gates"]
    if values["use_rs"] or not values["rs_veto_requires_rs"]:
        gates += [
            Gate(statistic=statistic, reduce=reduce, **{bound: values[key]})
            for key, (statistic, reduce, bound) in rows.VETOES.items()
            if values[key] is not None
        ]
    if values["rs_max_staleness"] is not None:
        reduce: Reduce = "token" if values["rs_staleness_level"] == "token" else "max"
        gates.append(Gate(statistic=LAG, reduce=reduce, high=values["rs_max_staleness"], name="rs_staleness"))
    return gates


def _reads_lag(values: Mapping[str, Any]) -> bool:
    by_key = values["rs_max_staleness"] is not None or values["tis_when"] == "stale"
    return by_key or any(gate.statistic == LAG for gate in values["rs_gates"])


def _inherits_bound(values: Mapping[str, Any], side: str) -> bool:
    """Return True if the filter of ``use_rs`` has the ``lower`` or ``upper`` bound of the weight."""
    return values["use_rs"] and values["rs_level"] != "none" and values[f"rs_{side}_bound"] is None


# --- keys without effect


class Idle(NamedTuple):
    """Keys without effect if ``when`` holds: the reason, and an alternative to removing them."""

    keys: tuple[str, ...]
    when: bool
    because: str
    advice: str = ""


_REPORTED = ("mis_staleness", "mis_metrics", "mis_metric_max", "mis_guard", "mis_compile")
"""Keys of metrics and guards."""
_APPLIED = tuple(key for key in rows.CORRECTION_ROWS if key not in (*_REPORTED, "use_tis"))
"""Keys that change weights and masks."""
_NO_BOUND, _NO_MEAN = "no weight and no gate has this bound", "tis_batch_normalize is not set"
_ON, _BUILT_IN = "set use_tis: true (the flag --use-tis)", "it belongs to the framework's built-in correction"
_ON_LOSS = "set --loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"
ALL_KEPT = "nothing rejects a token, so all tokens are kept"


def _idle_keys(
    given: Mapping[str, Any], values: Mapping[str, Any], *, corrects: bool, whole_loss: bool
) -> tuple[Idle, ...]:
    """Conditions for keys of a correction, with legal ``values``; ``loss_keys`` has those of the full policy loss."""
    has_weight, bound = values["tis_level"] != "none", BOUNDS[values["tis_mode"]]
    # A mode with a lower bound has an upper bound too.
    uses_high = has_weight and bound.has_high
    low_of_gate, high_of_gate = (_inherits_bound(values, side) for side in ("lower", "upper"))
    # By default, the lower bound is 1 / the upper bound.
    low_follows = values["tis_lower_bound"] is None and low_of_gate
    no_rs, is_scaled = given.get("use_rs") is None, given.get("tis_batch_normalize") is not None
    mode_rejects, is_alone = has_weight and bound.rejects, given.get("rs_gates") is None
    is_repeated = values["rs_level"] == values["tis_level"] and low_of_gate and high_of_gate and is_alone
    replaced = tuple(key for key, default in rows.TIS_OF_FRAMEWORKS.items() if given.get(key) != default)
    vetoes = tuple(rows.VETOES)
    has_veto = any(values[key] is not None for key in (*vetoes, "rs_max_staleness"))
    rejects = mode_rejects or values["use_rs"] or has_veto
    is_called, names = corrects or bool(given.get("get_mismatch_metrics")), values["mis_metrics"]

    def reports(*words: str) -> bool:
        return isinstance(names, str) or any(word in name for name in names for word in words)

    reads_lag = _reads_lag(values) or reports("lag_", "fresh", "stale")
    return (
        Idle(_APPLIED, not corrects, "use_tis is not true", _ON),
        Idle(_REPORTED, whole_loss and not is_called, "neither use_tis nor get_mismatch_metrics is true", _ON),
        Idle(("mis_staleness",), not reads_lag, "no weight, gate, or metric reads the lag"),
        Idle(("mis_metric_max",), not reports("k3_kl", "chi2_"), "mis_metrics has no k3_kl and no chi2"),
        Idle(("tis_mode", "tis_when", "tis_batch_normalize"), not has_weight, "tis_level is none"),
        # Existing files have a lower bound with truncate; this only warns.
        Idle(("tis_lower_bound",), not (low_of_gate or uses_high), _NO_BOUND),
        Idle(("tis_upper_bound",), not (uses_high or high_of_gate or low_follows), _NO_BOUND),
        Idle(("tis_normalize_over",), not is_scaled, _NO_MEAN),
        Idle(("tis_normalize_scope",), not is_scaled and values["mis_denominator"] != "kept", _NO_MEAN),
        Idle(("use_rs",), mode_rejects and is_repeated, "tis_mode rejects the same tokens"),
        Idle(("rs_level", "rs_lower_bound", "rs_upper_bound"), no_rs, "use_rs is not set", "set use_rs: true"),
        Idle(("rs_gates",), no_rs, "use_rs is not set", "set use_rs: true, with rs_level: none for these gates alone"),
        Idle(("rs_lower_bound", "rs_upper_bound"), values["rs_level"] == "none", "rs_level is none"),
        Idle(vetoes, values["rs_veto_requires_rs"] and no_rs, "rs_veto_requires_rs is true", "set use_rs: true"),
        # If a veto is set to null, its condition is not refused either.
        Idle(("rs_veto_requires_rs",), not given.keys() & {*vetoes}, "no veto is set"),
        Idle(("rs_staleness_level",), values["rs_max_staleness"] is None, "rs_max_staleness is not set"),
        Idle(("tis_normalize_over",), values["tis_normalize_over"] == "valid" and not rejects, ALL_KEPT),
        Idle(replaced, is_called, _BUILT_IN, "use tis_upper_bound, or tis_mode: clip with tis_lower_bound"),
    )


def without_effect(table: Iterable[Idle], given: Mapping[str, Any]) -> Iterator[str]:
    """Report each key without effect once: the reason, and what to use. A false key never counts."""
    named = set[str]()
    for row in table:
        idle = [key for key in row.keys if key not in named and given.get(key) is not None and given[key] is not False]
        if row.when and idle:
            named |= {*idle}
            shown = ", ".join(f"{key}={given[key]!r}" for key in idle)
            advice = f"{row.advice}, or remove it" if row.advice else "remove it"
            yield f"{shown}: no effect, because {row.because}; {advice}"


def unread_by(loss_type: str) -> Idle:
    """Keys of the full policy loss in a run with a loss of the framework."""
    return Idle((*rows.LOSS_ROWS,), True, f"--loss-type is {loss_type}", _ON_LOSS)


_ON_GROUPS = "compute advantages with mis_ext.group_advantages, and give the loss divisors"
GROUPS_ELSEWHERE = Idle((*rows.GROUP_ROWS,), True, "only slime and Miles pass the responses to a prompt", _ON_GROUPS)


# --- keys of the responses to one prompt

_COMPARE_SIZES = ("clip_cov", "kl_cov", "maspo")
"""Methods in which the gradient of a token is not linear in its advantage."""
_ESTIMATORS = ("grpo", "gspo", "cispo")
"""Estimators of the frameworks in which the advantage of every token is the normalized reward."""
_OF_REWARDS = ("mis_group_baseline", "mis_group_over")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """The baseline and the weight of the responses to one prompt, in slime and Miles."""

    baseline: rows.Baseline  # The mean that is subtracted from a reward.
    over: rows.BaselineOver  # Trajectories that count in it. kept: those with a token that the correction keeps.
    prompt_mean: bool  # Every prompt has the same weight.
    with_deviation: bool  # The difference is divided by the standard deviation (grpo_std_normalization).
    of_rewards: str  # The keys of the baseline that were given, with their values.

    @property
    def needs_rollout(self) -> str | None:
        """The key that needs the whole scored rollout, or None."""
        if self.over == "kept":
            return "mis_group_over: kept"
        return "mis_prompt_mean: true" if self.prompt_mean else None


def read_group(given: Mapping[str, Any]) -> GroupConfig:
    """Read the keys of responses to one prompt. Keys that are wrong or without effect are errors."""
    wrong = Errors()
    keys = rows.read_rows(rows.GROUP_ROWS, given, wrong)
    wrong.raise_all()
    estimator = given.get("advantage_estimator") or _ESTIMATORS[0]
    group = GroupConfig(
        baseline=keys.get("mis_group_baseline", "mean"),
        over=keys.get("mis_group_over", "trained"),
        prompt_mean=keys.get("mis_prompt_mean", False),
        with_deviation=given.get("grpo_std_normalization") is not False and estimator in _ESTIMATORS,
        of_rewards=", ".join(f"{key}: {keys[key]}" for key in _OF_REWARDS if key in keys),
    )
    compares = estimator in (*_ESTIMATORS, "reinforce_plus_plus_baseline")
    reads_rewards = group.over == "kept" or given.get("custom_reward_post_process_path", "not a flag here") is not None
    flag = "--custom-reward-post-process-path"
    table = (
        Idle(_OF_REWARDS, not compares, f"--advantage-estimator {estimator} compares no rewards"),
        Idle(_OF_REWARDS, given.get("rewards_normalization") is False, "--disable-rewards-normalization is set"),
        Idle(_OF_REWARDS, not reads_rewards, f"{flag} is not set", "give it mis_ext.group_rewards"),
    )
    wrong.refuse(without_effect(table, given)).refuse(_against_group(given, group, estimator)).raise_all()
    return group


def _against_group(given: Mapping[str, Any], group: GroupConfig, estimator: str) -> Iterator[str]:
    """Flags that contradict these keys."""
    method = given.get("mis_loss_method")
    method = method.get("name") if isinstance(method, Mapping) else method
    changes = [name for name in ("normalize_advantages", "custom_advantage_function_path") if given.get(name)]
    changes += [f"--advantage-estimator {estimator}"] if estimator == "reinforce_plus_plus_baseline" else []
    names = ("mis_denominator", "mis_loss_denominator")
    denominators = [f"{name}: {given[name]}" for name in names if given.get(name) in ("kept", "sequence", "constant")]
    if path := given.get("custom_pg_loss_reducer_function_path"):
        denominators.append(f"custom_pg_loss_reducer_function_path: {path}")
    if group.over == "kept" and changes:
        yield f"mis_group_over: kept: with {', '.join(changes)}, advantages are not normalized rewards; use trained"
    if group.prompt_mean and method in _COMPARE_SIZES:
        yield f"mis_prompt_mean: true scales advantages, but mis_loss_method: {method} compares their size; remove one"
    if group.prompt_mean and denominators:
        yield f"mis_prompt_mean: true and {', '.join(denominators)} are two denominators; remove one of them"


# --- a run: its keys and flags


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run of slime, Miles, or a custom loop with their argument names."""

    correction: CorrectionConfig
    is_padded: bool  # Logits are [B, L, V] (qkv_format: bshd), not packed.
    whole_loss: WholeLoss | None  # None if the framework's loss runs and calls the hook.
    group: GroupConfig
    double_correction: str | None  # Why loss and correction together correct the mismatch twice.

    @property
    def loss(self) -> WholeLoss:
        """The full policy loss of a run that computes it."""
        assert self.whole_loss is not None
        return self.whole_loss


def read_config(given: Mapping[str, Any], *, whole_loss: bool) -> RunConfig:
    """Read the configuration of a run from its arguments. All errors are raised as one, with a line per key."""
    wrong, correction, loss, group = Errors(), None, None, None
    flags = rows.read_rows(rows.FLAGS, given, wrong)
    of_loss = rows.read_rows(rows.LOSS_ROWS | rows.FRAMEWORK_ROWS, given, wrong) if whole_loss else {}
    is_legal = not wrong
    with wrong:
        correction = _read_correction(check_mapping("the configuration", given), whole_loss=whole_loss)
    if whole_loss and is_legal:
        from mis_ext.keys.loss_keys import read_whole_loss  # Loads the loss.

        loss = read_whole_loss({**given, "mis_loss_method": of_loss.get("mis_loss_method")}, correction, wrong)
    with wrong:
        group = read_group({**given, **dict.fromkeys(rows.FLAGS), **flags})
    if flags.get("loss_type") not in (None, "custom_loss"):
        legal = {key: given[key] for key in of_loss} if whole_loss else given
        wrong.refuse(without_effect([unread_by(flags["loss_type"])], legal))
    if correction is not None and given.get("train_backend") == "fsdp":
        wrong.refuse(_against_fsdp(correction, has_loss=loss is not None))
    wrong.raise_all()
    assert correction is not None
    assert group is not None
    return RunConfig(
        correction=correction,
        is_padded=given.get("qkv_format") == "bshd",
        whole_loss=loss,
        group=group,
        double_correction=_double_correction(given, correction, loss),
    )


def _against_fsdp(correction: CorrectionConfig, *, has_loss: bool) -> Iterator[str]:
    """Corrections that are wrong with Miles' FSDP backend; ``has_loss``: they are in the full policy loss."""
    if correction.denominator == "kept":
        yield "mis_denominator: kept with train_backend: fsdp corrects twice: FSDP divides by kept tokens; remove it"
    # Its reducer divides every term by the kept tokens. The loss of mis_ext divides by the original tokens.
    if has_loss and any(gate.action == "reject" for gate in correction.all_gates.values()):
        cure = "put the filter in rs_gates with action: zero and rs_level: none, or keep the framework's loss"
        hook = "--custom-tis-function-path mis_ext.compute_mis_weights_with_cp"
        yield f"train_backend: fsdp divides by kept tokens: {cure} with {hook}"


def _double_correction(given: Mapping[str, Any], correction: CorrectionConfig, loss: WholeLoss | None) -> str | None:
    """The reason why loss and correction correct the mismatch twice, or None. The user can allow it with a guard."""
    method = loss and loss.settings.method
    if method and correction.weight is not None and method.method.weighs_behavior:
        cure = "use tis_level: none for gates alone, or use_tis: false"
        return f"mis_loss_method: {method.name} already corrects for the behavior policy: {cure}"
    # The other modes of the loss do not correct it twice; see where they are computed.
    is_mode = given.get("mis_loss_mode") in (None, "baseline") and given.get("mis_loss_method") is None
    is_baseline = is_mode and given.get("mis_loss_proximal") != "current"
    if correction.metrics_only or not is_baseline or not given.get("use_rollout_logprobs"):
        return None
    return "use_tis with use_rollout_logprobs corrects the mismatch twice: the PPO ratio corrects it too; drop one"


# --- keys from callers


def config_given(config: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """``config`` itself, or the configuration in a mapping of keys."""
    if isinstance(config, CorrectionConfig):
        return config
    if isinstance(config, Mapping):
        found = config_from_mapping(config)
        of_loss = Idle((*rows.LOSS_ROWS,), True, "a correction alone is computed here", "give it to a full policy loss")
        Errors().refuse(without_effect([GROUPS_ELSEWHERE, of_loss], config)).raise_all()
        return found
    hint = "; of an argparse namespace give vars(args)" if hasattr(config, "__dict__") else ""
    raise TypeError(f"config must be a CorrectionConfig or a mapping of keys, got {type(config).__name__}{hint}")


def read_keys(keys: Keys) -> dict[str, Any]:
    """The keys, or the keys in the file."""
    from mis_ext.files import read_yaml  # Also loads PyYAML, which the hook does not need.

    return read_yaml(keys) if isinstance(keys, (str, Path)) else check_mapping("the configuration", keys)


def is_whole_loss(keys: Mapping[str, Any]) -> bool:
    """Return True if a key belongs to the full policy loss."""
    return any(keys.get(key) is not None for key in rows.LOSS_ROWS)


def load_config(path: str | Path) -> CorrectionConfig:
    """Read the configuration in a YAML file.

    Keys without the prefixes of mis_ext belong to the framework and are ignored.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a mapping, or one of its values is not legal.
        TypeError: A value has the wrong type.
    """
    content = read_keys(path)
    with errors_of(str(path)):
        return config_from_mapping(content)


def preset(name: str) -> CorrectionConfig:
    """Return the preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    from mis_ext.files import preset_path

    return load_config(preset_path(name))


# --- keys of a configuration


def keys_as_yaml(keys: Mapping[str, Any]) -> str:
    """Keys as YAML, one per line. The innermost mappings and lists are on one line."""
    import yaml

    is_nested = any(isinstance(value, (dict, list, tuple)) for value in keys.values())
    return yaml.safe_dump(keys, sort_keys=False, default_flow_style=None if is_nested else False, width=120)


def flat_keys(config: CorrectionConfig) -> dict[str, Any]:
    """The keys of ``config`` that differ from their default. ``metrics_only`` raises an error: it has no key."""
    if config.metrics_only:
        raise ValueError("metrics_only has no key: set use_tis: false")
    weight, default = config.weight, CorrectionConfig()
    keys: dict[str, Any] = {"use_tis": True, "tis_level": "none"}
    if weight is not None:
        keys |= {"tis_level": weight.level, "tis_mode": weight.mode}
        keys |= {"tis_lower_bound": weight.low, "tis_upper_bound": weight.high, "tis_when": weight.when}
    if config.gates:
        fields = (dataclasses.asdict(gate).items() for gate in config.gates)
        gates = [{key: value for key, value in each if value not in (None, "reject")} for each in fields]
        keys |= {"use_rs": True, "rs_level": "none", "rs_gates": gates}
    if config.normalize_over is not None:
        keys["tis_batch_normalize"] = True
        # If nothing is rejected, both words mean the same, and valid is refused.
        if config.gates or (weight is not None and weight.bound.rejects):
            keys["tis_normalize_over"] = config.normalize_over
    if config.is_scaled and config.scope != "data_parallel":
        keys["tis_normalize_scope"] = config.scope
    for name in ("denominator", "staleness", "metric_max", "max_reject_fraction", "metrics", "compile"):
        if getattr(config, name) != getattr(default, name):
            keys[f"mis_{name}"] = getattr(config, name)
    if config.warn_only:
        keys["mis_guard"] = dict.fromkeys(sorted(config.warn_only), "warn")
    return {key: value for key, value in keys.items() if value not in (None, "always")}
