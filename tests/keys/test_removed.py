# SPDX-License-Identifier: Apache-2.0
"""What 0.6 removed is refused where a file has it."""

from typing import Any

import pytest

import mis_ext
from mis_ext.keys.rows import REMOVED


def file_with(name: str) -> dict[str, Any]:
    if name.startswith("rs_gates."):
        key, _, value = name.removeprefix("rs_gates.").partition(": ")
        return {"use_rs": True, "rs_gates": [{"high": 2.0}, {key: value or 1}]}
    return {name: True} if name.startswith("mis_loss_") else {"mis_metrics": ["mis_kl", name]}


@pytest.mark.parametrize("name", REMOVED)
def test_one_error_names_the_version_and_what_to_write(name) -> None:
    with pytest.raises(ValueError, match=r"0\.6") as error:
        mis_ext.config_from_mapping({"use_tis": True, **file_with(name)})
    assert str(error.value) == f"{name} was removed in mis_ext 0.6: {REMOVED[name]}"


def test_other_wrong_keys_of_the_filter_are_named_too() -> None:
    with pytest.raises(ValueError, match=r"rs_gates\.level was removed.*\n.*rs_gates\[0\]: 'hihg'"):
        mis_ext.config_from_mapping({"use_rs": True, "rs_gates": [{"level": "token", "hihg": 2.0}]})
