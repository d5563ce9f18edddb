# SPDX-License-Identifier: Apache-2.0
"""What it costs to build training samples from conversations: by default 1,000 of 20 turns and 32,768 tokens.

    python lab/benchmarks/bench_rollout.py [--conversations 1000] [--tokens 32768] [--processes 2] [--smoke]

Prints a Markdown table: seconds to build all conversations, per mix of boundaries, the median of repeats. The mixes:

- ``contiguous``: every prompt repeats all known ids. Policy ``strict``, no tokenizer.
- ``retokenized``: the client renders every turn anew from its text, so that each call is its own sample.
- ``reasoning stripped``: every prompt lost the reasoning of the turn before it, so that each call is its own sample.
- ``mixed``: a boundary in four is one of re-tokenized, retry, duplicate, fork; the others are contiguous.

All but the first have policy ``split`` and a tokenizer. Ids are made as a JSON parser makes
them: each prompt has integers of its own, so that comparing two lists reads both. Making them is not timed. With two
processes each takes half of the conversations; the time is that of the slower one. On a busy machine CPU seconds tell
more than seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import random
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from tiny_tokenizers import ENGLISH_TEXT, encode, encode_bytewise, english_tokenizer

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import Generation, Policy

REPEATS = 3
TOOL_SHARE = 0.5


class Shape(NamedTuple):
    """How many conversations, the turns of each, and the tokens of its last prompt and what was sampled then."""

    conversations: int
    turns: int
    tokens: int


class Part(NamedTuple):
    """A turn: what is sampled, how the client repeats it, and what stands behind it in the next prompt."""

    sampled: list[int]
    repeated: list[int]
    observation: list[int]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--boundaries", nargs="+", choices=MIXES, default=[*MIXES])
    parser.add_argument("--smoke", action="store_true", help="a small shape, once: does it run?")
    options = parser.parse_args()
    shape = Shape(options.conversations, options.turns, options.tokens)
    repeats = 1 if options.smoke else REPEATS
    if options.smoke:
        shape = Shape(4, 5, 1000)
    print(f"hardware: {platform.machine()} CPU, {options.processes} processes")
    versions = {name: importlib.metadata.version(name) for name in ("mis_ext", "tokenizers", "transformers")}
    print(f"versions: Python {platform.python_version()}, " + ", ".join(" ".join(each) for each in versions.items()))
    print(
        f"shape: {shape.conversations} conversations, {shape.turns} turns, {shape.tokens} tokens; seed {options.seed}"
    )
    print(f"median of {repeats} repeats\n")
    print("| boundaries | s | min | max | CPU s | sampled tokens trained | boundaries found |")
    print("|---|---|---|---|---|---|---|")
    for name in options.boundaries:
        run = partial(_run, name, shape, options.seed, options.processes)
        with ProcessPoolExecutor(options.processes) as pool:
            results = [[*pool.map(run, range(options.processes))] for _ in range(repeats)]
        seconds = [max(each for each, _, _ in result) for result in results]
        cpu = statistics.median(max(each for _, each, _ in result) for result in results)
        counts = sum((each for _, _, each in results[0]), Counter[str]())
        kinds = {key.split("/")[1]: counts[key] for key in sorted(counts) if key in KINDS and counts[key]}
        share = f"{counts['sampled_tokens/trained']} of {counts['sampled_tokens']}"
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        times = " | ".join(f"{each:.2f}" for each in (statistics.median(seconds), min(seconds), max(seconds)))
        print(f"| {name} | {times} | {cpu:.2f} | {share} | {found} |")


def _run(name: str, shape: Shape, seed: int, processes: int, process: int) -> tuple[float, float, Counter[str]]:
    """Seconds, CPU seconds and counts of every ``processes``-th conversation."""
    seconds, cpu_seconds, counts = 0.0, 0.0, Counter[str]()
    make = MIXES[name]
    tokenizer = None if make is _contiguous else _tokenizer()
    policy: Policy = "split" if tokenizer else "strict"
    vocab_size = len(_tokenizer())
    for number in range(process, shape.conversations, processes):
        calls = [*make(random.Random(seed * 1_000_003 + number), shape)]
        start = time.perf_counter()
        cpu_start = time.process_time()
        built = build_samples(calls, policy=policy, tokenizer=tokenizer, vocab_size=vocab_size)
        metrics = built.metrics()
        seconds += time.perf_counter() - start
        cpu_seconds += time.process_time() - cpu_start
        counts.update(metrics)
    return seconds, cpu_seconds, counts


def _contiguous(rng: random.Random, shape: Shape) -> Iterator[Generation]:
    return _talk(rng, shape, lambda text: Part(text, text, []))


def _retokenized(rng: random.Random, shape: Shape) -> Iterator[Generation]:
    return _talk(rng, shape, lambda text: _split_word(rng, text))


def _reasoning_stripped(rng: random.Random, shape: Shape) -> Iterator[Generation]:
    opening, closing = encode(_tokenizer(), "<think>\n"), encode(_tokenizer(), "\n</think>\n\n")
    return _talk(rng, shape, lambda text: Part(opening + text + closing + text[:10], text[:10], []))


def _mixed(rng: random.Random, shape: Shape) -> Iterator[Generation]:
    for call in _talk(
        rng, shape, lambda text: _split_word(rng, text) if rng.random() < 1 / 16 else Part(text, text, [])
    ):
        event = rng.random() * 16
        if event < 1:
            yield call
        elif event < 2:
            yield _call(rng, f"{call.request_id} again", list(call.prompt_ids), call.sampled_ids[::-1])
        elif event < 3:
            other = encode(_tokenizer(), " Edited")
            yield _call(
                rng, f"{call.request_id} edited", [*call.prompt_ids, *other, *call.sampled_ids], call.sampled_ids
            )
        yield call


MIXES: dict[str, Callable[[random.Random, Shape], Iterator[Generation]]] = {
    "contiguous": _contiguous,
    "retokenized": _retokenized,
    "reasoning stripped": _reasoning_stripped,
    "mixed": _mixed,
}
KINDS = {
    f"boundaries/{kind}"
    for kind in (
        "contiguous",
        "retokenized",
        "retry",
        "fork",
        "duplicate",
        "reasoning_stripped",
        "history_edited",
        "retemplated",
    )
}


def _talk(rng: random.Random, shape: Shape, write: Callable[[list[int]], Part]) -> Iterator[Generation]:
    """Calls whose prompts grow by equal parts: half of it sampled, half the result of a tool."""
    tokenizer, end = _tokenizer(), encode(_tokenizer(), "<|im_end|>")
    opening = encode(tokenizer, "\n<|im_start|>assistant\n")
    size = shape.tokens // shape.turns
    prompt = encode(tokenizer, "<|im_start|>user\nWhat is the weather in London?<|im_end|>") + opening
    for number in range(shape.turns):
        part = write(_text(rng, int(size * (1 - TOOL_SHARE))))
        yield _call(rng, str(number), prompt, [*part.sampled, *end])
        tool = encode(tokenizer, "\n<|im_start|>user\n<tool_response>\n") + _text(rng, int(size * TOOL_SHARE)) + end
        prompt = prompt + part.repeated + end + tool + opening


def _call(rng: random.Random, name: str, prompt: list[int], sampled: list[int]) -> Generation:
    return Generation(
        request_id=name,
        # An array makes every integer anew.
        prompt_ids=array("q", prompt).tolist(),
        sampled_ids=array("q", sampled).tolist(),
        log_probs=[-rng.random() for _ in sampled],
        finish_reason="stop",
        weight_version="1",
    )


def _text(rng: random.Random, size: int) -> list[int]:
    """About ``size`` ids that the tokenizer itself would choose: whole lines of its text."""
    ids = list[int]()
    while len(ids) < size:
        ids += rng.choice(_lines())
    return ids


def _split_word(rng: random.Random, text: list[int]) -> Part:
    """The last line was sampled in bytes; the client repeats it in words."""
    line = rng.choice(_lines())
    return Part([*text, *encode_bytewise(_tokenizer(), _tokenizer().decode(line))], [*text, *line], [])


@cache
def _tokenizer() -> Any:
    return english_tokenizer()


@cache
def _lines() -> list[list[int]]:
    lines = [line for line in ENGLISH_TEXT.split("\n") if line and line.isascii()]
    return [encode(_tokenizer(), f"{line}\n") for line in lines]


if __name__ == "__main__":
    main()
