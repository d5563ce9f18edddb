# SPDX-License-Identifier: Apache-2.0
"""What ``mis-ext check-rollouts`` costs: by default 500 MB of log, conversations of 20 turns and 32,768 tokens.

    python lab/benchmarks/bench_check_rollouts.py [--megabytes 500] [--repeats 3] [--log PATH] [--smoke]

Writes logs, or takes the one at ``--log``, and prints a Markdown table: wall and CPU seconds of the whole command, with
and without a tokenizer (a folder, or its ``tokenizer.json``), medians of repeats. On a busy machine CPU seconds tell
more. The lines are as SGLang's ``/generate`` returns them, calls of eight conversations in turn; every prompt repeats
all known ids, or the client renders every turn anew from its text.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from bench_rollout import MIXES, Shape
from tiny_tokenizers import english_tokenizer

from mis_ext.rollout.generation import Generation

SHAPE = Shape(conversations=8, turns=20, tokens=32768)
PACKAGES = ("mis_ext", "rich", "msgspec", "tokenizers", "transformers")
COMMAND = "import sys; from mis_ext.tools.cli import main; sys.exit(main(['check-rollouts', *sys.argv[1:]]))"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--log", type=Path, help="a log of other calls, whose command must pass or fail as it may")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a small log, once: does it run?")
    options = parser.parse_args()
    size, repeats = (1, 1) if options.smoke else (options.megabytes, options.repeats)
    print(f"hardware: {platform.machine()}, {os.cpu_count()} CPUs")
    print(f"versions: Python {platform.python_version()}, {', '.join(_versions())}")
    print(f"logs of {size} MB; medians of {repeats}\n" if options.log is None else f"medians of {repeats}\n")
    print("| log | tokenizer | s | min | max | CPU s | MB/s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer")
        english_tokenizer().save_pretrained(tokenizer)
        for mix in ("contiguous", "retokenized") if options.log is None else (str(options.log),):
            log = options.log or _write(Path(folder, f"{mix}.jsonl"), mix, size * 1_000_000, options.seed)
            for name, path in (("none", None), ("folder", tokenizer), ("file", tokenizer / "tokenizer.json")):
                arguments = [] if path is None else ["--tokenizer", str(path)]
                print(f"| {mix} | {name} | {_measure(log, arguments, repeats)} |", flush=True)


def _measure(log: Path, arguments: list[str], repeats: int) -> str:
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([sys.executable, "-c", COMMAND, str(log), *arguments], capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
        seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    speed = log.stat().st_size / 1e6 / statistics.median(seconds)
    times = (statistics.median(seconds), min(seconds), max(seconds), statistics.median(cpu_seconds))
    return " | ".join(f"{each:.1f}" for each in (*times, speed))


def _write(path: Path, mix: str, size: int, seed: int) -> Path:
    tokenizer, written = english_tokenizer(), 0
    with path.open("w") as file:
        for group in count():
            talks = [(f"{group}-{number}", random.Random(f"{seed} {group} {number}")) for number in range(8)]
            calls = zip(*(_lines(name, MIXES[mix](rng, SHAPE), tokenizer) for name, rng in talks), strict=True)
            for lines in calls:
                written += sum(map(file.write, lines))
            if written >= size:
                return path
    raise AssertionError("count ends")


def _lines(conversation: str, calls: Iterator[Generation], tokenizer: Any) -> Iterator[str]:
    for call in calls:
        ids = call.sampled_ids
        meta = {
            "id": f"{conversation} {call.request_id}",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(call.prompt_ids),
            "weight_version": "1",
            "output_token_logprobs": [[x, i, None] for x, i in zip(call.log_probs, ids, strict=True)],
            "completion_tokens": len(ids),
        }
        response = {"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}
        request = {"input_ids": call.prompt_ids, "sampling_params": {"temperature": 0.7}, "return_logprob": True}
        yield json.dumps({"conversation": conversation, "request": request, "response": response}) + "\n"


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} none"


if __name__ == "__main__":
    main()
