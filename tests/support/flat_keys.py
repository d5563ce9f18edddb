# SPDX-License-Identifier: Apache-2.0
"""Keys of a user, as text, and for a weight and gates."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mis_ext import CorrectionConfig, Weight, config_from_mapping
from mis_ext.keys.reading import flat_keys
from mis_ext.keys.rows import read_gates


def from_yaml(text: str) -> CorrectionConfig:
    """The configuration from a YAML file with this text."""
    return config_from_mapping(yaml.safe_load(text))


def keys_of(
    *, weight: Mapping[str, Any] | None = None, gates: Sequence[Mapping[str, Any]] = (), **more: Any
) -> dict[str, Any]:
    """Keys of a weight and of gates, all without their prefixes."""
    scaling = {name: more.pop(name) for name in ("normalize_over", "scope", "denominator") if name in more}
    parts = None if weight is None else Weight(**weight), read_gates("rs_gates", [*gates])
    keys = flat_keys(CorrectionConfig(weight=parts[0], gates=parts[1], **scaling))
    return keys | {f"mis_{name}": value for name, value in more.items()}
