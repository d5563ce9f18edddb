# SPDX-License-Identifier: Apache-2.0
"""What must hold of samples, against the calls of agents whose truth is known (``agents.py``)."""

from __future__ import annotations

from typing import Any

from agents import score_of, scores

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import BoundaryError, Built, Generation


def sampled_of(calls: list[Generation]) -> dict[float, tuple[int, str | None]]:
    """Every token that was sampled, by its log-prob; of copies, the first."""
    return {
        value: (token, version)
        for call in reversed(calls)
        for token, value, version in zip(call.sampled_ids, call.log_probs, versions_of(call), strict=True)
    }


def versions_of(call: Generation) -> list[str | None]:
    """The version of the weights that sampled each token."""
    return [*(call.weight_versions or [call.weight_version] * len(call.sampled_ids))]


def check_tokens(calls: list[Generation], built: Built) -> None:
    """Every sampled token is trained, once, in exactly the context of its log-prob."""
    sampled = sampled_of(calls)
    num_sampled = len(sampled)
    for sample in built.samples:
        start = len(sample.tokens) - sample.response_length
        found = scores(sample.tokens)[start:]
        columns = (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions)
        assert sample.loss_mask[0] == 1
        for token, score, mask, value, version in zip(sample.tokens[start:], found, *columns, strict=True):
            if mask:
                # Taken out: a second time it would be missing.
                assert sampled.pop(value) == (token, version)
                assert score_of(value) == score
            else:
                assert (mask, value, version) == (0, 0.0, None)
    assert not sampled
    metrics = built.metrics()
    with_copies = sum(len(call.sampled_ids) for call in calls)
    assert metrics["sampled_tokens"] == with_copies
    assert metrics["sampled_tokens/dropped"] == with_copies - num_sampled


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


def check_strict(calls: list[Generation], tokenizer: Any, split: Built) -> None:
    """Strict makes the sample of split where all goes on in one, and is an error elsewhere."""
    unclean = [each for each in split.boundaries if each.action != "continued"]
    outcome: Any
    try:
        outcome = build_samples(calls, tokenizer=tokenizer)
    except BoundaryError as error:
        outcome = error.boundary
    if unclean:
        assert (outcome.action, outcome.later) == ("raised", unclean[0].later)
    else:
        assert outcome == split
        assert len(split.samples) <= 1
