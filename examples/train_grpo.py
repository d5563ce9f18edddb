# SPDX-License-Identifier: Apache-2.0
"""Train a small decoder by GRPO, with the mismatch between engine and trainer measured and corrected.

The trainer is Megatron-Core; the responses come from a separate inference engine. ``run.sh`` in this folder installs
the requirements and starts it. If they are installed, ``python examples/train_grpo.py`` checks what it can, and
starts NPROC ranks (2) with the flags that the configuration needs. ``torchrun`` starts ranks with only the given flags.
"""

import logging
import os
import shlex
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from grpo.arguments import parse_args, parse_command_line
from grpo.output_dir import make_output_dir

# Differs from 1, the code of an unexpected error.
REFUSED = 2


def main() -> None:
    """Check the arguments and start the ranks, or run as one of them."""
    if sys.argv[1:2] == ["--check"]:
        parse_command_line(sys.argv[2:])
    elif "RANK" in os.environ:
        train(parse_args())
    else:
        start_ranks(sys.argv[1:])


def start_ranks(argv: list[str]) -> None:
    """Check once whether it can run, then start torchrun on this program."""
    config = parse_command_line(argv).custom_config_path or Path(__file__).parents[1] / "yaml" / "mis.yaml"
    from launch_flags import launch_flags

    try:
        argv = [*launch_flags(config), *argv]
    except (OSError, TypeError, ValueError) as error:
        refuse(error)
    num_ranks = int(os.environ.get("NPROC", "2"))
    args = parse_args(argv, world_size=num_ranks)
    torchrun = ["--standalone", "--nproc-per-node", str(num_ranks), __file__, *argv]
    if os.environ.get("DRY_RUN"):
        print(shlex.join(["torchrun", *torchrun]))
        return
    output_dir = make_output_dir(args)
    torchrun += ["--output-dir", str(output_dir)]

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The rank itself and the error below report that a rank ended.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(torchrun))
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode != REFUSED:
            raise
        with suppress(OSError):
            # This fails if it is not empty.
            output_dir.rmdir()
        raise SystemExit(REFUSED) from None
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None


def train(args: Namespace) -> None:
    """Run on this rank."""
    import torch.distributed as dist
    from grpo.distributed import Ranks, StopRequest
    from grpo.loss import load_function
    from grpo.run import Run
    from rich.console import Console

    stop = StopRequest()
    stop.install()
    ranks = Ranks.start(context_parallel_size=args.context_parallel_size, seed=args.seed)
    args.output_dir = ranks.broadcast(make_output_dir(args) if ranks.rank == 0 else None)
    refusal = None
    try:
        for path in (args.custom_tis_function_path, args.custom_loss_function_path, args.rollout_data_postprocess_path):
            if path is not None:
                load_function(path)
        run = Run(args, ranks, stop)
    except (AttributeError, ImportError, OSError, ValueError) as error:
        refusal = error
    # Ranks that could start also end here, before they wait for other ranks.
    refusals: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal, group=ranks.control_group)
    for refusal in filter(None, refusals):
        refuse(refusal, quietly=ranks.rank != 0)
    run.execute(Console())
    dist.destroy_process_group()


def refuse(error: Exception, *, quietly: bool = False) -> NoReturn:
    """Print in one line why it cannot run, and exit."""
    if not quietly:
        print("train_grpo.py:", " ".join(str(error).split()), file=sys.stderr)
    raise SystemExit(REFUSED)


if __name__ == "__main__":
    main()
