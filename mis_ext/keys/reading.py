# SPDX-License-Identifier: Apache-2.0
"""From keys and flags to configuration objects, with all errors at once."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext.correction.config import BOUNDS, REDUCTIONS, CorrectionConfig, Gate, HookReduce, Weight
from mis_ext.correction.tokens import LAG
from mis_ext.keys.refusals import (
    APPLIED,
    ESTIMATORS,
    KeysInUse,
    double_correction,
    doubts,
    refuse_built_in_bounds,
    refuse_combinations,
    refuse_group_keys,
    refuse_groups,
    refuse_idle_keys,
    refuse_names,
)
from mis_ext.keys.rows import (
    CORRECTION_ROWS,
    FRAMEWORK_ROWS,
    GROUP_ROWS,
    LEVELS,
    LOSS_ROWS,
    Baseline,
    BaselineOver,
    check_flags,
    read_rows,
)
from mis_ext.loss.words import Scoring
from mis_ext.validation import Errors, check_mapping

if TYPE_CHECKING:
    from mis_ext.loss.settings import LossSettings
else:
    LossSettings = Any  # The hook's run has none, and loads no loss.

Keys = Mapping[str, Any] | str | Path
"""What spells a configuration: a mapping, or the path of a YAML file."""


# --- a correction


def config_from_mapping(mapping: Mapping[str, Any]) -> CorrectionConfig:
    """The configuration in ``mapping``.

    A key with value None counts as unset. Keys without the prefixes of mis_ext belong to the framework and are ignored,
    except for ``FRAMEWORK_ROWS``.

    Raises:
        ValueError: A key is unknown, misspelt, in the wrong place or without effect, or its value is out of range.
        TypeError: A value has the wrong type. Example: YAML reads ``1e-4`` as a string.
    """
    every = check_mapping("the configuration", mapping)
    wrong = Errors()
    refuse_names(every, wrong)
    # Also of features that are off: a misspelling must not wait for its feature.
    read = read_rows(CORRECTION_ROWS | GROUP_ROWS | FRAMEWORK_ROWS, every, wrong)
    given = {key: every[key] for key in CORRECTION_ROWS if every.get(key) is not None}
    measures = bool(every.get("get_mismatch_metrics"))
    corrects = bool(given.get("use_tis", not measures))
    if measures or corrects:
        with wrong:
            refuse_built_in_bounds(every)
    if not given.keys() & {*VETOES} and every.keys() & {*VETOES}:
        given.pop("rs_veto_requires_rs", None)  # A veto that was set to null takes its condition with it.
    if given.keys() & {*APPLIED} <= read.keys():
        with wrong:
            refuse_idle_keys(KeysInUse(given, corrects=corrects))
    wrong.raise_all()
    reporting = {key.removeprefix("mis_"): read[key] for key in _REPORTING if key in given}
    reporting |= {"warn_only": read.get("mis_guard", frozenset()), "staleness": read.get("mis_staleness", False)}
    reporting["per_token_loss"] = read.get("calculate_per_token_loss", False)
    if not corrects:
        return CorrectionConfig(weight=None, metrics_only=True, **reporting)
    values = {key: read[key] if key in given else row.default for key, row in CORRECTION_ROWS.items()}
    if values["tis_lower_bound"] is None:
        values["tis_lower_bound"] = 1.0 / values["tis_upper_bound"]
    config = CorrectionConfig(
        weight=_weight(given, values),
        gates=_gates(given, values),
        normalize_over=values["tis_normalize_over"] if values["tis_batch_normalize"] else None,
        scope=values["tis_normalize_scope"],
        denominator=values["mis_denominator"],
        **reporting,
    )
    if config.staleness and not reporting["staleness"]:
        keys = "rs_max_staleness, tis_when: stale, and a gate on the lag"
        raise ValueError(f"{keys} need mis_staleness: true, with which the rollout stores the version of each token")
    return config


_REPORTING = ("mis_metrics", "mis_metric_max", "mis_max_reject_fraction", "mis_compile")
VETOES: dict[str, tuple[str, HookReduce, str]] = {
    "rs_veto_threshold": ("ratio", "min", "low"),
    "rs_veto_upper_threshold": ("ratio", "max", "high"),
    "rs_veto_probability": ("proximal_probability", "min", "low"),
}
"""Statistic, reduction and bound of the gate that each is."""


def _weight(given: Mapping[str, Any], values: Mapping[str, Any]) -> Weight | None:
    level, mode = values["tis_level"], values["tis_mode"]
    low, high = values["tis_lower_bound"], values["tis_upper_bound"]
    if level == "none":
        return None
    bound, edges = BOUNDS[mode], {}
    if bound.has_high:
        if high == math.inf:
            raise ValueError("tis_upper_bound must be in (0, inf), got inf; write tis_mode: unbounded for no bound")
        edges["high"] = high
    if bound.has_low:
        _check_order(given, "tis", low, high)
        edges["low"] = low
    elif "tis_lower_bound" in given and not KeysInUse(given, corrects=True).low:
        # Existing files carry this pair: the lower bound never had an effect there.
        warnings.warn(
            f"tis_lower_bound={low:g} has no effect with tis_mode: {mode}; remove it or use tis_mode: clip",
            stacklevel=4,
        )
    return Weight(level=level, mode=mode, when=values["tis_when"], **edges)


def _check_order(given: Mapping[str, Any], prefix: str, low: float, high: float) -> None:
    if low >= high:
        default = "" if f"{prefix}_lower_bound" in given else " (from tis_lower_bound, by default 1 / tis_upper_bound)"
        raise ValueError(f"{prefix}_lower_bound must be below {prefix}_upper_bound, got {low!r}{default} and {high!r}")


def _gates(given: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Gate, ...]:
    gates = []
    if values["use_rs"]:
        if values["rs_level"] != "none":
            gates.append(_band(given, values))
        elif not values["rs_gates"]:
            raise ValueError("rs_level: none needs rs_gates; write use_rs: false for no gate")
        gates += values["rs_gates"]
    if values["use_rs"] or not values["rs_veto_requires_rs"]:
        gates += [
            Gate(statistic=statistic, reduce=reduce, **{bound: values[key]})
            for key, (statistic, reduce, bound) in VETOES.items()
            if key in given
        ]
    if values["rs_max_staleness"] is not None:
        reduce = LEVELS[values["rs_staleness_level"]]
        gates.append(Gate(statistic=LAG, reduce=reduce, high=values["rs_max_staleness"], name="rs_staleness"))
    return tuple(gates)


def _band(given: Mapping[str, Any], values: Mapping[str, Any]) -> Gate:
    # What is not set is that of the weight.
    low, high = (
        values[f"{'rs' if f'rs_{bound}' in given else 'tis'}_{bound}"] for bound in ("lower_bound", "upper_bound")
    )
    _check_order(given, "rs", low, high)
    if low == 0.0 and high == math.inf:
        raise ValueError("use_rs: rs_lower_bound=0 and rs_upper_bound=inf reject nothing")
    return Gate(reduce=REDUCTIONS[values["rs_level"]], low=low, high=high)


# --- a run: all that keys and flags say


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringChoice:
    """How logits become log-probs and entropy. It does not change what the loss is.

    Attributes:
        by: Who scores, in slime and Miles.
        said: What ``mis_loss_scoring`` says, or None.
        inplace: The gradient takes the place of the logits.
        observes_entropy: Miles reports the entropy also where it is no part of the loss (``observe_training_entropy``).
        replays_top_p: slime normalises over the tokens that top-p kept (``rollout_top_p`` is not 1).
    """

    by: Scoring
    said: Scoring | None
    inplace: bool
    observes_entropy: bool
    replays_top_p: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeLoss:
    """What only the full policy loss reads.

    Attributes:
        settings: What it computes.
        has_correction: Whether a correction is applied or measured (``use_tis``, ``get_mismatch_metrics``).
        skips_scoring: The framework has no scoring pass (``skip_actor_forward_only``): its log-probs are stale.
        is_told_to_skip: The framework was told to skip that pass (``use_rollout_logprobs``).
        scoring: Who turns logits into log-probs.
        temperature: Of the rollout, by which logits are divided (``rollout_temperature``); 0 is greedy sampling, for
            which Miles does not divide.
        reducer_path: ``custom_pg_loss_reducer_function_path``, or None.
    """

    settings: LossSettings
    has_correction: bool
    skips_scoring: bool
    is_told_to_skip: bool
    scoring: ScoringChoice
    temperature: float
    reducer_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """What the responses to one prompt share.

    Attributes:
        baseline: ``mis_group_baseline``: what a reward is compared with.
        over: ``mis_group_over``: which trajectories count in it: ``all``, those that are ``trained``, or those of
            which the correction has ``kept`` a token.
        prompt_mean: ``mis_prompt_mean``: every prompt weighs the same.
        with_deviation: The difference is divided by the standard deviation (``grpo_std_normalization``).
        num_answers: ``n_samples_per_prompt``, or None.
        per_token_loss: The framework divides by all tokens of a step.
        said: The keys that were given.
    """

    baseline: Baseline
    over: BaselineOver
    prompt_mean: bool
    with_deviation: bool
    num_answers: int | None
    per_token_loss: bool
    said: tuple[str, ...]

    @property
    def of_rewards(self) -> str:
        """What is said of the rewards: keys and values; nothing where it is not said."""
        values = {"mis_group_baseline": self.baseline, "mis_group_over": self.over}
        return ", ".join(f"{key}: {value}" for key, value in values.items() if key in self.said)

    @property
    def needs_rollout(self) -> str | None:
        """The key for which the scored rollout must be seen, or None."""
        if self.over == "kept":
            return "mis_group_over: kept"
        return "mis_prompt_mean: true" if self.prompt_mean else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run of slime, Miles, or a loop with their names.

    Attributes:
        correction: What the correction computes.
        is_padded: Logits are ``[B, L, V]`` (``qkv_format: bshd``), not packed.
        also_measures: ``get_mismatch_metrics`` is set.
        divides_by_kept: The framework divides by the tokens that are left (Miles' FSDP backend).
        whole_loss: None where the framework's own loss runs, and calls the hook.
        group: What responses to one prompt share; None where no key says anything about it.
        double_correction: How loss and correction together count the mismatch twice, or None.
        doubts: What is wrong if a function of the user's leaves something out: a warning each.
    """

    correction: CorrectionConfig
    is_padded: bool
    also_measures: bool
    divides_by_kept: bool
    whole_loss: WholeLoss | None
    group: GroupConfig | None
    double_correction: str | None = None
    doubts: tuple[str, ...] = ()


