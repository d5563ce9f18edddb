# SPDX-License-Identifier: Apache-2.0
"""From keys and flags to configuration objects, with all errors at once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext.correction.config import BOUNDS, REDUCTIONS, CorrectionConfig, Gate, Weight
from mis_ext.correction.tokens import LAG
from mis_ext.keys.names import refuse_names
from mis_ext.keys.refusals import (
    APPLIED,
    against_correction,
    against_fsdp,
    double_correction,
    idle_bounds,
    idle_keys,
    inherits_bound,
    refuse_group_keys,
    refuse_idle,
    refuse_loss_keys,
)
from mis_ext.keys.rows import (
    CORRECTION_ROWS,
    FLAGS,
    FRAMEWORK_ROWS,
    GROUP_ROWS,
    LEVELS,
    LOSS_ROWS,
    VETOES,
    read_rows,
)
from mis_ext.validation import Errors, check_mapping

if TYPE_CHECKING:
    from mis_ext.keys.group_keys import GroupConfig
    from mis_ext.keys.loss_keys import WholeLoss
else:
    GroupConfig = WholeLoss = Any  # The hook has neither, and loads neither.

Keys = Mapping[str, Any] | str | Path
"""Keys of a configuration: a mapping, or the path of a YAML file."""


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
            refuse_idle(idle_bounds(every), every)
    if not given.keys() & {*VETOES} and every.keys() & {*VETOES}:
        given.pop("rs_veto_requires_rs", None)  # A veto that was set to null takes its condition with it.
    if given.keys() & {*APPLIED} <= read.keys():
        with wrong:
            refuse_idle(idle_keys(given, corrects=corrects), given)
    if wrong.found:
        from mis_ext.keys.removed import refuse_removed  # What was removed is wrong: it is named beside other errors.

        with wrong:
            refuse_removed(every)
    wrong.raise_all()
    reporting = {key.removeprefix("mis_"): read[key] for key in _REPORTING if key in given}
    reporting |= {"warn_only": read.get("mis_guard", frozenset()), "staleness": read.get("mis_staleness", False)}
    reporting["per_token_loss"] = read.get("calculate_per_token_loss", False)
    if not corrects:
        return CorrectionConfig(weight=None, metrics_only=True, **reporting)
    values = _values({key: read[key] for key in given})
    wrong.refuse(against_correction(given, values))
    wrong.raise_all()
    if values["tis_mode"] == "truncate" and "tis_lower_bound" in given and not inherits_bound(given, "lower"):
        # Existing files carry it with truncate, where it never had an effect.
        warnings.warn(
            f"tis_lower_bound={read['tis_lower_bound']:g} has no effect with tis_mode: truncate; remove it or use "
            "tis_mode: clip",
            stacklevel=3,
        )
    return CorrectionConfig(
        weight=_weight(values),
        gates=_gates(values),
        normalize_over=values["tis_normalize_over"] if values["tis_batch_normalize"] else None,
        scope=values["tis_normalize_scope"],
        denominator=values["mis_denominator"],
        **reporting,
    )


_REPORTING = ("mis_metrics", "mis_metric_max", "mis_max_reject_fraction", "mis_compile")


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The value or default of every key of a correction; of bounds, the defaults that follow from the others."""
    values = {key: row.default for key, row in CORRECTION_ROWS.items()} | dict(given)
    if values["tis_lower_bound"] is None:
        values["tis_lower_bound"] = 1.0 / values["tis_upper_bound"]
    for bound in ("lower_bound", "upper_bound"):
        if values[f"rs_{bound}"] is None:
            values[f"rs_{bound}"] = values[f"tis_{bound}"]
    return values


def _weight(values: Mapping[str, Any]) -> Weight | None:
    if values["tis_level"] == "none":
        return None
    bound = BOUNDS[values["tis_mode"]]
    return Weight(
        level=values["tis_level"],
        mode=bound.name,
        low=values["tis_lower_bound"] if bound.has_low else None,
        high=values["tis_upper_bound"] if bound.has_high else None,
        when=values["tis_when"],
    )


