"""What holds of every sample, whatever agents do: 2,100 conversations, with a scorer that knows every context."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")
pytest.importorskip("jinja2", reason="chat templates: pip install jinja2")

from agents import TEMPLATES, Conversation, score_of, scores
from tiny_tokenizers import TOKENIZERS

from mis_ext.rollout.conversations.boundary import BoundaryKind
from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.conversations.built import Built
from mis_ext.rollout.errors import BoundaryError
from mis_ext.rollout.generation import Generation

CONVERSATIONS = 120
CHOICES = (("split", "mask"), ("correct", "mask"), ("correct", "flag"))


def sampled_of(calls: list[Generation]) -> dict[float, tuple[int, str | None]]:
    """Every token that was sampled, by its log-prob."""
    return {
        value: (token, call.weight_version)
        for call in calls
        for token, value in zip(call.sampled_ids, call.log_probs, strict=True)
    }


def check_tokens(calls: list[Generation], built: Built) -> tuple[int, int]:
    """Every trained token is one that was sampled, once, and exact or flagged; counts what is trained and flagged."""
    sampled = sampled_of(calls)
    size, trained, flagged = len(sampled), 0, 0
    for sample in built.samples:
        start = len(sample.tokens) - sample.response_length
        found = scores(sample.tokens)[start:]
        columns = (sample.loss_mask, sample.rollout_log_probs, sample.behind_other_ids, sample.weight_versions)
        assert sample.loss_mask[0] == 1
        for token, score, mask, value, flag, version in zip(sample.tokens[start:], found, *columns, strict=True):
            flagged += flag
            if mask:
                # Taken out: a second time it would be missing.
                assert sampled.pop(value) == (token, version)
                assert (score_of(value) != score) == flag
            else:
                assert value == 0.0
    trained = size - len(sampled)
    metrics = built.metrics()
    assert (metrics["sampled_tokens/trained"], metrics["sampled_tokens/behind_other_ids"]) == (trained, flagged)
    assert metrics["sampled_tokens"] == sum(len(call.sampled_ids) for call in calls)
    return trained, flagged


def check_counts(calls: list[Generation], choices: tuple[str, str], trained: int, flagged: int) -> None:
    """Nothing is lost without a word."""
    size = len(sampled_of(calls))
    if choices[0] == "split":
        assert flagged == 0
    assert trained + flagged * (choices == ("correct", "mask")) == size


def check_ancestors(calls: list[Generation], built: Built) -> None:
    """A call goes on from that whose ids, of all calls before it, its prompt holds most of."""
    knowns = [(call, [*call.prompt_ids, *call.sampled_ids]) for call in calls if call.sampled_ids]
    by_name = {call.request_id: known for call, known in knowns}
    for number, (call, boundary) in enumerate(zip(calls[1:], built.boundaries, strict=True), start=1):
        if boundary.action == "dropped":
            continue
        before = [known for each, known in knowns if each in calls[:number]]
        exact = [known for known in before if call.prompt_ids[: len(known)] == known]
        expected = max(exact, key=len, default=None)
        assert (boundary.continues and by_name[boundary.continues]) == expected
        assert (boundary.kind in ("contiguous", "fork", "empty_generation")) <= (expected is not None or not before)
        if boundary.action == "continued" and before:
            assert expected is not None


def check_prompts(calls: list[Generation], built: Built) -> None:
    """A sample begins with the prompt of its first call, and has no end but that of its last."""
    by_name = {call.request_id: call for call in calls}
    for sample in built.samples:
        first, last = by_name[sample.request_ids[0]], by_name[sample.request_ids[-1]]
        assert sample.tokens[: len(sample.tokens) - sample.response_length] == first.prompt_ids
        assert sample.tokens == [*last.prompt_ids, *last.sampled_ids]


def check_texts(talk: Conversation, built: Built) -> None:
    """What stands behind a splice stands behind the text that the server was given, but for white space."""
    starts = {call.log_probs[0]: call for call in talk.calls if call.sampled_ids}
    for sample in built.samples:
        begin = len(sample.tokens) - sample.response_length
        for offset, (value, flag) in enumerate(
            zip(sample.rollout_log_probs, sample.behind_other_ids, strict=True), start=begin
        ):
            if flag and value in starts:
                texts = [talk.tokenizer.decode(ids) for ids in (sample.tokens[:offset], starts[value].prompt_ids)]
                # Bytes that are no character were sampled, and written as U+FFFD.
                first, second = (re.sub(r"[\s\ufffd]", "", text) for text in texts)
                assert first == second


def check_strict(talk: Conversation, split: Built) -> None:
    """Strict makes the sample of split where all goes on in one, and is an error elsewhere."""
    unclean = [each for each in split.boundaries if each.action != "continued"]
    if unclean:
        with pytest.raises(BoundaryError) as raised:
            build_samples(talk.calls, tokenizer=talk.tokenizer)
        assert raised.value.boundary.later == unclean[0].later
    else:
        assert build_samples(talk.calls, tokenizer=talk.tokenizer) == split
        assert len(split.samples) <= 1


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_whatever_agents_do_every_trained_token_is_exact_or_flagged(tokenizer, template) -> None:
    seen = Counter[str]()
    for seed in range(CONVERSATIONS):
        talk = Conversation(seed, tokenizer, template)
        kinds = list[list[str]]()
        for choices in CHOICES:
            built = build_samples(talk.calls, policy=choices[0], behind_splice=choices[1], tokenizer=talk.tokenizer)
            check_counts(talk.calls, choices, *check_tokens(talk.calls, built))
            if choices == ("correct", "flag"):
                check_texts(talk, built)
            if choices[0] == "split":
                check_ancestors(talk.calls, built)
                check_prompts(talk.calls, built)
                check_strict(talk, built)
            kinds.append([each.kind.value for each in built.boundaries])
            seen.update(f"{choices[0]}: {each.kind.value} {each.action.value}" for each in built.boundaries)
        # The class does not depend on the policy.
        assert all(each == kinds[0] for each in kinds)
    found = {name.split()[1] for name in seen}
    missing = {kind.value for kind in BoundaryKind} - found - ({"reasoning_stripped"} if template != "strip" else set())
    assert not missing - ({"retemplated", "retokenized"} if template == "plain" else set()), seen
    assert template == "plain" or seen["correct: retokenized spliced"] > 20, seen
