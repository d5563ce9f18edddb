# SPDX-License-Identifier: Apache-2.0
"""Canary and cache key along Miles' own way to its engine, on a CPU, off and on: ``miles_canary.py MODEL``.

    PYTHONPATH=$MILES_DIR:.:lab/hosts:examples:examples/grpo/sglang_cpu $VENV/bin/python lab/hosts/miles_canary.py MODEL

Unmodified are Miles' rollout (state, client, reward function), its router, and SGLang's server. There is no trainer:
new weights come from a folder, then a new name comes without weights. MODEL is a small model of transformers.
"""

import asyncio
import json
import socket
import sys
import threading
import time
import warnings
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import uvicorn
from miles.rollout import sglang_rollout
from miles.rollout.data_source import Sample
from miles.router.router import MilesRouter
from miles.utils import http_utils
from tokens.server import call_server, sglang_server
from transformers import AutoModelForCausalLM

from mis_ext.rollout import StaleWeightsWarning

PROMPTS, SAMPLES = 2, 2


class Arguments(Namespace):
    """Miles' arguments as far as its rollout reads them; None for the rest."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


async def reward(args, sample, **_):
    """Of no importance."""
    return float(len(sample.tokens) % 2)


def arguments(model: Path, port: int, settings: dict | None) -> Arguments:
    """Of a run with one engine behind Miles' router."""
    generation = {"custom_generate_function_path": "mis_ext.rollout.generate", "custom_rm_path": "miles_canary.reward"}
    sampling = {"rollout_temperature": 0.7, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_response_len": 8}
    sizes = {"rollout_batch_size": PROMPTS, "over_sampling_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES}
    engines = {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, "eval_num_gpus": 0}
    engines["sglang_server_concurrency"] = 8
    router = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": port, "use_miles_router": True}
    health = {"rollout_health_check_interval": 60, "miles_router_health_check_failure_threshold": 3}
    return Arguments(
        hf_checkpoint=str(model),
        rollout_global_dataset=True,
        rollout_skip_special_tokens=False,
        partial_rollout=False,
        on_policy_tokens=settings,
        rollout_max_context_len=2048,
        **generation,
        **sampling,
        **sizes,
        **engines,
        **router,
        **health,
    )


def samples(number: int) -> list[list[Sample]]:
    """As the data source gives them."""
    text = "Ada adds 17 and 25. " * 20
    return [
        [
            Sample(prompt=f"{text} Question {group}.", group_index=group, index=group * SAMPLES + place)
            for place in range(SAMPLES)
        ]
        for group in range(number)
    ]


def free_port() -> int:
    """For the router."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def rollout(args: Arguments, number: int) -> dict:
    """One rollout, and what it says of the engine."""
    # Each rollout has a loop of its own here.
    type(sglang_rollout.GenerateState)._instances.clear()
    http_utils._http_client = None
    http_utils.init_http_client(args)
    before = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StaleWeightsWarning)
        output, _ = asyncio.run(sglang_rollout.generate_rollout_async(args, number, samples))
    seconds = time.monotonic() - before
    found = [sample for group in output.samples for sample in group]
    words = [str(each.message) for each in caught if issubclass(each.category, StaleWeightsWarning)]
    counts = [sample.metadata["on_policy_tokens"] for sample in found]
    return {
        "samples": len(found),
        "versions": sorted({version for sample in found for version in sample.weight_versions}),
        "canary": sorted({name for each in counts for name in each if name.startswith("canary")}),
        "train_metadata": sorted(
            {str((sample.train_metadata or {}).get("on_policy_tokens_canary")) for sample in found}
        ),
        "warnings": [word.partition(": ")[2] for word in words],
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Three rollouts without the keys, and three with them."""
    model = Path(sys.argv[1])
    port = free_port()
    with TemporaryDirectory() as folder, sglang_server(model, weight_version="1") as engine:
        new = AutoModelForCausalLM.from_pretrained(model)
        torch.manual_seed(2)
        with torch.no_grad():
            for weight in new.parameters():
                weight += 0.05 * weight.std() * torch.randn_like(weight)
        new.save_pretrained(folder)
        router = MilesRouter(arguments(model, port, None))
        server = uvicorn.Server(uvicorn.Config(router.app, host="127.0.0.1", port=port, log_level="warning"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.1)
        call_server(port, f"/add_worker?url=http://127.0.0.1:{engine}", {})
        keep = {"flush_cache": False, "abort_all_requests": False}
        updates = (
            ("/update_weights_from_disk", {"model_path": str(model), "weight_version": "1", "flush_cache": True}),
            ("/update_weights_from_disk", {"model_path": folder, "weight_version": "2", **keep}),
            ("/update_weight_version", {"new_version": "3", **keep}),
        )
        for name, settings in (("off", None), ("on", {"cache_by_version": True, "canary": "warn"})):
            for number, (path, body) in enumerate(updates):
                call_server(engine, path, body)
                print(name, json.dumps(rollout(arguments(model, port, settings), number)), flush=True)
        server.should_exit = True


if __name__ == "__main__":
    main()
