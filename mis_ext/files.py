# SPDX-License-Identifier: Apache-2.0
"""Files and texts of users: safe reading, atomic writing, and text for the terminal.

Also the YAML files of the presets, with the remarks in their first lines.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import stat
import textwrap
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mis_ext.validation import did_you_mean

_MAX_YAML_BYTES = 1 << 20
_MAX_YAML_NODES = 100_000


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a regular file. A pipe could block forever, and some devices never end: raise an error."""
    path = Path(path)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise ValueError(f"{path}: is {what}, not a regular file")
    return path


class _Loader(yaml.SafeLoader):
    """A loader that rejects duplicate keys. YAML's own loader silently keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    size = regular_file(path).stat().st_size
    if size > _MAX_YAML_BYTES:
        raise ValueError(f"{path}: has {size:,} bytes; a configuration may have at most {_MAX_YAML_BYTES:,}")
    try:
        content: Any = yaml.load(Path(path).read_bytes().decode("utf-8"), _Loader)
        num_nodes = _num_nodes(content, {})
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as YAML: {reason}") from None
    if num_nodes > _MAX_YAML_NODES:
        raise ValueError(f"{path}: its aliases expand to more than {_MAX_YAML_NODES:,} values")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of keys to values, got {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):
            raise ValueError(f"{path}: expected names as keys, got {key!r} of type {type(key).__name__}")
    return content


def _num_nodes(value: Any, known: dict[int, int]) -> int:
    """Count the values; the values of an alias count once per use."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = _MAX_YAML_NODES + 1  # While it is counted: a value that contains itself is endless.
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_nodes(part, known) for part in parts)
    return known[id(value)]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, as UTF-8: first to a temporary file in the same folder, which is then renamed.

    A path that is not a regular file, such as ``/dev/stdout``, is written directly.

    Raises:
        OSError: It cannot be written. The previous content stays.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def printable(text: str) -> str:
    """The text with control characters and unprintable characters escaped; line breaks stay."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def hanging(label: str, text: str) -> str:
    """A label and a text, wrapped to the terminal, at most 80 columns. All lines of the text begin after the label."""
    return textwrap.fill(
        text,
        min(80, shutil.get_terminal_size().columns),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def to_jsonable(value: Any) -> Any:
    """Dataclasses, named tuples and tensors as dicts and lists; NaN becomes None, and infinity a string."""
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_jsonable(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return to_jsonable(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


_PRESETS = Path(__file__).parent / "_presets"


class PresetRemarks(NamedTuple):
    """The remarks of a preset: its effect, its use, and its source."""

    what: str
    when: str
    source: str


def list_presets() -> tuple[str, ...]:
    """List the names of the presets."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The file of the preset called ``name``."""
    names = list_presets()
    if name not in names:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, names)}. Run mis-ext presets to list all")
    return _PRESETS / f"{name}.yaml"


def preset_text(name: str) -> str:
    """The text of the file of the preset called ``name``."""
    return preset_path(name).read_text(encoding="utf-8")


def preset_remarks(name: str) -> PresetRemarks:
    """Read the remarks at the top of the file of the preset ``name``."""
    return PresetRemarks(*re.findall(r"^# (?:What|When|Source): (.*)$", preset_text(name), flags=re.MULTILINE))
