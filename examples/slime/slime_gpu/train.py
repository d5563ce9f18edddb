"""slime's own ``train.py``, with a Ray of this machine alone: ``python -m slime_gpu.train`` with slime's command line.

``ON_CPU=1`` rehearses without a GPU: `host_cpu.device` then stands for CUDA in every process.
"""

import os

import ray
import torch


def main() -> None:
    """Parse with slime's parser, and train with slime's loop."""
    hook = {}
    if os.environ.get("ON_CPU"):
        from host_cpu import device

        device.install()
        hook = {"worker_process_setup_hook": "host_cpu.device.install"}
    num_gpus = max(torch.cuda.device_count(), 1)
    ray.init(
        num_gpus=num_gpus,
        # Ray starts as many workers beforehand. slime asks for less than this.
        num_cpus=3 + num_gpus,
        include_dashboard=False,
        _temp_dir=os.environ.get("RAY_TMPDIR"),
        runtime_env=hook,
    )
    import train
    from slime.utils.arguments import parse_args

    train.train(parse_args())


if __name__ == "__main__":
    main()
