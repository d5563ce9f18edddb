# SPDX-License-Identifier: Apache-2.0
"""Drawn agents from the wire to samples: some conversations of the benchmark, and mistakes that it must find."""

import random

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")
pytest.importorskip("jinja2", reason="chat templates: pip install jinja2")

from check_conversations import check_some

from mis_ext.rollout.conversations import builder
from mis_ext.rollout.generation import BoundaryAction
from mis_ext.rollout.readers import cross_checks, server_sent_events


def test_drawn_conversations_become_exactly_the_samples_that_they_are() -> None:
    first = random.randrange(10**6)
    counts = check_some(range(first, first + 60))
    assert counts["tokens: trained"] > 2000
    assert sum(count for name, count in counts.items() if name.endswith(", refused")) > 120
    streams = ("sglang cumulative", "sglang incremental", "vllm stream", "vllm-chat stream", "vllm-completions stream")
    assert min(counts[f"responses: {name}"] for name in streams) > 3


ACTION, EVENTS = builder.choose_action, server_sent_events._events


def first_place(places, read):
    return next((read(each) for each in places if each), None)


def trained_in_each(calls):
    paths = []
    for call in calls:
        path = [call]
        while path[0].ancestor is not None:
            path.insert(0, path[0].ancestor)
        paths.append(path)
    return tuple(map(builder._join_path, paths))


def split_copies(policy, call, finding):
    action = ACTION(policy, call, finding)
    return BoundaryAction.SPLIT if action is BoundaryAction.DROPPED and call.sampled_ids else action


MISTAKES = {
    "only the first witness": (cross_checks, "agree", first_place),
    "counts of a response": (cross_checks, "_check_counts", lambda *places: None),
    "any index of a choice, any end": (cross_checks, "check_same", lambda one, other: None),
    "a stream that breaks off": (
        server_sent_events,
        "_events",
        lambda lines, name: EVENTS([*lines, "data: [DONE]"], name),
    ),
    "all events are new": (server_sent_events, "_has_all", lambda event: False),
    "shared calls are trained twice": (builder, "collect_samples", trained_in_each),
    "a copy is a sample": (builder, "choose_action", split_copies),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, monkeypatch) -> None:
    place, attribute, planted = MISTAKES[name]
    monkeypatch.setattr(place, attribute, planted)
    with pytest.raises(RuntimeError, match="conversation "):
        check_some(range(400))
