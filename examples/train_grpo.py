"""Train a small decoder by GRPO, with the mismatch between engine and trainer measured and corrected.

The trainer is Megatron-Core, the responses come from a separate inference engine. Start it with torchrun, or use
``run.sh`` beside this file, which also installs what is needed.
"""

import logging
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# Megatron-Core tells at import which optional kernels are missing.
warnings.filterwarnings("ignore", module="megatron")
logging.getLogger("megatron").setLevel(logging.ERROR)

import torch.distributed as dist  # noqa: E402
from grpo.arguments import parse_args  # noqa: E402
from grpo.distributed import Ranks, StopRequest  # noqa: E402
from grpo.run import Run  # noqa: E402
from rich.console import Console  # noqa: E402


def main() -> None:
    """Run on this rank; torchrun starts one process per rank."""
    args = parse_args()
    stop = StopRequest()
    stop.install()
    ranks = Ranks.start(context_parallel_size=args.context_parallel_size, seed=args.seed)
    Run(args, ranks, stop).execute(Console())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
