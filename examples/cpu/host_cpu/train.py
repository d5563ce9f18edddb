"""A host's own ``train.py`` on a CPU: ``python -m host_cpu.train HOST`` and the host's command line.

Does what ``train.py`` does as a program, after `host_cpu.device.install` and a Ray of this machine alone.
"""

import asyncio
import importlib
import inspect
import os
import sys

import ray

from . import device


def main() -> None:
    """Parse with the host's parser, and train with the host's loop."""
    host = sys.argv.pop(1)
    device.install()
    # The hosts ask Ray for one GPU; nothing looks whether there is one.
    ray.init(
        num_gpus=1,
        num_cpus=8,
        include_dashboard=False,
        _temp_dir=os.environ.get("RAY_TMPDIR"),
        runtime_env={"worker_process_setup_hook": "host_cpu.device.install"},
    )
    import train

    arguments = importlib.import_module(f"{host}.utils.arguments")
    training = train.train(arguments.parse_args())
    # Miles' loop is a coroutine.
    if inspect.iscoroutine(training):
        asyncio.run(training)


if __name__ == "__main__":
    main()