def read_config(given: Mapping[str, Any], *, whole_loss: bool) -> RunConfig:
    """The configuration that arguments spell.

    Raises:
        ValueError: A key or flag is wrong, or has no effect beside the others; a line for each of them.
        TypeError: A value has the wrong type.
    """
    wrong, loss, group = Errors(), None, None
    check_flags(given, wrong)
    with wrong:
        correction = config_from_mapping(given)
    if whole_loss:
        from mis_ext.keys.loss_keys import read_whole_loss  # And the loss: no call of the hook needs it.

        with wrong:
            loss = read_whole_loss(given)
    if any(given.get(key) is not None for key in GROUP_ROWS):
        with wrong:
            group = read_group(given)
    wrong.raise_all()
    run = RunConfig(
        correction=correction,
        is_padded=given.get("qkv_format") == "bshd",
        also_measures=bool(given.get("get_mismatch_metrics")),
        divides_by_kept=given.get("train_backend") == "fsdp",
        whole_loss=loss,
        group=group,
    )
    refuse_combinations(given, run)
    return dataclasses.replace(
        run, double_correction=double_correction(given, run), doubts=tuple(doubts(given, correction, group))
    )


def read_group(given: Mapping[str, Any]) -> GroupConfig:
    """What arguments say about the responses to one prompt.

    Raises:
        ValueError: A flag of the framework makes a key wrong, or is needed for it and not set.
    """
    wrong = Errors()
    keys = read_rows(GROUP_ROWS, given, wrong)
    wrong.raise_all()
    group = GroupConfig(
        baseline=keys.get("mis_group_baseline", "mean"),
        over=keys.get("mis_group_over", "trained"),
        prompt_mean=keys.get("mis_prompt_mean", False),
        with_deviation=given.get("grpo_std_normalization") is not False
        and given.get("advantage_estimator") in (None, *ESTIMATORS),
        num_answers=given.get("n_samples_per_prompt"),
        per_token_loss=bool(given.get("calculate_per_token_loss")),
        said=tuple(keys),
    )
    refuse_groups(given, group)
    return group