def _gates(values: Mapping[str, Any]) -> tuple[Gate, ...]:
    gates = []
    if values["use_rs"] and values["rs_level"] != "none":
        low, high = values["rs_lower_bound"], values["rs_upper_bound"]
        gates.append(Gate(reduce=REDUCTIONS[values["rs_level"]], low=low, high=high))
    if values["use_rs"]:
        gates += values["rs_gates"]
    if values["use_rs"] or not values["rs_veto_requires_rs"]:
        gates += [
            Gate(statistic=statistic, reduce=reduce, **{bound: values[key]})
            for key, (statistic, reduce, bound) in VETOES.items()
            if values[key] is not None
        ]
    if values["rs_max_staleness"] is not None:
        reduce = LEVELS[values["rs_staleness_level"]]
        gates.append(Gate(statistic=LAG, reduce=reduce, high=values["rs_max_staleness"], name="rs_staleness"))
    return tuple(gates)


# --- a run: all that keys and flags say


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run of slime, Miles, or a loop with their names.

    Attributes:
        correction: What the correction computes.
        is_padded: Logits are ``[B, L, V]`` (``qkv_format: bshd``), not packed.
        whole_loss: The full policy loss; None if the framework's loss runs, which calls the hook.
        group: What responses to one prompt share; None without a key about it.
        double_correction: Why loss and correction together count the mismatch twice, or None.
    """

    correction: CorrectionConfig
    is_padded: bool
    whole_loss: WholeLoss | None
    group: GroupConfig | None
    double_correction: str | None

    @property
    def loss(self) -> WholeLoss:
        """The full policy loss, of a run that computes it."""
        assert self.whole_loss is not None
        return self.whole_loss


def read_config(given: Mapping[str, Any], *, whole_loss: bool) -> RunConfig:
    """Read the configuration of a run from its arguments.

    Raises:
        ValueError: A key or flag is wrong, or has no effect with the others; a line for each of them.
        TypeError: A value has the wrong type.
    """
    wrong, correction, loss, group = Errors(), None, None, None
    read_rows(FLAGS, given, wrong)
    of_loss = read_rows(LOSS_ROWS | FRAMEWORK_ROWS, given, wrong) if whole_loss else {}
    is_legal = not wrong.found
    with wrong:
        correction = config_from_mapping(given)
    if whole_loss and is_legal:
        from mis_ext.keys.loss_keys import read_whole_loss, refuse_idle_loss_keys  # Loads the loss.

        with wrong:
            loss = read_whole_loss({**given, **of_loss})
            refuse_idle_loss_keys(given, loss, correction)
    if any(given.get(key) is not None for key in GROUP_ROWS):
        from mis_ext.keys.group_keys import read_group

        with wrong:
            group = read_group(given)
    if given.get("loss_type") not in (None, "custom_loss"):
        with wrong:
            refuse_loss_keys(given)
    if correction is not None:
        wrong.refuse(against_fsdp(given, correction, has_loss=loss is not None and loss.has_correction))
    wrong.raise_all()
    assert correction is not None
    of_method = None if loss is None else loss.double_correction(correction)
    return RunConfig(
        correction=correction,
        is_padded=given.get("qkv_format") == "bshd",
        whole_loss=loss,
        group=group,
        double_correction=of_method or double_correction(given, correction),
    )


# --- keys as callers give them


def config_given(config: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """``config`` itself, or the configuration in a mapping of keys."""
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
    from mis_ext.files import read_yaml  # Also loads PyYAML, which the hook does not need.

    found: Any = read_yaml(keys) if isinstance(keys, (str, Path)) else keys
    if not isinstance(found, Mapping):
        raise TypeError(f"{keys}: expected a mapping of keys to values, got {type(found).__name__}")
    return dict(found)


def says_whole_loss(keys: Mapping[str, Any]) -> bool:
    """Return True if a key is of the full policy loss, not of the correction alone."""
    return any(keys.get(key) is not None for key in LOSS_ROWS)
