"""Configurations from files: a YAML of the user's, or one of the presets that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mis_ext.checks import did_you_mean
from mis_ext.correction.config import CorrectionConfig
from mis_ext.hosts.slime_miles.flat_keys import config_from_mapping

_PRESETS = Path(__file__).parent / "_presets"


def load_config(path: str | Path) -> CorrectionConfig:
    """The configuration that a YAML file spells, in flat or native form.

    Keys outside our prefixes are the host's and are ignored, as the hosts set every key of the file on their ``args``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a mapping, or one of its values is not legal.
        TypeError: A value has the wrong type.
    """
    content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of keys to values, got {type(content).__name__}")
    try:
        return config_from_mapping(content)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from None


def list_presets() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def preset(name: str) -> CorrectionConfig:
    """The preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    return load_config(preset_path(name))


def preset_path(name: str) -> Path:
    """The file of the preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    names = list_presets()
    if name not in names:
        raise ValueError(f"no preset {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
    return _PRESETS / f"{name}.yaml"
