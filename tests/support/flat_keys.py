# SPDX-License-Identifier: Apache-2.0
"""The flat keys of a user, as text."""

import yaml

from mis_ext import CorrectionConfig, config_from_mapping


def from_yaml(text: str) -> CorrectionConfig:
    """The configuration that a YAML file of this text gives."""
    return config_from_mapping(yaml.safe_load(text))
