# SPDX-License-Identifier: Apache-2.0
"""Thousands of malformed responses: each is refused by name, or read as if it were whole."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

from responses import recorded, recorded_tokenizer, vllm_chat, vllm_completions

from mis_ext.rollout import generation as errors
from mis_ext.rollout.readers.servers import (
    read_openai_chat,
    read_sglang_chat,
    read_sglang_completions,
    read_sglang_generate,
    read_vllm_chat,
    read_vllm_completions,
)

MUTANTS_OF_EACH = {True: 500, False: 150}
"""Whether they may have several mutations: how many, all different."""
NAMED_ERRORS = {
    errors.AbortedRequest,
    errors.Contradiction,
    errors.CountMismatch,
    errors.LogProbError,
    errors.MalformedResponse,
    errors.UnprovenTokenIds,
}
JUNK = (
    *(None, True, False, -1, 0, 7, 2**31, 10**400, -(10**400)),
    *(5.0, 0.5, -0.5, 1e-30, -9999.0, math.nan, math.inf, -math.inf),
    *("", "7", "-1.5", "token_id:7", "token_id:-1", "abort", "length", "\ufffd"),
    *([], {}, [[]], [None], {"a": {"b": [1]}}, json.loads("[" * 60 + "]" * 60)),
)


class Base(NamedTuple):
    """A whole response.

    Attributes:
        read: Its reader.
        request: What was sent.
        response: What came.
        told_once: What the response tells only once of each token, the log-prob first. No reader can see that it was
            replaced by another legal value, so that such mutants are left out.
        mutations: How many mutations a mutant may have: one, where the second might take away the other witness.
    """

    read: Callable[..., Any]
    request: dict[str, Any]
    response: dict[str, Any]
    told_once: Callable[[dict[str, Any]], list[Any]]
    mutations: tuple[int, ...] = (1, 1, 2, 3)


def once_in_generate(response):
    return [(row[0],) for row in response["meta_info"]["output_token_logprobs"]]


def once_in_completions(response):
    return [(value,) for value in response["choices"][0]["logprobs"]["token_logprobs"]]


def once_in_completions_with_ids(response):
    body = response["choices"][0]
    return list(zip(body["logprobs"]["token_logprobs"], body["token_ids"], strict=True))


def once_in_chat(response):
    return [(row["logprob"],) for row in response["choices"][0]["logprobs"]["content"]]


def once_in_plain_chat(response):
    rows = response["choices"][0]["logprobs"]["content"]
    return [(row["logprob"], row["token"], row["bytes"]) for row in rows]


def told_twice(response):
    return []


def chat_with_prompt_ids(name):
    """The prompt's ids in the request, as in the response: with one witness only, the builder looks at them."""
    request, response = recorded(name)
    return {**request, "input_ids": response["choices"][0]["prompt_token_ids"]}, response


def plain_chat():
    request, response = recorded("chat_meta_info")
    known = read_sglang_chat(request, response)
    del response["choices"][0]["meta_info"], response["choices"][0]["response_token_ids"]
    read = partial(read_openai_chat, tokenizer=recorded_tokenizer(), prompt_ids=known.prompt_ids)
    return Base(read, request, response, once_in_plain_chat)


def vllm_chat_with_prompt_ids():
    request, response = vllm_chat()
    read = partial(read_vllm_chat, prompt_ids=list(response["prompt_token_ids"]))
    return Base(read, request, response, once_in_chat, (1,))


BASES = {
    name: partial(lambda name: Base(read_sglang_generate, *recorded(name), once_in_generate), name)
    for name in (
        "generate_length",
        "generate_stop_token",
        "generate_stop_string",
        "generate_empty",
        "generate_input_log_probs",
        "generate_two_versions",
    )
} | {
    "chat_meta_info": lambda: Base(read_sglang_chat, *chat_with_prompt_ids("chat_meta_info"), told_twice),
    "chat_two": lambda: Base(partial(read_sglang_chat, choice=1), *chat_with_prompt_ids("chat_two"), told_twice),
    "completions_stop": lambda: Base(
        read_sglang_completions, *recorded("completions_stop"), once_in_completions_with_ids
    ),
    "vllm_chat": vllm_chat_with_prompt_ids,
    "vllm_completions": lambda: Base(read_vllm_completions, *vllm_completions(), once_in_completions, (1,)),
    "plain_chat": plain_chat,
}


