"""What holds of every sample, whatever client, tokenizer and policy: random conversations of random boundaries."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TOKENIZERS, TURN_END, encode, encode_bytewise

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.conversations.built import Built
from mis_ext.rollout.errors import BoundaryError
from mis_ext.rollout.generation import Generation

MADE = {name: make() for name, make in TOKENIZERS.items()}
WORDS = [
    "It rains. ",
    "天気",
    "🙂",
    " naïve",
    "\n",
    "  ",
    "Погода",
    '{"a": [1, "b"]}',
    "<tool_call>",
    "<think>a </think>\n",
    "x",
    "[",
]
CLIENTS = ("append", "render", "strip", "drop reasoning", "retry", "duplicate", "edit", "remove", "nothing")

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join)


class Turn(NamedTuple):
    """One call: what is sampled, in what tokens, and what the client then does to make the next prompt."""

    text: str
    pieces: list[bool]
    closed: bool
    client: str
    observation: str


class Talk(NamedTuple):
    """The calls of a conversation, and the name of their tokenizer."""

    name: str
    calls: list[Generation]


def turns(clients: tuple[str, ...]) -> st.SearchStrategy[Turn]:
    bits = st.lists(st.booleans(), min_size=1, max_size=4)
    return st.builds(Turn, texts, bits, st.booleans(), st.sampled_from(clients), texts)


@st.composite
def talks(draw: st.DrawFn, clients: tuple[str, ...] = CLIENTS) -> Talk:
    name = draw(st.sampled_from(sorted(MADE)))
    tokenizer, log_probs = MADE[name], count(1)
    history = [f"<|im_start|>user\n{draw(texts)}<|im_end|>\n<|im_start|>assistant\n"]
    prompt, calls = encode(tokenizer, history[0]), list[Generation]()
    plan = draw(st.lists(turns(clients), min_size=1, max_size=5))
    for number, turn in enumerate(plan):
        reasoning = "<think>\nhm </think>\n" if turn.client == "drop reasoning" else ""
        said = "" if turn.client == "nothing" else reasoning + turn.text + TURN_END * turn.closed
        sampled = encode_mixed(tokenizer, said, turn.pieces)
        # Every token has a log-prob of its own, by which it is known wherever it comes up.
        values = [-next(log_probs) / 7 for _ in sampled]
        call = Generation(
            request_id=str(number),
            prompt_ids=prompt,
            sampled_ids=sampled,
            log_probs=values,
            finish_reason="stop" if turn.closed else "length",
            weight_version=str(number // 2),
        )
        calls.append(call)
        if turn.client == "duplicate":
            calls.append(call)
        observation = (
            f"{TURN_END * (not turn.closed)}\n<|im_start|>user\n{turn.observation}<|im_end|>\n<|im_start|>assistant\n"
        )
        if turn.client == "retry":
            continue
        written = {
            "strip": said.replace(TURN_END, "").rstrip() + TURN_END,
            "drop reasoning": said.split("</think>")[-1],
        }
        history = [*history, written.get(turn.client, said), observation]
        if turn.client == "edit":
            history[0] = history[0].replace("user\n", "user\nEdited: ", 1)
        if turn.client == "remove" and len(history) > 3:
            history = [history[0], *history[3:]]
        ids = prompt + sampled + encode(tokenizer, observation)
        prompt = ids if turn.client in ("append", "duplicate") else encode(tokenizer, "".join(history))
    return Talk(name, calls)


def encode_mixed(tokenizer, text: str, pieces: list[bool]) -> list[int]:
    """Half of the words in bytes: what a sampler may do and a tokenizer never does."""
    ids = list[int]()
    for number, word in enumerate(text.replace(TURN_END, "").split(" ")):
        word = " " * (number > 0) + word
        marked = "<" in word
        split = pieces[number % len(pieces)] and not marked
        ids += encode_bytewise(tokenizer, word) if split else encode(tokenizer, word)
    return ids + encode(tokenizer, TURN_END) * text.endswith(TURN_END)


def build(talk: Talk, policy: str) -> Built:
    tokenizer = MADE[talk.name]
    return build_samples(talk.calls, policy=policy, tokenizer=tokenizer, vocab_size=len(tokenizer))


def trained_positions(talk: Talk, built: Built):
    """Sample, call and the position in the sample of each call that is trained, from the log-probs alone."""
    first_value = {call.log_probs[0]: call for call in talk.calls if call.sampled_ids}
    for sample in built.samples:
        begin = len(sample.tokens) - sample.response_length
        for offset, value in enumerate(sample.rollout_log_probs):
            if value in first_value:
                yield sample, first_value[value], begin + offset


def check_samples(talk: Talk, built: Built) -> None:
    """What is trained is what was sampled, once and bit for bit; all else is masked."""
    captured = {
        value: (token, call.weight_version)
        for call in talk.calls
        for value, token in zip(call.log_probs, call.sampled_ids, strict=True)
    }
    trained = list[float]()
    for sample in built.samples:
        columns = (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions)
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        for token, mask, value, version in zip(response, *columns, strict=True):
            if mask:
                assert captured[value] == (token, version)
                trained.append(value)
            else:
                assert (mask, value, version) == (0, 0.0, None)
    assert len(trained) == len(set(trained)) == built.metrics()["sampled_tokens/trained"]
    assert built.metrics()["sampled_tokens"] == sum(len(call.sampled_ids) for call in talk.calls)


def check_calls(talk: Talk, built: Built) -> None:
    """Every response begins with its first call's sampled ids, behind its prompt, and holds each call whole."""
    names = list[str]()
    for sample, call, start in trained_positions(talk, built):
        assert sample.tokens[start : start + len(call.sampled_ids)] == call.sampled_ids
        if call.request_id == sample.request_ids[0]:
            assert start == len(sample.tokens) - sample.response_length
            assert sample.tokens[:start] == call.prompt_ids
        names.append(call.request_id)
    assert names == [name for sample in built.samples for name in sample.request_ids]


