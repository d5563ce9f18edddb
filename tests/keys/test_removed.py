# SPDX-License-Identifier: Apache-2.0
"""What 0.6 removed is refused where a user would write it."""

from functools import reduce

import pytest

import mis_ext
from mis_ext.files import list_presets
from mis_ext.keys.removed import REMOVED
from mis_ext.tools import cli


def use(name: str, capsys) -> None:
    if name.startswith("preset "):
        mis_ext.preset(name.removeprefix("preset "))
    elif name.startswith("mis_ext."):
        getattr(mis_ext, name.removeprefix("mis_ext."))
    elif name.startswith(("-", "mis-ext ")):
        with pytest.raises(SystemExit):
            cli.main([name.removeprefix("mis-ext ")])
        raise ValueError(capsys.readouterr().err)
    elif name.startswith("mis_") and name != "mis_loss_compile":
        mis_ext.config_from_mapping({"use_tis": True, "mis_metrics": [name]})
    else:
        keys, _, value = name.partition(": ")
        content = reduce(
            lambda inner, key: {key: [inner] if key.endswith("gates") else inner}, keys.split(".")[::-1], value or 1
        )
        mis_ext.config_from_mapping({"use_tis": True, **content})


@pytest.mark.parametrize("name", REMOVED)
def test_one_error_names_the_version_and_what_to_write(name, capsys) -> None:
    with pytest.raises((ValueError, AttributeError)) as error:
        use(name, capsys)
    assert f"{name} was removed in mis_ext 0.6: {REMOVED[name]}" in str(error.value)


def test_what_is_left_is_not_in_the_table() -> None:
    names = {f"preset {name}" for name in list_presets()} | {f"mis_ext.{name}" for name in mis_ext.__all__}
    assert not {*REMOVED} & names
