# SPDX-License-Identifier: Apache-2.0
"""`mis-ext check-rollouts` on genuine responses, on conversations of every class of boundary, and on broken logs."""

import gzip
import json
import os
import re
import threading
from typing import Any

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("transformers")

from conversations import CASES, QUESTION, call
from responses import FOLDER, recorded, vllm_chat, vllm_completions
from rollout_logs import case_rows, error_of, every_case, genuine, good, logged, main, report_of, write
from tiny_tokenizers import TURN_END, encode, english_tokenizer, render

pytestmark = pytest.mark.usefixtures("wide_terminal")


GENUINE = (
    *("generate_length", "generate_stop_token", "generate_stop_string", "generate_two_versions"),
    *("chat_meta_info", "completions_token_ids"),
)
HARMLESS = ("contiguous", "truncated_and_closed", "retry", "duplicate", "empty_generation")


def test_genuine_responses_pass(tmp_path, capsys) -> None:
    path = write(tmp_path, *map(genuine, GENUINE))
    report = report_of(path, "--tokenizer", FOLDER / "tokenizer.json")
    assert (report["passed"], report["reasons"], report["files"]) == (True, [], [str(path)])
    assert (report["conversations"], report["calls"], report["boundaries"]) == (6, 6, {})
    assert report["sampled_tokens"] == sum(
        recorded(name)[1]["meta_info"]["completion_tokens"]
        if "meta_info" in recorded(name)[1]
        else recorded(name)[1]["usage"]["completion_tokens"]
        for name in GENUINE
    )
    assert sum(found["count"] for found in report["texts"].values()) == 6
    assert main(path, "--tokenizer", FOLDER / "tokenizer.json") == 0
    assert "PASSED" in capsys.readouterr().out


def test_responses_of_vllm_are_read(tmp_path) -> None:
    rows = []
    for format, (request, response) in (("vllm-chat", vllm_chat()), ("vllm-completions", vllm_completions())):
        unknown = dict.fromkeys(("request_id", "text", "choice"))
        rows.append({"conversation": format, "format": format, "request": request, "response": response} | unknown)
    assert report_of(write(tmp_path, *rows))["sampled_tokens"] == 7


@pytest.mark.parametrize("name", CASES)
def test_only_a_conversation_with_the_ids_that_were_sampled_passes(tmp_path, tokenizer_folder, name) -> None:
    path = write(tmp_path, *case_rows(name, CASES[name](english_tokenizer())))
    assert main(path, "--tokenizer", tokenizer_folder) == (0 if name in HARMLESS else 1)


def test_branches_of_a_conversation_pass_whoever_they_go_on_from(tmp_path, tokenizer_folder) -> None:
    answers = [call(str(n), [7], [8 + n]) for n in range(3)]
    later = [call("3", [7, 9, 1, 5], [20]), call("4", [7, 9, 2, 5], [21]), call("5", [7, 8, 3], [22])]
    path, samples = write(tmp_path, *(logged("a", each) for each in [*answers, *later])), tmp_path / "samples.jsonl"
    report = report_of(path, "--tokenizer", tokenizer_folder, "--policy", "split", "--samples", samples)
    found = {kind: (each["count"], each["failing"]) for kind, each in report["boundaries"].items()}
    assert found == {"retry": (2, 0), "contiguous": (2, 0), "fork": (1, 0)}
    assert report["passed"]
    paths = [json.loads(line)["tokens"] for line in samples.read_text().splitlines()]
    assert paths == [[7, 10], [7, 9, 1, 5, 20], [7, 9, 2, 5, 21], [7, 8, 3, 22]]


def test_without_a_tokenizer_a_mismatch_fails_and_has_no_text(tmp_path) -> None:
    report = report_of(write(tmp_path, *case_rows("a", CASES["retokenized"](english_tokenizer()))))
    (found,) = report["boundaries"].items()
    assert (found[0], found[1]["failing"], found[1]["first"]["expected_text"]) == ("different", 1, None)


def test_choices_of_one_response_are_read_one_by_one(tmp_path) -> None:
    rows = [genuine("chat_two", conversation=str(i), choice=i) for i in range(2)]
    assert report_of(write(tmp_path, *rows))["sampled_tokens"] == 6
    assert (
        "choice" in report_of(write(tmp_path, genuine("chat_two")))["refused"]["MalformedResponse"]["first"]["message"]
    )


