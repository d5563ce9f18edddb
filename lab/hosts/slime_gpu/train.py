# SPDX-License-Identifier: Apache-2.0
"""A host's own ``train.py``, with a Ray of this machine alone: ``python -m slime_gpu.train HOST`` and its command line.

HOST is ``slime`` or ``miles``. ``ON_CPU=1`` rehearses without a GPU: `host_cpu.device` then stands for CUDA in every
process.
"""

import asyncio
import importlib
import inspect
import os
import sys

import ray
import torch


def main() -> None:
    """Parse with the host's parser, and train with the host's loop."""
    host = sys.argv.pop(1)
    stand_in = "host_cpu.device" if os.environ.get("ON_CPU") else {"miles": "host_cpu.weight_transfer"}.get(host)
    hook = {}
    if stand_in is not None:
        importlib.import_module(stand_in).install()
        hook = {"worker_process_setup_hook": f"{stand_in}.install"}
    num_gpus = max(torch.cuda.device_count(), 1)
    ray.init(
        num_gpus=num_gpus,
        # Ray starts as many workers beforehand. The hosts ask for less than this.
        num_cpus=3 + num_gpus,
        include_dashboard=False,
        _temp_dir=os.environ.get("RAY_TMPDIR"),
        runtime_env=hook,
    )
    import train

    training = train.train(importlib.import_module(f"{host}.utils.arguments").parse_args())
    # Miles' loop is a coroutine.
    if inspect.iscoroutine(training):
        asyncio.run(training)


if __name__ == "__main__":
    main()
