# SPDX-License-Identifier: Apache-2.0
"""Configurations from files, presets, and published methods; and keys from configurations."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from mis_ext.correction.config import REDUCTIONS, CorrectionConfig, Gate, HookLevel
from mis_ext.files import preset_path, read_yaml
from mis_ext.keys.reading import config_from_mapping, read_config, says_whole_loss
from mis_ext.keys.rows import GATE_ROWS, VETOES
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import as_correction
from mis_ext.methods.method import Method
from mis_ext.methods.published import PublishedMethod
from mis_ext.validation import errors_of

NO_CORRECTION = CorrectionConfig(metrics_only=True, weight=None)
"""Measures, and changes nothing."""


def load_config(path: str | Path) -> CorrectionConfig:
    """The configuration in a YAML file.

    Keys without the prefixes of mis_ext belong to the framework and are ignored.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no mapping, or one of its values is not legal.
        TypeError: A value has the wrong type.
    """
    content = read_yaml(path)
    with errors_of(str(path)):
        return config_from_mapping(content)


def preset(name: str) -> CorrectionConfig:
    """The preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    return load_config(preset_path(name))


@dataclass(frozen=True, kw_only=True)
class Spelt:
    """The content of a configuration file, and facts about the method in it.

    Attributes:
        config: The correction.
        loss: The full policy loss, with flags of the framework from the file; None without a key of the loss.
        said: Warnings of reading it.
        about: Facts about a published method, by title; empty without one.
    """

    config: CorrectionConfig
    loss: LossSettings | None = None
    said: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)


def read_file(path: str | Path) -> Spelt:
    """Read a YAML file: a correction, and with a key of the full policy loss that loss.

    With ``mis_loss_method`` keys of a correction need ``use_tis: true`` in the file.
    """
    content = read_yaml(path)
    with errors_of(str(path)):
        return _spelt(content)


def read_method(row: PublishedMethod) -> Spelt:
    """The content of :func:`method_yaml` for this row."""
    flags, keys = _flags_and_keys(row)
    return dataclasses.replace(_spelt(keys), about=_about(row, flags, method=row.method, parameters={}))


def _spelt(content: dict[str, Any]) -> Spelt:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = read_config(content, whole_loss=says_whole_loss(content))
    said = tuple(dict.fromkeys(str(each.message) for each in caught))
    if run.whole_loss is None:
        return Spelt(config=run.correction, said=said)
    loss, chosen = run.whole_loss.settings, run.whole_loss.settings.method
    if chosen is None:
        return Spelt(config=run.correction, loss=loss, said=said)
    config = run.correction if run.whole_loss.has_correction else NO_CORRECTION
    if run.double_correction is not None:
        if config.stops("double_correction"):
            raise ValueError(run.double_correction)
        said += (run.double_correction,)
    row = find_method(chosen.name)
    changed = {name: value for name, value in chosen.parameters if value != row.defaults[name]}
    about = _about(row, _whole_loss_flags(chosen.method), method=chosen.method, parameters=changed)
    return Spelt(config=config, loss=loss, said=said, about=about)


def method_yaml(row: PublishedMethod) -> str:
    """A file that runs a method with its defaults: keys of a correction if they can express it, else of the loss."""
    flags, keys = _flags_and_keys(row)
    remarks = _remarks(row, flags)
    if "use_tis" in keys and any(gate.action == "reject" for gate in config_from_mapping(keys).all_gates.values()):
        remarks["Denominator"] = "rejected tokens count in the framework's; mis_denominator: kept removes them."
    comment = "\n".join(
        textwrap.fill(f"{title}: {text}", 118, break_on_hyphens=False) for title, text in remarks.items()
    )
    return f"{textwrap.indent(comment, '# ')}\n{keys_as_yaml(keys)}"


def keys_as_yaml(keys: Mapping[str, Any]) -> str:
    """Keys as YAML, a line for each; the innermost mappings and lists are in one line too."""
    is_block = {key: None if isinstance(value, (dict, list)) else False for key, value in keys.items()}
    return "".join(
        yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=is_block[key], width=120)
        for key, value in keys.items()
    )


