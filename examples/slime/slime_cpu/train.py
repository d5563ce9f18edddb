"""slime's own ``train.py`` on a CPU: ``python -m slime_cpu.train`` with slime's command line.

Does what ``train.py`` does as a program, after `slime_cpu.device.install` and a Ray of this machine alone.
"""

import os

import ray

from . import device


def main() -> None:
    """Parse with slime's parser, and train with slime's loop."""
    device.install()
    # slime asks Ray for one GPU; nothing looks whether there is one.
    ray.init(
        num_gpus=1,
        num_cpus=8,
        include_dashboard=False,
        _temp_dir=os.environ.get("RAY_TMPDIR"),
        runtime_env={"worker_process_setup_hook": "slime_cpu.device.install"},
    )
    import train
    from slime.utils.arguments import parse_args

    train.train(parse_args())


if __name__ == "__main__":
    main()
