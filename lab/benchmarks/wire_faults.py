# SPDX-License-Identifier: Apache-2.0
"""Faults in what arrives from a server (``wire.py``).

Each plants itself, at a drawn place, and returns False where nothing there can be spoilt so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from streamed import Event
from tiny_tokenizers import encode_bytewise
from wire import Wire


def wrong_id(wire: Wire, tokenizer: Any, rng: random.Random) -> bool:
    """One of the two places that tell an id tells another; what is told once nobody can hold against anything."""
    places = [*_id_places(_holder(wire, rng))]
    if len(places) < 2 or not places[0][0]:
        return False
    rows, write = rng.choice(places)
    write(rows, rng.randrange(len(rows)), rng.randrange(2, 200))
    return True


def lost_token(wire: Wire, tokenizer: Any, rng: random.Random) -> bool:
    """An id and its log-prob are gone, wherever they are told."""
    holder = _holder(wire, rng)
    lists = [*_lists(holder)]
    if not lists[0]:
        return False
    position = rng.randrange(len(lists[0]))
    for each in lists:
        del each[position]
    return True


def lost_log_prob(wire: Wire, tokenizer: Any, rng: random.Random) -> bool:
    """An id has none: its row is gone, or has null."""
    rows = _log_probs(_holder(wire, rng))
    if not rows:
        return False
    position = rng.randrange(len(rows))
    if rng.random() < 0.5:
        del rows[position]
    elif isinstance(rows[position], dict):
        rows[position]["logprob"] = None
    elif isinstance(rows[position], list):
        rows[position][0] = None
    else:
        rows[position] = None
    return True


def more_log_probs(wire: Wire, tokenizer: Any, rng: random.Random) -> bool:
    """One of them stands there twice."""
    rows = _log_probs(_holder(wire, rng))
    if not rows:
        return False
    rows.insert(rng.randrange(len(rows)), rows[-1])
    return True


def swapped_choices(wire: Wire, tokenizer: Any, rng: random.Random) -> bool:
    """Two of them have each other's index."""
    choices = wire.responses[0].get("choices", [])
    if len(choices) < 2:
        return False
    choices.append(choices.pop(0))
    return True


def other_prompt(wire: Wire, tokenizer: Any, rng: random.Random) -> bool:
    """The prompt that one place tells was tokenized anew."""
    response = wire.responses[0]
    places = [(wire.request, key) for key in ("input_ids", "token_ids", "prompt")]
    places += [(each, "prompt_token_ids") for each in (response, *response.get("choices", []))]
    places += [(response.get("sglext", {}), "input_ids")]
    places = [(holder, key) for holder, key in places if holder.get(key)]
    if not places:
        return False
    holder, key = rng.choice(places)
    again = encode_bytewise(tokenizer, tokenizer.decode(holder[key]))
    is_longer = len(again) != len(holder[key])
    holder[key] = again
    return is_longer


FAULTS: dict[str, Callable[[Wire, Any, random.Random], bool]] = {
    "a wrong id": wrong_id,
    "a lost token": lost_token,
    "an id without a log-prob": lost_log_prob,
    "a log-prob too many": more_log_probs,
    "swapped choices": swapped_choices,
    "a prompt tokenized anew": other_prompt,
}
"""In a response, and so in a stream that is cut from it."""


def lost_event(events: list[Event], rng: random.Random) -> bool:
    """One event never comes."""
    del events[rng.randrange(len(events))]
    return True


def doubled_event(events: list[Event], rng: random.Random) -> bool:
    """One event comes twice."""
    place = rng.randrange(len(events))
    events.insert(place, events[place])
    return True


def swapped_events(events: list[Event], rng: random.Random) -> bool:
    """Two events have changed places."""
    if len(events) < 2:
        return False
    first, second = rng.sample(range(len(events)), 2)
    events[first], events[second] = events[second], events[first]
    return True


def event_for_another(events: list[Event], rng: random.Random) -> bool:
    """One event comes twice, the second time in the place of another."""
    if len(events) < 2:
        return False
    first, second = rng.sample(range(len(events)), 2)
    events[second] = events[first]
    return True


def other_choice(events: list[Event], rng: random.Random) -> bool:
    """The end of a choice comes under the index of another; of which choice a token is, is told once."""
    ends = [each for event in events for each in event.get("choices", []) if each.get("finish_reason") is not None]
    if len(ends) < 2:
        return False
    first, second = rng.sample(ends, 2)
    first["index"] = second["index"]
    return True


EVENT_FAULTS: dict[str, Callable[[list[Event], random.Random], bool]] = {
    "a lost event": lost_event,
    "a doubled event": doubled_event,
    "swapped events": swapped_events,
    "an event for another": event_for_another,
    "swapped choices": other_choice,
}
"""In a stream."""

HARMLESS = ("a lost event", "a doubled event", "swapped events", "an event for another")
"""These may leave the truth: a later event of SGLang's has all again, and some events have no token."""


def _holder(wire: Wire, rng: random.Random) -> dict[str, Any]:
    return rng.choice(wire.responses if wire.format == "sglang" else wire.responses[0]["choices"])


def _id_places(holder: dict[str, Any]) -> Iterator[tuple[list[Any], Callable[[list[Any], int, int], None]]]:
    """The lists of a sample that tell its ids, and how to write another one, which is larger by what is given."""

    def of_row(key: Any) -> Callable[[list[Any], int, int], None]:
        return lambda rows, i, more: rows[i].__setitem__(key, rows[i][key] + more)

    def itself(rows: list[Any], i: int, more: int) -> None:
        rows[i] += more

    def as_text(rows: list[Any], i: int, more: int) -> None:
        rows[i] = f"token_id:{int(rows[i].removeprefix('token_id:')) + more}"

    for key in ("output_ids", "response_token_ids", "token_ids"):
        if key in holder:
            yield holder[key], itself
    if "meta_info" in holder:
        yield holder["meta_info"]["output_token_logprobs"], of_row(1)
    log_probs = holder.get("logprobs") or {}
    rows = log_probs.get("content") or []
    if rows and "token_id" in rows[0]:
        yield rows, of_row("token_id")
    if rows and rows[0].get("token", "").startswith("token_id:"):
        yield rows, lambda rows, i, more: rows[i].update(token=f"token_id:{int(rows[i]['token'][9:]) + more}")
    tokens = log_probs.get("tokens") or []
    if tokens and tokens[0].startswith("token_id:"):
        yield tokens, as_text


def _log_probs(holder: dict[str, Any]) -> list[Any]:
    if "logprobs" not in holder:
        rows: list[Any] = holder["meta_info"]["output_token_logprobs"]
        return rows
    log_probs = holder["logprobs"]
    return log_probs["content"] if "content" in log_probs else log_probs["token_logprobs"]


def _lists(holder: dict[str, Any]) -> Iterator[list[Any]]:
    """All lists with one entry for each token."""
    for key in ("output_ids", "response_token_ids", "token_ids"):
        if key in holder:
            yield holder[key]
    if "meta_info" in holder:
        yield holder["meta_info"]["output_token_logprobs"]
    yield from (holder.get("logprobs") or {}).values()
