"""What a caller gives for a configuration: the object, or a mapping that spells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mis_ext.correction.config import CorrectionConfig
from mis_ext.hosts.slime_miles.flat_keys import config_from_mapping


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