def flat_keys(config: CorrectionConfig) -> dict[str, Any]:
    """The keys of ``config``, without those at their default.

    Raises:
        ValueError: It measures only, for which the framework has flags.
    """
    if config.metrics_only:
        raise ValueError("metrics_only is spelled use_tis: false")
    weight, default = config.weight, CorrectionConfig()
    keys: dict[str, Any] = {"use_tis": True, "tis_level": "none"}
    if weight is not None:
        of_weight = {"level": weight.level, "mode": weight.mode, "lower_bound": weight.low, "upper_bound": weight.high}
        keys |= {f"tis_{name}": value for name, value in of_weight.items() if value is not None}
        keys |= {"tis_when": weight.when} if weight.when != "always" else {}
    keys |= _keys_of_gates(config.gates)
    if config.normalize_over is not None:
        keys["tis_batch_normalize"] = True
        # If nothing is rejected both words mean the same, and valid is refused.
        if config.gates or (weight is not None and weight.bound.rejects):
            keys["tis_normalize_over"] = config.normalize_over
    if config.is_scaled and config.scope != "data_parallel":
        keys["tis_normalize_scope"] = config.scope
    for name in ("denominator", "staleness", "metric_max", "max_reject_fraction", "metrics", "compile"):
        value = getattr(config, name)
        if value != getattr(default, name):
            keys[f"mis_{name}"] = list(value) if isinstance(value, tuple) else value
    if config.warn_only:
        keys["mis_guard"] = dict.fromkeys(sorted(config.warn_only), "warn")
    return keys


def _keys_of_gates(gates: Sequence[Gate]) -> dict[str, Any]:
    """Keys of the filters, in their order: ``rs_gates`` for those without a key of their own."""
    fields = [field for field in dataclasses.fields(Gate) if field.name in GATE_ROWS]
    rest = [
        {"statistic": gate.statistic, "reduce": gate.reduce}
        | {field.name: getattr(gate, field.name) for field in fields if getattr(gate, field.name) != field.default}
        for gate in gates
    ]
    vetoes: dict[str, Any] = {}
    for name, (statistic, reduce, bound) in reversed(VETOES.items()):
        last = rest[-1] if rest else {}
        if bound in last and last == {"statistic": statistic, "reduce": reduce, bound: last[bound]}:
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


def _flags_and_keys(row: PublishedMethod) -> tuple[str, dict[str, Any]]:
    """The framework's flags for a method with its defaults, and the keys of its file."""
    try:
        found = as_correction(row.method)
    except ValueError:
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in row.defaults.items()}
        return _whole_loss_flags(row.method), {"mis_loss_method": {"name": row.name} | values}
    dual = "" if found.dual is None else f" --eps-clip-c {found.dual:g}"
    flags = (
        "--use-tis --custom-tis-function-path mis_ext.compute_mis_weights_with_cp "
        f"--eps-clip {found.low:g} --eps-clip-high {found.high:g}{dual}"
    )
    return flags, flat_keys(found.config)


def _whole_loss_flags(method: Method) -> str:
    flags = ["--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"]
    if "proximal" not in method.policies:
        flags.append("--use-rollout-logprobs")
    if "reference" in method.policies:
        flags.append("--use-kl-loss --kl-loss-coef 0 --ref-load MODEL")
    return " ".join(flags)


def _remarks(row: PublishedMethod, flags: str) -> dict[str, str]:
    remarks = {
        "What": " ".join(row.text.partition("\n\n")[0].split()),
        "Formula": row.formula,
        "Source": row.paper,
        "Flags": flags,
    }
    if row.method.needs_state_values:
        remarks["Needs"] = "state_values in the batch of make_loss_func; slime and Miles have none."
    return remarks


def _about(row: PublishedMethod, flags: str, *, method: Method, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Facts about a method with its parameters."""
    changed = [f"{name}={value} (default {row.defaults[name]})" for name, value in parameters.items()]
    more = {"Parameters": ", ".join(changed) or "the defaults", "Log-probs": ", ".join(method.policies)}
    return _remarks(row, flags) | more
