# SPDX-License-Identifier: Apache-2.0
"""Configurations from files and presets, and keys from configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mis_ext.correction.config import CorrectionConfig
from mis_ext.files import preset_path, read_yaml
from mis_ext.keys.reading import config_from_mapping
from mis_ext.validation import errors_of


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
        values = (of_weight | {"when": weight.when}).items()
        keys |= {f"tis_{name}": value for name, value in values if value not in (None, "always")}
    if config.gates:
        fields = (dataclasses.asdict(gate).items() for gate in config.gates)
        gates = [{key: value for key, value in each if value not in (None, "reject")} for each in fields]
        keys |= {"use_rs": True, "rs_level": "none", "rs_gates": gates}
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
