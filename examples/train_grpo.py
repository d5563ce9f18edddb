"""Train a small decoder by GRPO, with the mismatch between engine and trainer measured and corrected.

The trainer is Megatron-Core, the responses come from a separate inference engine. Start it with torchrun, or use
``run.sh`` beside this file, which also installs what is needed.
"""

import torch.distributed as dist
from grpo.arguments import parse_args
from grpo.distributed import Ranks, StopRequest
from grpo.report import refuse_to_replace
from grpo.run import Run
from rich.console import Console


def main() -> None:
    """Run on this rank; torchrun starts one process per rank."""
    args = parse_args()
    refuse_to_replace(args.output_dir, resume=args.resume, overwrite=args.overwrite)
    stop = StopRequest()
    stop.install()
    ranks = Ranks.start(context_parallel_size=args.context_parallel_size, seed=args.seed)
    Run(args, ranks, stop).execute(Console())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
