# SPDX-License-Identifier: Apache-2.0
"""Limits and defaults that users read of, once more."""

from typing import get_type_hints

import pytest

from mis_ext.keys.loss_keys import WholeLoss
from mis_ext.keys.reading import config_from_mapping
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.published import ChosenMethod


def test_the_types_of_settings_are_found_at_run_time() -> None:
    assert get_type_hints(LossSettings)["method"] == ChosenMethod | None
    assert get_type_hints(WholeLoss)["settings"] is LossSettings


def test_an_unknown_guard_in_a_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="shifted_logprobs"):
        config_from_mapping({"mis_guard": {"shifted_logprobs": "error"}})
