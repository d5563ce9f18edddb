# SPDX-License-Identifier: Apache-2.0
"""`mis-ext methods`: the list, and all that is said about one."""

import re

from mis_ext.methods import METHODS
from mis_ext.tools.cli import main


def test_the_list_names_every_method_with_its_objective(capsys) -> None:
    assert main(["methods"]) == 0
    lines = re.sub(r"\n {10,}", " ", capsys.readouterr().out).splitlines()
    for name, row in METHODS.items():
        assert any(line.split()[:1] == [name] and line.endswith(row.formula) for line in lines)


def test_no_list_is_wider_than_a_terminal(capsys) -> None:
    for command in ("methods", "presets"):
        assert main([command]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
