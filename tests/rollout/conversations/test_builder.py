# SPDX-License-Identifier: Apache-2.0
"""What each policy makes of each class of boundary, and what no policy lets pass."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")
pytest.importorskip("jinja2", reason="chat templates: pip install jinja2")

from conversations import ANSWER, CASES, QUESTION, Case, call, sample_of
from tiny_tokenizers import TOKENIZERS, TURN_END, encode, encode_bytewise, render
from transformers import PreTrainedTokenizerFast

from mis_ext.rollout.builder import build_samples
from mis_ext.rollout.generation import (
    BoundaryError,
    CountMismatch,
    MalformedResponse,
    TrainingSample,
)

ACTIONS = {
    # class: strict, split
    "contiguous": ("continued", "continued"),
    "retokenized": ("raised", "split"),
    "reasoning_stripped": ("raised", "split"),
    "truncated_and_closed": ("continued", "continued"),
    "retry": ("raised", "split"),
    "duplicate": ("raised", "dropped"),
    "empty_generation": ("continued", "continued"),
}
POLICIES = ("strict", "split")
TABLE = [(name, policy, action) for name, row in ACTIONS.items() for policy, action in zip(POLICIES, row, strict=True)]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def expected_samples(case: Case, policy: str, action: str) -> tuple[TrainingSample, ...]:
    first, second = case.calls
    known = first.prompt_ids + first.sampled_ids
    if action == "continued":
        return (sample_of(first.prompt_ids, first, second.prompt_ids[len(known) :], second),)
    alone = [sample_of(each.prompt_ids, each) for each in case.calls]
    return tuple(alone if action == "split" else alone[:1])


@pytest.mark.parametrize(("name", "policy", "action"), TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE])
def test_every_policy_does_to_every_class_what_it_says(tokenizer, name, policy, action) -> None:
    case = CASES[name](tokenizer)
    if action == "raised":
        with pytest.raises(BoundaryError) as raised:
            build_samples(case.calls, policy=policy, tokenizer=tokenizer)
        boundary = raised.value.boundary
        assert raised.value.request_id == case.calls[1].request_id
    else:
        built = build_samples(case.calls, policy=policy, tokenizer=tokenizer)
        (boundary,) = built.boundaries
        assert built.samples == expected_samples(case, policy, action)
    assert (boundary.kind, boundary.action) == (case.kind, action)
    assert (boundary.earlier, boundary.later) == tuple(each.request_id for each in case.calls)


def test_strict_tells_request_class_position_ids_and_context() -> None:
    tokenizer = TOKENIZERS["english"]()
    prompt = encode(tokenizer, "<|im_start|>a")
    calls = [
        call("first", prompt, encode(tokenizer, "b<think>")),
        call("second", encode(tokenizer, "<|im_start|>ac"), [5]),
    ]
    b, c = encode(tokenizer, "bc")
    message = (
        "request 'second': the prompt does not continue request 'first' (different): at position 2 the prompt has "
        f"id {c}, but the known id is {b}; prompt '<|im_start|>ac', known '<|im_start|>ab<think>'"
    )
    with pytest.raises(BoundaryError) as raised:
        build_samples(calls, tokenizer=tokenizer)
    assert str(raised.value) == message
    with pytest.raises(BoundaryError, match=r"at position 1 the prompt ends"):
        build_samples([calls[0], call("second", prompt[:1], [5])])


def single(calls, **settings) -> TrainingSample:
    (sample,) = build_samples(calls, **settings).samples
    return sample


def test_tokens_of_tools_and_template_are_masked() -> None:
    first, second = call("first", [7], [8]), call("second", [7, 8, 1, 2], [9, 3])
    assert single([first, second]) == TrainingSample(
        tokens=[7, 8, 1, 2, 9, 3],
        response_length=5,
        loss_mask=[1, 0, 0, 1, 1],
        rollout_log_probs=[*first.log_probs, 0.0, 0.0, *second.log_probs],
        weight_versions=["version of first", None, None, "version of second", "version of second"],
        request_ids=["first", "second"],
    )


def test_weights_that_changed_during_a_call_give_each_token_its_version() -> None:
    first = replace(call("first", [7], [8, 9]), weight_version="2", weight_versions=["1", "2"])
    assert single([first]).weight_versions == ["1", "2"]


def test_a_boundary_error_survives_pickling() -> None:
    with pytest.raises(BoundaryError) as caught:
        build_samples([call("first", [7], [8]), call("second", [9], [8])])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.request_id, copy.boundary) == (
        BoundaryError,
        str(caught.value),
        "second",
        caught.value.boundary,
    )


def test_prompts_may_be_any_sequence() -> None:
    assert single([call("first", (7,), [8]), call("second", (7, 8, 1), [9])]).tokens == [7, 8, 1, 9]


def test_no_calls_and_calls_that_sampled_nothing_make_no_sample() -> None:
    assert build_samples([]).samples == ()
    built = build_samples([call("first", [7], []), call("second", [7], [])])
    assert built.samples == ()
    assert [each.kind for each in built.boundaries] == ["empty_generation"]


def test_an_empty_generation_after_an_edit_ends_nothing(tokenizer) -> None:
    calls = [call("0", [7], [8]), call("1", [6, 8, 1], []), call("2", [7, 8, 1], [9])]
    built = build_samples(calls, policy="split", tokenizer=tokenizer)
    assert [(each.kind, each.action) for each in built.boundaries] == [
        ("different", "dropped"),
        ("empty_generation", "continued"),
    ]
    assert built.samples == (sample_of([7], calls[0], [1], calls[2]),)


def test_a_retried_turn_stands_alone_and_the_conversation_goes_on_with_the_retry() -> None:
    calls = [
        call("0", [7], [8]),
        call("1", [7, 8, 1], [9]),
        call("2", [7, 8, 1], [10]),
        call("3", [7, 8, 1, 10, 2], [11]),
    ]
    built = build_samples(calls, policy="split")
    assert [each.kind for each in built.boundaries] == ["contiguous", "retry", "contiguous"]
    assert built.samples == (
        sample_of([7, 8, 1], calls[1]),
        sample_of([7], calls[0], [1], calls[2], [2], calls[3]),
    )


def test_the_same_ids_with_other_log_probs_are_a_retry() -> None:
    first = call("0", [7], [8, 9])
    again = replace(first, request_id="1", log_probs=[first.log_probs[0], -0.125])
    assert [each.kind for each in build_samples([first, again], policy="split").boundaries] == ["retry"]


def test_a_client_that_renders_everything_anew_is_split_at_every_turn(tokenizer) -> None:
    """Each prompt is compared with the turns as they were sampled, and with the prompts in between."""
    messages, calls = [*QUESTION], []
    for turn in range(4):
        sampled = [*encode_bytewise(tokenizer, f"turn {turn}: {ANSWER}"), *encode(tokenizer, TURN_END)]
        calls.append(call(str(turn), render(tokenizer, messages), sampled))
        messages += [
            {"role": "assistant", "content": f"turn {turn}: {ANSWER}"},
            {"role": "user", "content": f"more {turn}"},
        ]
    built = build_samples(calls, policy="split", tokenizer=tokenizer)
    assert [(each.kind, each.action) for each in built.boundaries] == [("different", "split")] * 3
    assert built.samples == tuple(sample_of(each.prompt_ids, each) for each in calls)
    for boundary, earlier in zip(built.boundaries, calls, strict=False):
        assert 0 <= boundary.position - len(earlier.prompt_ids) < len(earlier.sampled_ids)


def test_an_early_turn_that_is_written_as_sampled_again_goes_on_from_there(tokenizer) -> None:
    """The third prompt has the first answer in bytes, as it was sampled; the second prompt had it in words."""
    case = CASES["retokenized"](tokenizer)
    first, second = case.calls
    behind = case.observation + second.sampled_ids + [5]
    third = call("third", first.prompt_ids + first.sampled_ids + behind, [7])
    built = build_samples([first, second, third], policy="split", tokenizer=tokenizer)
    assert [each.kind for each in built.boundaries] == ["different", "contiguous"]
    assert built.samples == (sample_of(second.prompt_ids, second), sample_of(first.prompt_ids, first, behind, third))


class TestMetrics:
    def test_of_a_conversation(self) -> None:
        calls = [call("0", [7], [8, 9]), call("1", [7, 8, 9, 1], [2]), call("2", [7, 8, 9, 1], [2, 3])]
        calls.append(calls[-1])
        metrics = build_samples(calls, policy="split").metrics()
        assert {name: count for name, count in metrics.items() if count} == {
            "generations": 4,
            "samples": 2,
            "sampled_tokens": 7,
            "sampled_tokens/trained": 5,
            "sampled_tokens/dropped": 2,
            "boundaries": 3,
            "boundaries/contiguous": 1,
            "boundaries/retry": 1,
            "boundaries/duplicate": 1,
            "boundaries/continued": 1,
            "boundaries/split": 1,
            "boundaries/dropped": 1,
        }

    def test_nothing_measured_is_nothing_of_nothing(self) -> None:
        assert set(build_samples([]).metrics().values()) == {0}


class TestIllegal:
    @pytest.mark.parametrize("bad", [True, 1.0, "1", None, -1, 2**31, [7]])
    @pytest.mark.parametrize("place", ["first prompt", "later prompt", "changed prompt", "sampled"])
    def test_token_ids_are_named(self, place, bad) -> None:
        calls = [call("0", [7, 7], [8]), call("1", [7, 7, 8, 1, 2], [9])]
        if place == "first prompt":
            calls[0] = call("0", [7, bad], [8])
            where = r"request '0': prompt_ids\[1\]"
        elif place == "later prompt":
            calls[1] = call("1", [7, 7, 8, bad, 1], [9])
            where = r"request '1': prompt_ids\[3\]"
        elif place == "changed prompt":
            calls[1] = call("1", [7, bad, 8, 1, 2], [9])
            where = r"request '1': prompt_ids\[1\]"
        else:
            calls[1] = call("1", [7, 7, 8], [9, bad])
            where = r"request '1': sampled_ids\[1\]"
        with pytest.raises(
            MalformedResponse, match=rf"{where} must be an int in \[0, 2147483647\], got {re.escape(repr(bad))}"
        ):
            build_samples(calls, policy="split")

    def test_equal_numbers_of_other_types_never_reach_a_sample(self) -> None:
        """True == 1 and 7.0 == 7."""
        for sample in build_samples([call("0", [7, 1], [8]), call("1", [7, True, 6], [9])], policy="split").samples:
            assert {type(each) for each in sample.tokens} == {int}
        with pytest.raises(MalformedResponse, match=r"request '1': prompt_ids\[1\] must be an int"):
            build_samples([call("0", [0, 1], [8]), call("1", [0, 1.0, 8], [9])], policy="split")

    def test_the_greatest_id(self) -> None:
        assert single([call("0", [0, 2**31 - 1], [1])]).tokens == [0, 2**31 - 1, 1]

    @pytest.mark.parametrize(("key", "name"), [("log_probs", "log-probs"), ("weight_versions", "weight versions")])
    def test_counts_must_agree(self, key, name) -> None:
        with pytest.raises(CountMismatch, match=f"request '0': 2 sampled ids, but 1 {name}"):
            build_samples([replace(call("0", [7], [8, 9]), **{key: [-0.5]})])

    def test_an_unknown_policy_is_named(self) -> None:
        message = r"policy must be one of strict \| split.* 'splt' \(did you mean 'split'"
        with pytest.raises(ValueError, match=message):
            build_samples([], policy="splt")