TRAINED = {
    # By policy: samples, and which of the two calls' tokens are trained.
    "contiguous": {"strict": (1, 3), "split": (1, 3)},
    "retokenized": {"strict": (0, 0), "split": (2, 3)},
}


@pytest.mark.parametrize("policy", ["strict", "split"])
@pytest.mark.parametrize("name", ["contiguous", "retokenized"])
def test_a_policy_trains_and_drops_and_the_samples_are_written(tmp_path, tokenizer_folder, name, policy) -> None:
    case = CASES[name](english_tokenizer())
    path, samples = write(tmp_path, *case_rows(name, case)), tmp_path / "samples.jsonl"
    number, which = TRAINED[name][policy]
    report = report_of(path, "--tokenizer", tokenizer_folder, "--policy", policy, "--samples", samples)
    lengths = [len(each.sampled_ids) for each in case.calls]
    tokens = sum(length for i, length in enumerate(lengths) if which >> i & 1)
    found = report["policy"]
    assert (found["name"], found["samples"]) == (policy, number)
    assert (found["trained_tokens"], found["dropped_tokens"]) == (tokens, sum(lengths) - tokens)
    written = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [each["conversation"] for each in written] == [name] * number
    assert sum(sum(each["loss_mask"]) for each in written) == tokens
    assert list(report["boundaries"]) == [case.kind]


def test_a_conversation_that_the_policy_refuses_fails_even_if_it_is_harmless(tmp_path, capsys) -> None:
    path = write(tmp_path, *case_rows("again", CASES["retry"](english_tokenizer())), *good())
    assert main(path) == 0
    report = report_of(path, "--policy", "strict")
    assert report["reasons"] == ["1 conversations are refused by policy strict"]
    assert report["policy"]["errors"]["strict"]["first"]["conversation"] == "again"
    assert report["policy"]["samples"] == 1
    assert "the prompt ends" in capsys.readouterr().out


TEXTS = {
    "It is mild.": ("stop_trimmed", True),
    f"It is mild.{TURN_END}": ("exact", True),
    "It is": ("prefix_truncated", False),
    "is mild.": ("prefix_removed", False),
    "It is mild. Yes.": ("suffix_added", False),
    "It was mild.": ("edited", False),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_that_an_agent_kept_is_compared_with_what_was_sampled(
    tmp_path, capsys, tokenizer_folder, text
) -> None:
    tokenizer = english_tokenizer()
    kind, passes = TEXTS[text]
    generation = call("a", render(tokenizer, QUESTION), encode(tokenizer, f"It is mild.{TURN_END}"))
    path = write(tmp_path, logged("a", generation, text=text))
    report = report_of(path, "--tokenizer", tokenizer_folder)
    assert {kind: found["count"] for kind, found in report["texts"].items()} == {kind: 1}
    assert report["passed"] is passes
    cure = report["texts"][kind]["first"]["cure"]
    assert bool(cure) is (kind != "exact")
    main(path, "--tokenizer", tokenizer_folder)
    assert cure in capsys.readouterr().out
    unchecked = report_of(path)
    assert unchecked["reasons"] == ["1 texts were not compared with the sampled ids: give --tokenizer"]
    assert unchecked["texts"] == {}


def test_stop_strings_of_the_request_explain_a_text_that_ends_before_them(tmp_path, tokenizer_folder) -> None:
    tokenizer = english_tokenizer()
    row = logged(
        "a", call("a", render(tokenizer, QUESTION), encode(tokenizer, "It is mild.\nuser")), text="It is mild."
    )
    for parameters in ({"sampling_params": {"stop": "\nuser"}}, {"stop": ["x", "\nuser"]}):
        path = write(tmp_path, row | {"request": row["request"] | parameters})
        assert list(report_of(path, "--tokenizer", tokenizer_folder)["texts"]) == ["stop_trimmed"]
    assert list(report_of(write(tmp_path, row), "--tokenizer", tokenizer_folder)["texts"]) == ["prefix_truncated"]


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
    assert next(iter(report["refused"])) == "AbortedRequest"
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
    "json": ('{"conversation": "a", ', "not JSON: Expecting property name enclosed in double quotes at character 2"),
    "bytes": (b'{"conversation": "\xff"}', "can't decode byte 0xff"),
    "list": ("[1]", "a line must be an object, got a list"),
    "nested": ("[" * 100_000, "recursion"),
    "misspelt": ({"conversaton": "a"}, "unknown keys: 'conversaton' (did you mean 'conversation'?)"),
    "missing": ({"conversation": "a"}, "format and request and response missing"),
    "number": (genuine("generate_text", conversation=7), "conversation must be of type str, got 7"),
    "text": (genuine("generate_text", text=["a"]), "text must be of type str, got ['a']"),
    "choice": (genuine("chat_two", format="sglang-chat", choice=True), "choice must be of type int, got True"),
    "format": (genuine("generate_text", format="slang"), "'slang' (did you mean 'sglang'?)"),
    "format of another type": (genuine("generate_text", format=["sglang"]), "format must be one of sglang |"),
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


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, capsys, name) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    said = error_of(capsys, write(tmp_path, *good()), "--tokenizer", tmp_path / name)
    assert f"--tokenizer {tmp_path / name} cannot be read: " in said


