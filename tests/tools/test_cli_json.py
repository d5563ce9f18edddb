# SPDX-License-Identifier: Apache-2.0
"""`--json`: every command prints one document, with the numbers that it shows people, and needs nothing to show.

And what the command tells a shell."""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import json_of
from rollout_logs import genuine, good, write
from tiny_decoder import TinyDecoder, packed, planted, recording_of

from mis_ext.tools.cli import main

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Command:
    """What to run in a folder, the exit code, and whether a text says what the document does."""

    arguments: Callable[[Path], list[object]]
    code: int
    says: Callable[[dict[str, Any], str], bool] | None


def dump(folder: Path) -> Path:
    rows = [
        {"log_probs": [-0.5, -1.0, -2.0], "rollout_log_probs": [-0.5, -1.25, -2.0], "rollout_id": step, "group_id": 0}
        for step in range(2)
    ]
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recordings(folder: Path) -> list[object]:
    model = TinyDecoder()
    recording_of(model, packed()).save(folder / "a.pt")
    with planted(model.layers[1].attention.core, (0, 6, 2)):
        recording_of(model, packed()).save(folder / "b.pt")
    return ["diff", folder / "a.pt", folder / "b.pt"]


def verl(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text("rollout_is: token\nrollout_is_threshold: 3.0\n")
    return path


def one_line(text: str) -> str:
    return " ".join(text.split())


def says_explain(found: dict[str, Any], text: str) -> bool:
    numbers = [each[name] for each in found["at_lengths"] for name in ("ess_token", "kept_tokens")]
    return all(f"{number:.3f}" in text for number in numbers) and all(step["name"] in text for step in found["steps"])


def says_diff(found: dict[str, Any], text: str) -> bool:
    (core,) = (module for module in found["modules"] if module["name"] == found["first_divergent"])
    place = f"sequence {core['first']['sequence']}, position {core['first']['position']}"
    return f"first divergence: {core['name']} ({place})" in text and found["verdict"] in text


def says_check(found: dict[str, Any], text: str) -> bool:
    numbers = (f" {name.replace('_', ' ')} {found[name]} " for name in ("conversations", "calls", "sampled_tokens"))
    return all(number in one_line(text) for number in numbers) and found["reasons"][0] in text


COMMANDS = {
    "audit": Command(
        lambda folder: ["audit", dump(folder)],
        1,
        lambda found, text: found["verdict"] in text and f" different tokens {found['num_nonzero']} " in one_line(text),
    ),
    "report": Command(
        lambda folder: ["report", dump(folder), "--against", dump(folder), "--preset", "mis"],
        0,
        # It draws pictures: test_report_against.py asks it for a text. What is None below has a test of its own.
        None,
    ),
    "explain": Command(lambda folder: ["explain", "mis"], 0, says_explain),
    "diff": Command(recordings, 1, says_diff),
    "check-rollouts": Command(
        lambda folder: ["check-rollouts", write(folder, *good(), genuine("generate_abort"))],
        1,
        says_check,
    ),
    "presets": Command(lambda folder: ["presets"], 0, None),
    "presets NAME": Command(lambda folder: ["presets", "mis"], 0, lambda found, text: found["yaml"] == text),
    "keys": Command(lambda folder: ["keys"], 0, None),
    "keys NAME": Command(
        lambda folder: ["keys", "mis_loss_constant"],
        0,
        lambda found, text: found[0]["key"] in text and found[0]["legal"] in text,
    ),
    "schema": Command(lambda folder: ["schema"], 0, lambda found, text: found == json.loads(text)),
    "methods": Command(lambda folder: ["methods"], 0, None),
    "methods NAME": Command(lambda folder: ["methods", "vaco"], 0, None),
    "methods NAME --yaml": Command(
        lambda folder: ["methods", "vaco", "--yaml"], 0, lambda found, text: found["yaml"] == text
    ),
    "convert": Command(lambda folder: ["convert", "verl", verl(folder)], 0, None),
}


@pytest.fixture(params=COMMANDS)
def command(request) -> Command:
    return COMMANDS[request.param]


def test_every_command_is_here(monkeypatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self: parsers.append(self))
    assert main([]) == 0
    (commands,) = (action for action in parsers[0]._actions if action.dest == "command")
    assert {*commands.choices} == {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("command", [name for name, each in COMMANDS.items() if each.says], indirect=True)
def test_the_document_says_what_the_text_says_with_the_same_exit_code(command, tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    arguments = command.arguments(tmp_path)
    code, found = json_of(*arguments)
    assert code == command.code
    capsys.readouterr()
    assert main([*map(str, arguments)]) == command.code
    assert command.says(found, capsys.readouterr().out)


FILES = ("presets NAME", "schema", "methods NAME --yaml", "convert")
"""What prints a file, whose lines stay as they are."""


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in FILES], indirect=True)
def test_a_narrow_terminal_shows_all_that_a_wide_one_shows(command, tmp_path, capsys, monkeypatch) -> None:
    for module in ("rich", "jinja2"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    arguments = [*map(str, command.arguments(tmp_path))]
    shown = {}
    for columns in (200, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(arguments) == command.code
        shown[columns] = capsys.readouterr().out
    assert max(map(len, shown[60].splitlines())) <= 60
    assert "…" not in shown[60]
    wide, narrow = (Counter(filter(str.isalnum, text)) for text in shown.values())
    assert not wide - narrow


def test_a_document_needs_neither_rich_nor_jinja2(command, tmp_path, monkeypatch) -> None:
    arguments = command.arguments(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.iterdir()}
    for module in ["rich", "jinja2", *sys.modules]:
        if module.split(".")[0] in ("rich", "jinja2"):
            monkeypatch.setitem(sys.modules, module, None)
    assert json_of(*arguments)[0] == command.code
    # Without --out a document is all that is asked for.
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["audit", "report", "diff", "check-rollouts", "explain"])
def test_without_rich_the_error_says_that_a_document_does_not_need_it(name, tmp_path, capsys, monkeypatch) -> None:
    arguments = COMMANDS[name].arguments(tmp_path)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, arguments)])
    assert capsys.readouterr().err == f"mis-ext {name}: needs rich: pip install rich, or use --json\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "none.pt"],
        ["report", "none.pt"],
        ["explain", "none"],
        ["diff", "none.pt", "none.pt"],
        ["check-rollouts", "none.jsonl"],
        ["presets", "none"],
        ["methods", "none"],
        ["methods", "--yaml"],
        ["convert", "verl", "none.yaml"],
    ],
    ids=" ".join,
)
def test_an_error_is_one_line_on_standard_error_and_nothing_on_standard_output(arguments, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--json"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"mis-ext {arguments[0]}: ")
    assert printed.err.count("\n") == 1


def test_what_was_not_measured_is_null(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"log_probs": [-1.0], "rollout_log_probs": [-2000.0]}\n')
    overall = json_of("report", path)[1]["summary"]["overall"]
    assert (overall["reward"], overall["k3_error"], overall["num_prompts"]) == (None, None, 1)
    assert overall["abs_max"] == 1999.0


def test_the_command_alone_prints_its_commands(capsys) -> None:
    assert main([]) == 0
    assert "check-rollouts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reprot", "x"], "mis-ext: error: unknown command 'reprot' (did you mean 'report'?)"),
        (
            ["report", "x", "--tokenzer", "y"],
            "mis-ext report: error: unrecognized arguments: --tokenzer (did you mean",
        ),
    ],
)
def test_a_slip_names_what_is_nearest_with_the_usage_of_its_command(arguments, said, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
