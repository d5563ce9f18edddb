# SPDX-License-Identifier: Apache-2.0
"""A host's own ``train.py``, with a Ray of this machine alone: ``python -m slime_gpu.train HOST`` and its command line.

HOST is ``slime`` or ``miles``. ``LOOP=train_async`` takes the other program of the host, ``RAY_ADDRESS`` nodes
that run already. ``ON_CPU=1`` rehearses without a GPU: `host_cpu.device` then stands for CUDA in every process.
"""

import asyncio
import importlib
import inspect
import os
import sys

import ray
import torch

# Two training ranks, and an engine of the framework.
RANKS_ON_CPU = 3


def main() -> None:
    """Parse with the framework's parser, and train with the framework's loop."""
    host = sys.argv.pop(1)
    if os.environ.get("ON_CPU"):
        module, function = "host_cpu.device", "install"
    else:
        module, function = "host_cpu.weight_transfer", "install" if host == "miles" else "install_engine"
    getattr(importlib.import_module(module), function)()
    hook = {"worker_process_setup_hook": f"{module}.{function}"}
    # On a CPU nothing looks whether there is one.
    num_gpus = RANKS_ON_CPU if os.environ.get("ON_CPU") else torch.cuda.device_count()
    own = {
        "num_gpus": num_gpus,
        # Ray starts this many workers beforehand. The frameworks request fewer.
        "num_cpus": 3 + num_gpus,
        "include_dashboard": False,
        "_temp_dir": os.environ.get("RAY_TMPDIR"),
    }
    # Nodes that run already have theirs.
    ray.init(**({} if os.environ.get("RAY_ADDRESS") else own), runtime_env=hook)
    loop = importlib.import_module(os.environ.get("LOOP") or "train")
    training = loop.train(importlib.import_module(f"{host}.utils.arguments").parse_args())
    # Miles' loop is a coroutine.
    if inspect.iscoroutine(training):
        asyncio.run(training)


if __name__ == "__main__":
    main()