# --- keys as callers give them


def config_given(config: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """``config`` itself, or what a mapping of keys spells."""
    if isinstance(config, CorrectionConfig):
        return config
    if isinstance(config, Mapping):
        found = config_from_mapping(config)
        refuse_group_keys([key for key in GROUP_ROWS if config.get(key) is not None])
        idle = [key for key in LOSS_ROWS if config.get(key) is not None]
        if idle:
            raise ValueError(f"{', '.join(idle)}: no effect on a correction alone; give them to a full policy loss")
        return found
    hint = "; of an argparse namespace give vars(args)" if hasattr(config, "__dict__") else ""
    raise TypeError(f"config must be a CorrectionConfig or a mapping of keys, got {type(config).__name__}{hint}")


def read_keys(keys: Keys) -> dict[str, Any]:
    """The keys themselves, or those in the file."""
    from mis_ext.files import read_yaml  # And PyYAML: no call of the hook reads a file.

    found: Any = read_yaml(keys) if isinstance(keys, (str, Path)) else keys
    if not isinstance(found, Mapping):
        raise TypeError(f"{keys}: expected a mapping of keys to values, got {type(found).__name__}")
    return dict(found)


def says_whole_loss(keys: Mapping[str, Any]) -> bool:
    """Whether a key is of the full policy loss, not of the correction alone."""
    return any(keys.get(key) is not None for key in LOSS_ROWS)


def interned_keys(keys: Keys, **more: Any) -> dict[str, Any]:
    """``keys`` and ``more``: for the same ones the same object, by which sessions know a run."""
    return _interned(json.dumps(keys if isinstance(keys, str) else read_keys(keys)), json.dumps(more))


@functools.lru_cache(maxsize=64)
def _interned(keys: str, more: str) -> dict[str, Any]:
    return {**read_keys(json.loads(keys)), **json.loads(more)}
