"""What a caller gives for a configuration: the object, a mapping that spells it, or the path of a YAML file."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mis_ext.correction.config import CorrectionConfig
from mis_ext.files import read_yaml
from mis_ext.keys.flat import config_from_mapping
from mis_ext.loss.settings import LOSS_KEYS

Keys = Mapping[str, Any] | str | Path


def read_keys(keys: Keys) -> dict[str, Any]:
    """The keys themselves, or those in the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no mapping.
        TypeError: They are no mapping.
    """
    found: Any = read_yaml(keys) if isinstance(keys, (str, Path)) else keys
    if not isinstance(found, Mapping):
        raise TypeError(f"{keys}: expected a mapping of keys to values, got {type(found).__name__}")
    return dict(found)


def says_whole_loss(keys: Mapping[str, Any]) -> bool:
    """Whether a key is of the whole loss, not of the correction alone."""
    return any(keys.get(key) is not None for key in LOSS_KEYS)


def kept_keys(keys: Keys, **more: Any) -> dict[str, Any]:
    """``keys`` and ``more``: for the same ones the same object, by which sessions know a run."""
    return _kept(json.dumps(keys if isinstance(keys, str) else {**read_keys(keys)}), json.dumps(more))


@functools.lru_cache(maxsize=64)
def _kept(keys: str, more: str) -> dict[str, Any]:
    return {**read_keys(json.loads(keys)), **json.loads(more)}


def config_given(config: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """``config`` itself, or what a mapping spells in flat keys or under ``mis:``.

    Raises:
        ValueError: A key of the mapping is unknown, or its value is out of range.
        TypeError: It is neither, or a value of the mapping has the wrong type.
    """
    if isinstance(config, CorrectionConfig):
        return config
    if isinstance(config, Mapping):
        return config_from_mapping(config)
    hint = "; of an argparse namespace give vars(args)" if hasattr(config, "__dict__") else ""
    raise TypeError(f"config must be a CorrectionConfig or a mapping of keys, got {type(config).__name__}{hint}")
