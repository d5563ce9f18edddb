"""The YAML files that ship, and what each says about itself in its first lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mis_ext.validation import nearest

_FOLDER = Path(__file__).parents[1] / "_presets"


class PresetRemarks(NamedTuple):
    """What a preset does, when to take it, and whose method it is."""

    what: str
    when: str
    source: str


def list_presets() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The file of the preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    names = list_presets()
    if name not in names:
        raise ValueError(f"no preset {name!r}: {nearest(name, names)}; mis-ext presets lists all")
    return _FOLDER / f"{name}.yaml"


def preset_text(name: str) -> str:
    """The file of the preset called ``name``, as it is.

    Raises:
        ValueError: There is no such preset.
    """
    return preset_path(name).read_text(encoding="utf-8")


def preset_remarks(name: str) -> PresetRemarks:
    """What the preset called ``name`` says about itself.

    Raises:
        ValueError: There is no such preset.
    """
    return PresetRemarks(*re.findall(r"^# (?:What|When|Source): (.*)$", preset_text(name), flags=re.MULTILINE))
