# SPDX-License-Identifier: Apache-2.0
"""`mis-ext check-rollouts`: refused responses, broken lines, logs without a token, wrong usage."""

import json
import sys

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("transformers")

from rollout_logs import error_of, genuine, good, main, report_of, write

pytestmark = pytest.mark.usefixtures("wide_terminal")


def test_refused_responses_are_counted_by_class_with_place_and_message(tmp_path, capsys) -> None:
    broken = good("broken")[0]
    broken["response"]["meta_info"]["completion_tokens"] += 1
    no_ids = good("ids")[0]
    no_ids["request"]["input_ids"][3] = True
    rows = [*good(), genuine("generate_abort"), genuine("generate_error"), broken, no_ids, genuine("generate_text")]
    path = write(tmp_path, *rows)
    report = report_of(path)
    assert {kind: each["count"] for kind, each in report["refused"].items()} == {
        "AbortedRequest": 2,
        "CountMismatch": 1,
        "MalformedResponse": 1,
        "UnprovenTokenIds": 1,
    }
    assert report["refused"]["AbortedRequest"]["first"] == {
        "conversation": "generate_abort",
        "file": str(path),
        "line": 3,
        "message": "request 'aebc6a5b2a264cf89c61a0f446227622': response.meta_info.finish_reason.type is 'abort'",
    }
    assert "prompt_ids[3]" in report["refused"]["MalformedResponse"]["first"]["message"]
    assert report["reasons"] == ["5 lines or responses were refused"]
    assert main(path) == 1
    assert "prompt_ids[3]" in capsys.readouterr().out


def test_a_refused_call_is_left_out_and_the_next_compared_with_the_one_before(tmp_path) -> None:
    first, second = good("a")
    aborted = genuine("generate_abort", conversation="a")
    report = report_of(write(tmp_path, first, aborted, second))
    assert report["boundaries"]["contiguous"]["first"]["line"] == 3
    assert list(report["boundaries"]) == ["contiguous"]


BROKEN = {
    "json": ('{"conversation": "a", ', "no JSON: Expecting property name enclosed in double quotes at character 2"),
    "bytes": (b'{"conversation": "\xff"}', "can't decode byte 0xff"),
    "list": ("[1]", "a line must be an object, got a list"),
    "nested": ("[" * 100_000, "recursion"),
    "misspelt": ({"conversaton": "a"}, "unknown keys: 'conversaton' (did you mean 'conversation'?)"),
    "missing": ({"conversation": "a"}, "request and response missing"),
    "number": (genuine("generate_text", conversation=7), "conversation must be of type str, got 7"),
    "text": (genuine("generate_text", text=["a"]), "text must be of type str, got ['a']"),
    "choice": (genuine("chat_two", format="sglang-chat", choice=True), "choice must be of type int, got True"),
    "format": (genuine("generate_text", format="slang"), "'slang' (did you mean 'sglang'?)"),
    "format of another type": (genuine("generate_text", format=["sglang"]), "format must be one of sglang |"),
    "no format": ({"conversation": "a", "request": {}, "response": {"choices": []}}, "does not prove its format"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_reported_with_its_place_and_the_others_are_read(tmp_path, name) -> None:
    line, message = BROKEN[name]
    line = json.dumps(line) if isinstance(line, dict) else line
    path = tmp_path / "log.jsonl"
    first, second = ((json.dumps(row) + "\n").encode() for row in good())
    path.write_bytes(first + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n" + second)
    report = report_of(path)
    (kind,) = report["refused"]
    found = report["refused"][kind]
    assert (kind, found["count"], found["first"]["file"], found["first"]["line"]) == ("LogLineError", 1, str(path), 3)
    assert message in found["first"]["message"]
    assert report["boundaries"]["contiguous"]["count"] == 1


@pytest.mark.parametrize("rows", [(), (genuine("generate_empty"),), (genuine("generate_abort"),)])
def test_a_log_without_a_sampled_token_never_passes(tmp_path, rows) -> None:
    report = report_of(write(tmp_path, *rows))
    assert report["reasons"][0] == "nothing was measured: no sampled token could be read"


def test_a_file_without_a_call_fails_beside_a_good_one(tmp_path, capsys) -> None:
    empty = write(tmp_path, " ", name="empty.jsonl")
    assert main(write(tmp_path, *good()), empty) == 1
    assert "the file holds no call" in capsys.readouterr().out


def test_wrong_usage_is_named(tmp_path, capsys) -> None:
    path = write(tmp_path, *good())
    assert "--samples needs --policy" in error_of(capsys, path, "--samples", tmp_path / "samples.jsonl")
    assert "none.jsonl" in error_of(capsys, path, tmp_path / "none.jsonl")
    assert "nowhere does not exist" in error_of(capsys, path, "--tokenizer", tmp_path / "nowhere")
    assert "strict" in error_of(capsys, path, "--policy", "loose")
    assert "Is a directory" in error_of(capsys, tmp_path)
    before = path.read_bytes()
    assert "is one of the logs" in error_of(capsys, path, "--policy", "strict", "--samples", path)
    assert path.read_bytes() == before


def test_without_rich_the_error_says_what_to_install(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    message = error_of(capsys, write(tmp_path, *good()))
    assert "needs rich: pip install rich" in message
    assert "--json" in message
