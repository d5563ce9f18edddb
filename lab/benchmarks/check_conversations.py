# SPDX-License-Identifier: Apache-2.0
"""Drawn agents, from what a server sampled to training samples: is every sample the truth, and is every fault found?

    python lab/benchmarks/check_conversations.py [--conversations 10000] [--first 0] [--processes 2]

Each conversation goes the whole way. Agents append, render anew, strip, lose reasoning, retry, repeat, edit, remove
turns, call tools, are aborted, and ask for several answers (``tests/support/agents.py``). What they were answered is
written as SGLang or vLLM write it, whole or as a stream (``wire.py`` there). It is joined, read and built into samples,
which are compared with what was sampled (``truth.py``). Beside each response that is read, one fault is planted in a
copy of it (``wire_faults.py``): it must be refused, or leave exactly the truth.

A number is one conversation, whatever the others are: an error names it, and ``--first`` goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from agents import TEMPLATES, Conversation
from streamed import lines_of
from tiny_tokenizers import TOKENIZERS
from truth import check_ancestors, check_prompts, check_strict, check_tokens
from wire import FORMATS, Wire, wire_of
from wire_faults import EVENT_FAULTS, FAULTS, HARMLESS

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import AbortedRequest, Generation, RolloutError, UnprovenTokenIds

CHUNK = 50


def check(number: int) -> Counter[str]:
    """What happened on the way of one conversation; an ``AssertionError`` where a sample is not the truth."""
    rng = random.Random(number)
    names = [(tokenizer, template) for tokenizer in TOKENIZERS for template in TEMPLATES]
    talk = Conversation(number, *names[number % len(names)])
    counts = Counter[str](conversations=1)
    truth, read = list[Generation](), list[Generation]()
    for exchange in talk.exchanges:
        sampled = sum(len(answer.sampled_ids) for answer in exchange.answers)
        counts["tokens: sampled"] += sampled
        wire = wire_of(exchange, rng.choice(FORMATS), talk.tokenizer, rng)
        if exchange.aborted:
            counts["tokens: aborted"] += sampled
            check_abort(wire, rng)
            counts["responses: aborted"] += 1
            continue
        way = rng.choice(wire.ways())
        known = wire.told(exchange.answers, way)
        counts[f"responses: {wire.format} {way}"] += 1
        try:
            found = arrive(wire, way, rng)
        except UnprovenTokenIds:
            assert (wire.format, way, "sglext" in wire.responses[0]) == ("sglang-chat", "stream", False)
            counts["tokens: without ids"] += sampled
            continue
        assert same(found, known), f"{wire.format}, {way}: read {found}, sampled {known}"
        counts.update(planted(wire, way, known, talk.tokenizer, rng))
        truth += known
        read += [replace(one, request_id=each.request_id) for one, each in zip(found, known, strict=True)]
    built = build_samples(read, policy="split", tokenizer=talk.tokenizer, vocab_size=len(talk.tokenizer))
    check_tokens(truth, built)
    check_prompts(truth, built)
    check_ancestors(truth, built)
    check_strict(read, talk.tokenizer, built)
    metrics = built.metrics()
    counts["samples"] += metrics["samples"]
    counts["tokens: trained"] += metrics["sampled_tokens/trained"]
    counts["tokens: copies"] += metrics["sampled_tokens/dropped"]
    counts.update({f"boundaries: {each.kind.value}": 1 for each in built.boundaries if each.kind is not None})
    lost = counts["tokens: aborted"] + counts["tokens: without ids"] + counts["tokens: copies"]
    assert counts["tokens: trained"] + lost == counts["tokens: sampled"]
    return counts


def arrive(wire: Wire, way: str, rng: random.Random) -> list[Generation]:
    """What the readers make of a response, or of the stream that is cut from it."""
    return wire.read() if way == "whole" else wire.read_lines(lines_of(wire.events(way, rng)))


def same(found: list[Generation], known: list[Generation]) -> bool:
    """Whether samples are the truth, bit for bit and type for type."""
    return [*map(_facts, found)] == [*map(_facts, known)]


def _facts(call: Generation) -> tuple[Any, ...]:
    # By repr, which tells every float64 and every type from others.
    ids = repr([call.prompt_ids, call.sampled_ids, call.log_probs])
    reason = "stop" if call.finish_reason == "tool_calls" else call.finish_reason
    return (ids, reason, *((call.weight_version, call.weight_versions) if call.sampled_ids else ()))


def check_abort(wire: Wire, rng: random.Random) -> None:
    """What a server gave up is no sample, in whichever way it says so."""
    for lines in (None, lines_of(wire.events(wire.ways()[-1], rng)), wire.given_up(rng)):
        try:
            found = wire.read() if lines is None else wire.read_lines(lines)
        except AbortedRequest:
            continue
        raise AssertionError(f"an aborted request was read as {found}")


def planted(wire: Wire, way: str, known: list[Generation], tokenizer: Any, rng: random.Random) -> Iterator[str]:
    """A fault in a copy of a response, and its outcome."""
    is_stream, spoilt = way != "whole", wire.sent(way)
    fault = rng.choice([*FAULTS, *EVENT_FAULTS] if is_stream else [*FAULTS])
    of_events = is_stream and fault in EVENT_FAULTS
    if not of_events and not FAULTS[fault](spoilt, tokenizer, rng):
        return
    try:
        if is_stream:
            events = spoilt.events(way, rng)
            if of_events and not EVENT_FAULTS[fault](events, rng):
                return
            found = spoilt.read_lines(lines_of(events))
        else:
            found = spoilt.read()
    except RolloutError:
        yield f"faults: {fault}, refused"
        return
    assert fault in HARMLESS, f"{fault} of {wire.format}, {way}, was read"
    assert same(found, known), f"{fault} of {wire.format}, {way}, passed silently"
    yield f"faults: {fault}, harmless"


def check_some(numbers: range) -> Counter[str]:
    """The counts of several conversations."""
    counts = Counter[str]()
    for number in numbers:
        try:
            counts.update(check(number))
        except Exception as error:
            raise RuntimeError(f"conversation {number}: {error!r}") from error
    return counts


def main() -> None:
    """Check, and print what happened as a table."""
    from rich.console import Console
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    end = options.first + options.conversations
    chunks = [range(start, min(start + CHUNK, end)) for start in range(options.first, end, CHUNK)]
    counts = Counter[str]()
    progress = partial(track, description="conversations", total=len(chunks), console=Console(stderr=True))
    with ProcessPoolExecutor(options.processes) as pool:
        for found in progress(pool.map(check_some, chunks)):
            counts.update(found)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tokenizers", "transformers"))
    print(f"Python {platform.python_version()}, {versions}; conversations {options.first} to {end - 1}\n")
    print("| | |\n|---|---|")
    for name in sorted(counts):
        print(f"| {name} | {counts[name]:,} |")


if __name__ == "__main__":
    main()
