# SPDX-License-Identifier: Apache-2.0
"""Best of n, sub-agents, interleaved conversations: each call goes on from the one whose ids its prompt holds."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")

from conversations import call, sample_of

from mis_ext.rollout.builder import build_samples
from mis_ext.rollout.generation import BoundaryError


def find_mismatch(known, prompt):
    """The first place at which a prompt differs from what is known; None if all of that is there."""
    return next((i for i, each in enumerate(known) if i == len(prompt) or prompt[i] != each), None)


def test_of_the_best_of_n_the_one_that_was_chosen_goes_on() -> None:
    answers = [call(str(n), [7], [8 + n]) for n in range(4)]
    later = call("later", [7, 9, 1], [20])
    built = build_samples([*answers, later], policy="split")
    assert [each.kind for each in built.boundaries] == ["retry"] * 3 + ["contiguous"]
    assert (built.boundaries[-1].earlier, built.boundaries[-1].continues) == ("1", "1")
    alone = [sample_of([7], each) for each in (answers[0], answers[2], answers[3])]
    assert built.samples == (*alone, sample_of([7], answers[1], [1], later))


def test_answers_of_the_same_ids_go_on_each() -> None:
    answers = [call("a0", [7], [8]), call("b0", [7], [8])]
    later = [call("1", [7, 8, 1], [9]), call("2", [7, 8, 2], [10])]
    built = build_samples([*answers, *later], policy="split")
    assert [each.kind for each in built.boundaries] == ["retry", "contiguous", "contiguous"]
    assert built.samples == (sample_of([7], answers[1], [1], later[0]), sample_of([7], answers[0], [2], later[1]))


def test_a_sub_agent_does_not_break_the_conversation_that_goes_on() -> None:
    main = [call("0", [7], [8]), call("1", [7, 8, 1, 2], [9]), call("2", [7, 8, 1, 2, 9, 1], [10])]
    sub = [call("s0", [7, 8, 5, 2], [11]), call("s1", [7, 8, 5, 2, 11, 6], [12])]
    built = build_samples([*main[:2], *sub, main[2]], policy="split")
    assert [(each.kind, each.continues) for each in built.boundaries] == [
        ("contiguous", "0"),
        ("fork", "0"),
        ("contiguous", "s0"),
        ("contiguous", "1"),
    ]
    # The call that both go on from is trained where the conversation ends last.
    assert built.samples == (
        sample_of([7, 8, 5, 2], sub[0], [6], sub[1]),
        sample_of([7], main[0], [1, 2], main[1], [1], main[2]),
    )


def test_strict_refuses_a_fork() -> None:
    calls = [call("0", [7], [8]), call("1", [7, 8, 1, 3], [9]), call("2", [7, 8, 2, 3], [10])]
    found = "at position 2 the prompt has id 2, but the known id is 1"
    with pytest.raises(BoundaryError, match=rf"'2': .*request '1' \(fork\): {found}"):
        build_samples(calls)


def sampled_range(calls, name):
    return next(range(len(each.sampled_ids)) for each in calls if each.request_id == name)


@pytest.mark.parametrize("size", [1, 5, 1025])
def test_calls_that_part_anywhere_are_found_again(size) -> None:
    """Runs that are cut at any place, against a comparison of single ids with every call."""
    rng = random.Random(size)
    calls, knowns = list[object](), list[list[int]]()
    for number in range(30):
        base = rng.choice(knowns) if knowns and rng.random() < 0.8 else [rng.randrange(2) for _ in range(size)]
        kept = len(base) if rng.random() < 0.5 else rng.randrange(len(base) + 1)
        prompt = base[:kept] + [rng.randrange(2) for _ in range(rng.randrange(3))]
        calls.append(call(f"call {number}", prompt, [rng.randrange(2) for _ in range(rng.randint(1, 3))]))
        knowns.append(prompt + calls[-1].sampled_ids)
    built = build_samples(calls, policy="split")
    names = [each.request_id for each in calls]
    for number, boundary in enumerate(built.boundaries, start=1):
        if boundary.action == "dropped":
            continue
        held = [known for known in knowns[:number] if find_mismatch(known, calls[number].prompt_ids) is None]
        found = boundary.continues and knowns[names.index(boundary.continues)]
        assert found == max(held, key=len, default=None)
    # Every sampled token is trained once, and behind the very ids that the server had.
    sampled = [(each.request_id, i) for each in calls for i in range(len(each.sampled_ids))]
    copies = {calls[i].request_id for i, each in enumerate(built.boundaries, start=1) if each.action == "dropped"}
    trained = []
    for sample in built.samples:
        start = len(sample.tokens) - sample.response_length
        places = [start + i for i, mask in enumerate(sample.loss_mask) if mask]
        of_calls = [(calls[names.index(name)], i) for name in sample.request_ids for i in sampled_range(calls, name)]
        for place, (one, i) in zip(places, of_calls, strict=True):
            assert sample.tokens[: place + 1] == one.prompt_ids + one.sampled_ids[: i + 1]
            assert sample.rollout_log_probs[place - start] == one.log_probs[i]
            trained.append((one.request_id, i))
    assert sorted(trained) == sorted(each for each in sampled if each[0] not in copies)