@pytest.mark.parametrize("rows", [(), (genuine("generate_empty"),), (genuine("generate_abort"),)])
def test_a_log_without_a_sampled_token_never_passes(tmp_path, rows) -> None:
    report = report_of(write(tmp_path, *rows))
    assert report["reasons"][0] == "nothing was measured: no sampled token could be read"


def test_a_file_without_a_call_fails_beside_a_good_one(tmp_path, capsys) -> None:
    empty = write(tmp_path, " ", name="empty.jsonl")
    assert main(write(tmp_path, *good()), empty) == 1
    assert "the file has no call" in capsys.readouterr().out


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


def test_conversations_may_be_interleaved_and_spread_over_files_and_compressed(tmp_path, tokenizer_folder) -> None:
    rows = every_case()
    whole = report_of(write(tmp_path, *rows), "--tokenizer", tokenizer_folder)
    parts = [write(tmp_path, *rows[:7], name="1.jsonl"), tmp_path / "2.jsonl.gz"]
    parts[1].write_bytes(gzip.compress(write(tmp_path, *rows[7:], name="2.jsonl").read_bytes()))
    spread = report_of(parts[0], parts[1], "--tokenizer", tokenizer_folder)
    assert counts(spread) == counts(whole)
    apart = sorted(rows, key=lambda row: row["conversation"])
    assert counts(report_of(write(tmp_path, *apart), "--tokenizer", tokenizer_folder)) == counts(whole)
    assert spread["boundaries"]["retry"]["first"]["file"] == str(parts[1])


def counts(report: dict[str, Any]) -> dict[str, Any]:
    tables = {name: {kind: found["count"] for kind, found in report[name].items()} for name in ("boundaries", "texts")}
    return tables | {name: report[name] for name in ("conversations", "calls", "sampled_tokens")}


def test_what_comes_before_the_damage_of_a_compressed_file_is_read(tmp_path) -> None:
    path = tmp_path / "log.jsonl.gz"
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in good()).encode())
    path.write_bytes(whole[:-8])
    report = report_of(path)
    assert report["boundaries"]["contiguous"]["count"] == 1
    assert report["refused"]["LogLineError"]["first"]["line"] == 3
    assert "cannot be decompressed" in report["refused"]["LogLineError"]["first"]["message"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_read(tmp_path) -> None:
    path, rows = tmp_path / "pipe", good()
    os.mkfifo(path)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    report = report_of(path)
    writer.join()
    assert (report["passed"], report["calls"]) == (True, 2)


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
    refused = {"conversation": "a", "format": "sglang", "request": {}, "response": {"error": "[blue]\x1b[3J\ud800"}}
    for each in (row, refused):
        main(write(tmp_path, each))
    shown = capsys.readouterr().out
    assert "[blue]\\x1b[3J\\ud800" in shown
    assert "[red]\\x1b[2J\\ud800" in shown
    assert "[bold]" in shown
    assert "\x1b" not in shown
