# SPDX-License-Identifier: Apache-2.0
"""`mis-ext check-rollouts` on genuine responses, and on conversations of every class of boundary."""

import json

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("transformers")

from conversations import CASES, QUESTION, call
from responses import FOLDER, recorded, vllm_chat, vllm_completions
from rollout_logs import case_rows, every_case, genuine, good, logged, main, report_of, write
from tiny_tokenizers import TURN_END, encode, english_tokenizer, render

pytestmark = pytest.mark.usefixtures("wide_terminal")


GENUINE = {
    "generate_length": "sglang",
    "generate_stop_token": "sglang",
    "generate_stop_string": "sglang",
    "generate_two_versions": "sglang",
    "chat_meta_info": "sglang-chat",
    "completions_token_ids": "sglang-completions",
}
HARMLESS = ("contiguous", "truncated_and_closed", "retry", "duplicate", "empty_generation")


def test_genuine_responses_pass_and_their_formats_are_told(tmp_path, capsys) -> None:
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


@pytest.mark.parametrize(("name", "format"), GENUINE.items())
def test_a_format_that_was_told_is_the_one_that_was_recorded(tmp_path, name, format) -> None:
    told = report_of(write(tmp_path, genuine(name)))
    assert told == report_of(write(tmp_path, genuine(name, format=format)))
    assert told["sampled_tokens"] > 0


def test_responses_of_vllm_are_told_from_those_of_sglang(tmp_path) -> None:
    rows = [{"conversation": str(i), "request": a, "response": b} for i, (a, b) in enumerate([vllm_chat()])]
    request, response = vllm_completions()
    rows.append({"conversation": "2", "request": request, "response": {**response, "error": None}})
    assert report_of(write(tmp_path, *rows))["sampled_tokens"] == 7


def test_every_class_of_boundary_is_counted_with_its_first_example(tmp_path, tokenizer_folder) -> None:
    path = write(tmp_path, *every_case())
    report = report_of(path, "--tokenizer", tokenizer_folder)
    cases = {name: make(english_tokenizer()) for name, make in CASES.items()}
    assert {kind: each["count"] for kind, each in report["boundaries"].items()} == {
        kind: sum(case.kind == kind for case in cases.values()) for kind in {case.kind for case in cases.values()}
    }
    assert report["reasons"] == ["2 of 7 turn boundaries have other ids"]
    assert (report["boundaries"]["different"]["share"], report["boundaries"]["different"]["failing"]) == (2 / 7, 2)
    first = report["boundaries"]["different"]["first"]
    known = [*cases["retokenized"].calls[0].prompt_ids, *cases["retokenized"].calls[0].sampled_ids]
    prompt = cases["retokenized"].calls[1].prompt_ids
    position = next(i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b)
    around = slice(position - 8, position + 8)
    # The line of the second call: the seven first ones come before it.
    assert first == {
        "conversation": "retokenized",
        "file": str(path),
        "line": 9,
        "earlier": "first",
        "later": "second",
        "position": position,
        "expected_id": known[position],
        "found_id": prompt[position],
        "expected_text": english_tokenizer().decode(known[around]),
        "found_text": english_tokenizer().decode(prompt[around]),
    }


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