@pytest.mark.parametrize("name", BASES)
def test_a_mutant_is_refused_by_name_or_read_as_the_whole_response(name) -> None:
    base = BASES[name]()
    whole = base.read(base.request, base.response)
    source, told = json.dumps(base.response), base.told_once(base.response)
    rng = random.Random(name)
    outcomes: Counter[Any] = Counter()
    seen = {source}
    count = MUTANTS_OF_EACH[max(base.mutations) > 1]
    while outcomes.total() < count:
        mutant = {"": json.loads(source)}
        for _ in range(rng.choice(base.mutations)):
            mutate(mutant, rng)
        response = mutant[""]
        as_sent = json.dumps(response)
        if as_sent in seen or tells_another_legal_value(base, response, told):
            continue
        seen.add(as_sent)
        read, error = outcome_of(base, response)
        outcomes[type(error)] += 1
        if error is not None:
            assert type(error) in NAMED_ERRORS
            assert str(error).startswith("request '")
            continue
        assert (read.prompt_ids, read.sampled_ids) == (whole.prompt_ids, whole.sampled_ids), response
        assert set(map(type, read.sampled_ids)) <= {int}, response
        # By repr, which tells every float64 and every type from others.
        assert repr(read.log_probs) == repr(whole.log_probs), response
    assert 0 < outcomes[type(None)] < 0.8 * count, outcomes
    assert len(outcomes) >= 4, outcomes


def outcome_of(base: Base, response: Any) -> tuple[Any, errors.RolloutError | None]:
    try:
        return base.read(base.request, response), None
    except errors.RolloutError as error:
        return None, error


def mutate(mutant: dict[str, Any], rng: random.Random) -> None:
    """One change at a random place: drop, junk, a part from elsewhere, or lists and objects in disorder."""
    holder, key = place_in(mutant, rng)
    value = holder[key]
    kind = rng.choice(("drop", "junk", "junk", "elsewhere", "disorder", "disorder"))
    if kind == "drop" and key != "":
        del holder[key]
    elif kind == "elsewhere":
        other, other_key = place_in(mutant, rng)
        holder[key] = copy(other[other_key])
    elif kind == "disorder" and isinstance(value, list) and value:
        disorder(value, rng)
    elif kind == "disorder" and isinstance(value, dict) and len(value) > 1:
        one, two = rng.sample(sorted(value), 2)
        value[one], value[two] = value[two], value[one]
    else:
        holder[key] = copy(rng.choice(JUNK))


def disorder(values: list[Any], rng: random.Random) -> None:
    one, two = rng.randrange(len(values)), rng.randrange(len(values))
    kind = rng.choice(("swap", "duplicate", "truncate", "reverse", "behead", "extend"))
    if kind == "swap":
        values[one], values[two] = values[two], values[one]
    elif kind == "duplicate":
        values.insert(one, copy(values[two]))
    elif kind == "truncate":
        del values[one:]
    elif kind == "reverse":
        values.reverse()
    elif kind == "behead":
        del values[0]
    else:
        values.append(copy(rng.choice(JUNK)))


def copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def place_in(holder: dict[str, Any], rng: random.Random) -> tuple[Any, Any]:
    """A container below ``holder`` and one of its keys; more often where there is more."""
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        (key,) = rng.choices(
            keys, [len(child) + 1 if isinstance(child := holder[k], (dict, list)) else 1 for k in keys]
        )
        value = holder[key]
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
            return holder, key
        holder = value


def tells_another_legal_value(base: Base, response: Any, told: list[Any]) -> bool:
    """Whether what is told once differs from the original and could as well have been sampled."""
    try:
        now = base.told_once(response)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    known = [row[1:] for row in told]
    return len(now) == len(told) and now != told and all(is_legal(*row, known=known) for row in now)


def is_legal(log_prob: Any, *identity: Any, known: list[Any]) -> bool:
    an_id = len(identity) == 1 and type(identity[0]) is int and 0 <= identity[0] < 2**31
    return type(log_prob) in (int, float) and -9999 < log_prob <= 0 and (an_id or identity in known)
