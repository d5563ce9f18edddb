# SPDX-License-Identifier: Apache-2.0
"""What `mis_ext.rollout.generate` takes on the CPU beside slime's own function, in slime's own process.

    PYTHONPATH=~/slime python lab/benchmarks/bench_generate.py TOKENIZER [--samples 512] [--tokens 32 2048]

TOKENIZER is a folder that transformers reads a tokenizer from. The answer of the server is made beforehand, and comes
at once: what is timed is all that the two functions do around it. Both must give the same tokens and log-probs. Prints
CPU seconds for all samples, medians of repeats in turn.
"""

import argparse
import asyncio
import copy
import random
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import slime.rollout.sglang_rollout as own
import slime.utils.http_utils
from slime.utils.types import Sample

from mis_ext.rollout import generate

PROMPT = "What is 7 x 8? Think about it, then answer."
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None} | {
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def host_args(tokenizer: Path, tokens: int) -> Namespace:
    """What both functions read of slime's ``args``."""
    names = ("stop", "stop_token_ids", "max_context_len")
    return Namespace(
        **{f"rollout_{name}": None for name in names},
        **dict.fromkeys(("ci_test", "use_rollout_routing_replay", "partial_rollout"), False),
        hf_checkpoint=str(tokenizer),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=1,
        sglang_server_concurrency=512,
        sglang_dp_size=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=tokens,
        rollout_skip_special_tokens=False,
    )


def answer(num_prompt: int, num_tokens: int) -> dict[str, Any]:
    """As SGLang answers a request with log-probs."""
    draw = random.Random(0)
    ids = [draw.randrange(200) for _ in range(num_tokens)]
    meta_info = {
        "id": "0",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "weight_version": "1",
        "output_token_logprobs": [[-draw.random(), token, None] for token in ids],
    }
    return {"text": "x" * num_tokens, "output_ids": ids, "meta_info": meta_info}


async def cpu_seconds(function: Callable[..., Any], args: Namespace, samples: list[Sample]) -> float:
    """Of all samples at the same time, as in a rollout."""
    sampling = SAMPLING | {"max_new_tokens": args.rollout_max_response_len}
    start = time.process_time()
    await asyncio.gather(*(function(args, sample, dict(sampling)) for sample in samples))
    return time.process_time() - start


async def measure(args: Namespace, *, num_samples: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, after one repeat that does not count."""
    state = own.GenerateState(args)
    prompt_ids = own._prepare_prompt_ids(Sample(prompt=PROMPT), state.tokenizer, None)
    made = answer(len(prompt_ids), args.rollout_max_response_len)

    async def post(*_: Any, **__: Any) -> dict[str, Any]:
        return copy.copy(made)

    own.post = slime.utils.http_utils.post = post
    functions = {"slime": own.generate, "mis_ext": generate}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        found = {}
        for name, function in functions.items():
            samples = [Sample(index=index, prompt=PROMPT) for index in range(num_samples)]
            seconds[name].append(await cpu_seconds(function, args, samples))
            found[name] = [(sample.tokens, sample.rollout_log_probs) for sample in samples]
        if found["slime"] != found["mis_ext"]:
            raise AssertionError("the two functions give different samples")
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def main() -> None:
    """Measure each length, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| samples x tokens | slime's own, ms a sample | mis_ext | more for all samples, s |\n|---|---|---|---|")
    for tokens in options.tokens:
        args = host_args(options.tokenizer, tokens)
        found = asyncio.run(measure(args, num_samples=options.samples, repeats=options.repeats))
        each = {name: 1e3 * seconds / options.samples for name, seconds in found.items()}
        more = found["mis_ext"] - found["slime"]
        print(
            f"| {options.samples} x {tokens:,} | {each['slime']:.2f} | {each['mis_ext']:.2f} | {more:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
