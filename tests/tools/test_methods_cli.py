# SPDX-License-Identifier: Apache-2.0
"""`mis-ext methods`: the list, and all that is said about one."""

import re

import pytest
from rows import for_each

from mis_ext.methods import METHODS, Method, find_method
from mis_ext.methods.catalogue import describe_method
from mis_ext.methods.published import SYMBOLS
from mis_ext.tools.cli import main


def test_the_list_names_every_method_with_its_objective(capsys) -> None:
    assert main(["methods"]) == 0
    lines = re.sub(r"\n {10,}", " ", capsys.readouterr().out).splitlines()
    for name, row in METHODS.items():
        assert any(line.split()[:1] == [name] and line.endswith(row.formula) for line in lines)


@for_each("name", METHODS)
def test_each_method_says_when_to_use_it_what_is_claimed_and_what_speaks_against_it(name, capsys) -> None:
    assert main(["methods", name]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for part in ("When: ", "Claims: ", "Counter-claims: ", "objective:", "parameters:", "log-probs:", "source:"):
        assert text.count(part) == 1, part
    row = METHODS[name]
    assert re.search(r"arXiv:\d{4}\.\d{5}|\b(19|20)\d\d\b|\(code\)", row.paper)
    assert isinstance(row.method, Method)
    assert all(f"{key}=" in text for key in row.defaults)
    assert row.method == row()
    assert hash(row.method) == hash(row())


def test_no_list_is_wider_than_a_terminal(capsys) -> None:
    for command in ("methods", "presets"):
        assert main([command]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@for_each("row", METHODS.values())
def test_the_lines_of_a_method_are_its_words_in_their_order(row) -> None:
    words = " ".join(describe_method(row).split())
    for text in (row.text, row.formula, row.paper, SYMBOLS):
        assert " ".join(text.split()) in words
    # What is a line of its own stays one.
    for label in ("When: ", "Claims: ", "Counter-claims: "):
        assert f"\n{label}" in describe_method(row)


def test_a_misspelt_method_gets_the_nearest(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["methods", "gsop"])
    assert caught.value.code == 2
    assert "no method 'gsop': the nearest is gspo; " in capsys.readouterr().err
    with pytest.raises(ValueError, match="no method 'gsop'"):
        find_method("gsop")
