# SPDX-License-Identifier: Apache-2.0
"""What `mis-ext check-rollouts` shows is what its JSON has."""

import re

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("transformers")

from conversations import call
from rollout_logs import every_case, genuine, logged, main, report_of, write

pytestmark = pytest.mark.usefixtures("wide_terminal")


def test_what_is_shown_is_what_the_json_has(tmp_path, capsys, tokenizer_folder) -> None:
    rows = [*every_case(), genuine("generate_abort"), "{", logged("kept", call("kept", [3], [7, 8]), text="?")]
    path = write(tmp_path, *rows)
    arguments = (path, "--tokenizer", tokenizer_folder, "--policy", "split")
    report = report_of(*arguments)
    assert main(*arguments) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    for reason in report["reasons"]:
        assert re.search(rf"^because +{reason} *$", shown, re.MULTILINE)
    for name in ("conversations", "calls", "sampled_tokens"):
        assert re.search(rf"^{name.replace('_', ' ')} +{report[name]} *$", shown, re.MULTILINE)
    for table in ("refused", "boundaries", "texts"):
        assert report[table]
        for kind, found in report[table].items():
            cells = rf"{kind} +│ +{found['count']} +│ +{found['share']:.1%} +│ +{found['failing']} +│"
            assert re.search(cells, shown), cells
            assert f"{path}, line {found['first']['line']}" in shown
    for found in report["boundaries"].values():
        first = found["first"]
        if first["position"] is not None:
            assert f"position {first['position']}: id {first['expected_id']} is known" in shown
            assert f"known: {first['expected_text']!r}" in shown
            assert f"prompt: {first['found_text']!r}" in shown
    policy = report["policy"]
    assert re.search(rf"policy split +{policy['samples']} samples", shown)
    assert re.search(rf"trained tokens +{policy['trained_tokens']} ", shown)
    assert re.search(rf"dropped tokens +{policy['dropped_tokens']} ", shown)
    assert re.search(f"actions +.*split {policy['actions']['split']}", shown)


def test_names_from_a_log_are_neither_markup_nor_control_sequences(tmp_path, capsys) -> None:
    row = genuine("generate_abort", conversation="[red]\x1b[2J\ud800", request_id="[bold]\x1b")
    refused = {"conversation": "a", "request": {}, "response": {"error": "[blue]\x1b[3J\ud800"}}
    for each in (row, refused):
        main(write(tmp_path, each))
    shown = capsys.readouterr().out
    assert "[blue]\\x1b[3J\\ud800" in shown
    assert "[red]\\x1b[2J\\ud800" in shown
    assert "[bold]" in shown
    assert "\x1b" not in shown