def check_nothing_is_lost(talk: Talk, built: Built) -> None:
    """But duplicates."""
    names = [name for sample in built.samples for name in sample.request_ids]
    assert sorted(names) == sorted({call.request_id for call in talk.calls if call.sampled_ids})
    assert len(built.boundaries) == len(talk.calls) - 1


def check_prompts(talk: Talk, built: Built) -> None:
    """Every call stands behind exactly the ids that its server was given."""
    for sample, call, start in trained_positions(talk, built):
        assert sample.tokens[:start] == call.prompt_ids


def check_strict(talk: Talk, split: Built) -> None:
    """The same as what is split where nothing is, else an error at the first boundary that is not clean."""
    unclean = [each for each in split.boundaries if each.action != "continued"]
    if not unclean:
        assert build(talk, "strict") == split
        return
    with pytest.raises(BoundaryError) as raised:
        build(talk, "strict")
    found = raised.value.boundary
    assert (found.kind, found.position, found.later) == (unclean[0].kind, unclean[0].position, unclean[0].later)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(talks())
def test_whatever_the_client_does_every_policy_keeps_its_word(talk: Talk) -> None:
    built = build(talk, "split")
    for check in (check_samples, check_calls, check_prompts, check_nothing_is_lost, check_strict):
        check(talk, built)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(talks(("append",)))
def test_a_client_that_keeps_ids_gets_one_sample_of_the_whole_conversation(talk: Talk) -> None:
    built = build(talk, "strict")
    sampling = [call for call in talk.calls if call.sampled_ids]
    assert [sample.request_ids for sample in built.samples] == [[call.request_id for call in sampling]] * bool(sampling)
    for sample in built.samples:
        assert sample.tokens == [*sampling[-1].prompt_ids, *sampling[-1].sampled_ids]
