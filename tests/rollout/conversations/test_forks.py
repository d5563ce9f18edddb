# SPDX-License-Identifier: Apache-2.0
"""Best of n, sub-agents, interleaved conversations: each call goes on from the one whose ids its prompt holds."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")

from conversations import call, sample_of

from mis_ext.rollout.builder import build_samples
from mis_ext.rollout.generation import BoundaryError


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
