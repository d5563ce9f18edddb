# SPDX-License-Identifier: Apache-2.0
"""A framework's own ``train.py`` on a CPU: ``python -m host_cpu.train [--float32] HOST`` and its command line.

Does what ``train.py`` does as a program, after `host_cpu.device.install` and a Ray of this machine alone.
"""

import asyncio
import importlib
import inspect
import os
import sys

import ray
import torch

from . import device

MOST_RANKS = 4


def main() -> None:
    """Parse with the framework's parser, and train with the framework's loop."""
    is_float32 = sys.argv[1] == "--float32"
    host = sys.argv.pop(1 + is_float32)
    del sys.argv[1 : 1 + is_float32]
    device.install()
    # The frameworks request a GPU per rank from Ray, but nothing checks whether it exists. Running nodes have their
    # own.
    own = {"num_gpus": MOST_RANKS, "num_cpus": 8, "include_dashboard": False, "_temp_dir": os.environ.get("RAY_TMPDIR")}
    given = {} if "RAY_ADDRESS" in os.environ else own
    ray.init(**given, runtime_env={"worker_process_setup_hook": "host_cpu.device.install"})
    import train

    arguments = importlib.import_module(f"{host}.utils.arguments")
    args = arguments.parse_args()
    if is_float32:
        # The frameworks have no flag for this.
        args.bf16, args.params_dtype = False, torch.float32
    training = train.train(args)
    # Miles' loop is a coroutine.
    if inspect.iscoroutine(training):
        asyncio.run(training)


if __name__ == "__main__":
    main()
