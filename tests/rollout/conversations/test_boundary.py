# SPDX-License-Identifier: Apache-2.0
"""How the prompt of a call compares with the calls before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")
pytest.importorskip("jinja2", reason="chat templates: pip install jinja2")

from conversations import call
from tiny_tokenizers import TOKENIZERS, encode
from transformers import PreTrainedTokenizerFast

from mis_ext.rollout.builder import build_samples
from mis_ext.rollout.generation import BoundaryError


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def kinds_and_actions(calls, **settings) -> list[tuple[str, str]]:
    built = build_samples(calls, policy="split", **settings)
    return [(each.kind.value, each.action.value) for each in built.boundaries]


def test_the_first_mismatch_is_told_with_both_ids_and_both_texts(tokenizer) -> None:
    end, other = tokenizer.convert_tokens_to_ids(["<think>", "<tool_call>"])
    prompt = encode(tokenizer, "<|im_start|>system\nabc")
    calls = [call("first", [*prompt, end], encode(tokenizer, "yes")), call("second", [*prompt, other, end], [end])]
    (boundary,) = build_samples(calls, policy="split", tokenizer=tokenizer).boundaries
    assert (boundary.earlier, boundary.later) == ("first", "second")
    assert (boundary.position, boundary.expected_id, boundary.found_id) == (len(prompt), end, other)
    assert boundary.expected_text.endswith("\nabc<think>yes")
    assert boundary.found_text.endswith("\nabc<tool_call><think>")
    # Without a tokenizer only the texts are missing.
    (without,) = build_samples(calls, policy="split").boundaries
    assert without == replace(boundary, expected_text=None, found_text=None)


def test_a_prompt_that_ends_early_has_no_id_at_the_mismatch() -> None:
    calls = [call("first", [5, 6], [7, 8]), call("second", [5, 6, 7], [9])]
    (boundary,) = build_samples(calls, policy="split").boundaries
    assert (boundary.kind, boundary.position, boundary.expected_id, boundary.found_id) == ("different", 3, 8, None)


# Of three turns [8, 9], [3, 4], and [5] behind [6, 7], with [1, 2] between them: prompts that part from that.
PARTINGS = {
    "the first observation": ([6, 7, 8, 9, 5, 2, 3, 4], "fork"),
    "the last observation": ([6, 7, 8, 9, 1, 2, 3, 4, 5, 2], "fork"),
    "the end of the prompt, which may hold the beginning of the turn": ([6, 7, 8, 9, 1, 5, 3, 4], "different"),
    "the second turn": ([6, 7, 8, 9, 1, 2, 5, 4], "different"),
    "the end of the second turn": ([6, 7, 8, 9, 1, 2, 3, 5], "different"),
    "a prompt that ends in the second turn": ([6, 7, 8, 9, 1, 2, 3], "different"),
    "the last turn": ([6, 7, 8, 9, 1, 2, 3, 4, 1, 2, 6], "different"),
    "the first turn": ([6, 7, 8, 5, 1, 2, 3, 4], "different"),
    "the first prompt": ([6, 5, 8, 9, 1, 2, 3, 4], "different"),
    "a prompt that ends in the first prompt": ([6], "different"),
}


@pytest.mark.parametrize(("prompt", "kind"), PARTINGS.values(), ids=PARTINGS)
def test_a_fork_is_told_from_a_turn_in_other_ids_by_the_place(prompt, kind) -> None:
    calls = [
        call("first", [6, 7], [8, 9]),
        call("second", [6, 7, 8, 9, 1, 2], [3, 4]),
        call("third", [6, 7, 8, 9, 1, 2, 3, 4, 1, 2], [5]),
        call("later", prompt, [6]),
    ]
    assert kinds_and_actions(calls)[-1] == (kind, "split")


TRUNCATED = {
    "the template closed the turn": ([7, 8, 9, 1], "truncated_generation"),
    "goes on from there": ([7, 8, 9], "contiguous"),
    "another id": ([7, 8, 5, 1], "different"),
}


@pytest.mark.parametrize(("prompt", "kind"), TRUNCATED.values(), ids=TRUNCATED)
def test_what_the_token_limit_ended(prompt, kind) -> None:
    calls = [call("first", [7], [8, 9], finish_reason="length"), call("second", prompt, [6])]
    assert kinds_and_actions(calls) == [(kind, "split" if kind == "different" else "continued")]


FIRST, SECOND = call("first", [7], [8, 9]), call("second", [7, 8, 9, 1], [10])
RETRY, OTHER = call("retry", [7], [5]), call("other", [20], [21])


@pytest.mark.parametrize(
    "calls",
    [
        [FIRST, SECOND, FIRST],
        [FIRST, RETRY, FIRST],
        [FIRST, OTHER, FIRST, OTHER],
        [FIRST, SECOND, SECOND],
        # Also where its prompt has all known ids.
        [SECOND, FIRST, SECOND],
        [SECOND, FIRST, call("empty", [7, 8, 9], []), SECOND],
    ],
)
def test_a_copy_of_any_earlier_call_is_dropped_and_never_trained_twice(calls) -> None:
    built = build_samples(calls, policy="split")
    trained = [name for sample in built.samples for name in sample.request_ids]
    assert len(trained) == len(set(trained))
    assert (built.boundaries[-1].kind.value, built.boundaries[-1].action.value) == ("duplicate", "dropped")


def test_strict_refuses_a_copy() -> None:
    with pytest.raises(BoundaryError, match=r"'first': the prompt does not continue request 'first' \(duplicate\)"):
        build_samples([FIRST, SECOND, FIRST])


def test_the_same_sample_behind_another_prompt_is_no_copy() -> None:
    assert kinds_and_actions([FIRST, replace(FIRST, prompt_ids=[6])]) == [("different", "split")]
