"""Records ``losses.pt.xz`` anew: loss, metrics and gradients of the hosts' own policy losses, run here on a CPU.

The hosts' code is not part of this repository. With a clone of each, and httpx installed, from the repository's root:

    python tests/data/host_losses/record.py --slime ~/slime --miles ~/miles [--check] [--compiled]

Each host runs at one revision (``REVISIONS``, and in the file) on the micro-batch and the options of
``tests/loss_cases.py``, with the hook of mis_ext where an option has a correction; some options also with two
context-parallel ranks, in Miles packed and padded. ``--check`` writes nothing. It compares the hosts' own losses with
the file, and ``mis_ext.policy_loss`` with them: that one runs in each host's process, where it takes the host's own
groups and log-probs. With ``--compiled`` the hosts' small functions are compiled, as they are on a GPU.
"""

from __future__ import annotations

import argparse
import lzma
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FILE = HERE / "losses.pt.xz"
REVISIONS = {
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "miles": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
}
RTOL, ATOL = 1e-5, 1e-6
NO_CACHED_GRAPHS = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""With them torch 2.13 takes a graph of other clip bounds from the disk (docs/errors.md): ``gspo`` is wrong then."""

sys.path += [str(ROOT), str(HERE.parents[1])]

import loss_cases  # noqa: E402


def recorded(function: Callable, batch: dict, reducer: Callable, options: dict) -> dict[str, Any]:
    """What a loss function gives on this rank."""
    args = loss_cases.host_args(**options)
    local = loss_cases.with_options(batch, args)
    logits = local.pop("logits").clone().requires_grad_()
    loss, metrics = function(args, local, logits, reducer(args, local))
    loss.backward()
    metrics = {name: torch.as_tensor(value).detach().float().reshape(()) for name, value in metrics.items()}
    return {"loss": loss.detach(), "metrics": metrics, "gradient": logits.grad}


def all_recorded(host: str, function: Callable, reducer: Callable, place: dict, *, check: bool) -> dict[str, dict]:
    """Every option on this rank, by whose loss it is."""
    functions = {"host": function}
    if check:
        import mis_ext

        functions["mis_ext"] = mis_ext.policy_loss
    out: dict[str, dict] = {each: {} for each in functions}
    for name, options in loss_cases.OPTIONS.items():
        if host != "slime" and name in loss_cases.OF_SLIME_ONLY:
            continue
        if place["cp_size"] > 1 and name not in loss_cases.CONTEXT_PARALLEL:
            continue
        if place.get("is_padded") and name in loss_cases.NOT_PADDED:
            continue
        options = options | {"qkv_format": "bshd" if place.get("is_padded") else "thd"}
        batch = loss_cases.local_batch(loss_cases.whole_batch(), **place)
        for whose, loss in functions.items():
            out[whose][name] = recorded(loss, dict(batch), reducer, options)
    return out


def slime_rank(rank: int, cp_size: int, store: str, folder: str, check: bool) -> None:
    """One rank of slime's trainer."""
    import torch.distributed as dist
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
    from slime.backends.megatron_utils.loss import policy_loss_function

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=cp_size)
    mpu.initialize_model_parallel(context_parallel_size=cp_size)

    def reducer(args: Any, batch: dict) -> Callable:
        lengths = batch["total_lengths"], batch["response_lengths"]
        return get_sum_of_sample_mean(
            *lengths, batch["loss_masks"], batch["rollout_mask_sums"], args.calculate_per_token_loss
        )

    place = {"cp_rank": rank, "cp_size": cp_size}
    found = all_recorded("slime", policy_loss_function, reducer, place, check=check)
    torch.save(found, f"{folder}/cp{cp_size}-thd-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def miles_rank(rank: int, cp_size: int, store: str, folder: str, check: bool) -> None:
    """One rank of Miles' trainer."""
    import torch.distributed as dist
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=cp_size)
    alone = [dist.new_group([other]) for other in range(cp_size)][rank]
    names = ("tp", "intra_dp", "pp", "ep", "etp", "indep_dp")
    groups = {name: GroupInfo(rank=0, size=1, group=alone) for name in names}
    everyone = GroupInfo(rank=rank, size=cp_size, group=dist.group.WORLD)
    set_parallel_state(ParallelState(**groups, cp=everyone, intra_dp_cp=everyone))

    def reducer(args: Any, batch: dict) -> Callable:
        return get_sum_of_sample_mean(
            batch["total_lengths"],
            batch["response_lengths"],
            batch["loss_masks"],
            args.calculate_per_token_loss,
            args.qkv_format,
            batch.get("max_seq_lens"),
            denominators=batch["rollout_mask_sums"],
        )

    for is_padded in (False, True) if cp_size > 1 else (False,):
        place = {"cp_rank": rank, "cp_size": cp_size, "is_padded": is_padded}
        found = all_recorded("miles", policy_loss_function, reducer, place, check=check)
        torch.save(found, f"{folder}/cp{cp_size}-{'bshd' if is_padded else 'thd'}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class _Stub(types.ModuleType):
    """ray, which Miles imports for what is not used here: decorators, and classes that are annotated with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **_: arguments[0] if arguments and callable(arguments[0]) else lambda f: f


def run_host(host: str, folder: str, *, check: bool) -> None:
    """All ranks, in this process and its children."""
    import torch.multiprocessing as mp

    warnings.simplefilter("ignore")
    if host == "miles":
        sys.modules["ray"] = _Stub("ray")
        import miles.backends.training_utils.loss_hub.losses  # noqa: F401
    else:
        import slime.backends.megatron_utils.loss  # noqa: F401
    for cp_size in (1, 2):
        # Forked, so that Megatron-Core is imported once.
        mp.start_processes(
            slime_rank if host == "slime" else miles_rank,
            args=(cp_size, f"{folder}/store{cp_size}", folder, check),
            nprocs=cp_size,
            start_method="fork",
        )


def run_hosts(clones: dict[str, Path], *, check: bool, compiled: bool) -> dict[str, dict]:
    """What each rank of each topology gave, by whose loss it is."""
    found: dict[str, dict] = {"host": {}, "mis_ext": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for host, revision in REVISIONS.items():
            source, folder = Path(temporary) / f"{host}-source", Path(temporary) / host
            source.mkdir()
            folder.mkdir()
            archive = ["git", "-C", str(clones[host]), "archive", revision, host]
            subprocess.run(
                ["tar", "x", "-C", str(source)],
                input=subprocess.run(archive, check=True, capture_output=True).stdout,
                check=True,
            )
            path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
            environment = os.environ | NO_CACHED_GRAPHS | {"PYTHONPATH": path}
            if not compiled:
                # A CPU has no use for it, and may have no compiler.
                environment["TORCHDYNAMO_DISABLE"] = "1"
            command = [sys.executable, __file__, "--one", host, str(folder), *(["--check"] if check else [])]
            subprocess.run(command, env=environment, check=True)
            for file in sorted(folder.glob("*.pt")):
                topology, rank = file.stem.rsplit("-", 1)
                for whose, losses in torch.load(file).items():
                    found[whose].setdefault(f"{host}-{topology}", {})[int(rank)] = losses
    return found


def differences(host: str, found: dict[str, dict], wanted: dict[str, dict]) -> dict[str, str]:
    """How the losses of a rank differ, by the name of the option; those that do not are left out."""
    out = {}
    for name in found.keys() | wanted.keys():
        if name not in found or name not in wanted:
            out[name] = "it is not in both"
            continue
        both = [loss_cases.without_differences(host, name, of[name]) for of in (found, wanted)]
        try:
            assert [*both[0]["metrics"]] == [*both[1]["metrics"]], "other names of metrics, or another order"
            torch.testing.assert_close(*both, rtol=RTOL, atol=ATOL)
        except AssertionError as error:
            out[name] = " ".join(str(error).split())
    return out


def check(found: dict[str, dict]) -> int:
    """Print what is compared, and how it differs; the exit code."""
    with lzma.open(FILE, "rb") as file:
        record = torch.load(file)
    revisions = record.pop("revisions")
    comparisons = {
        "the hosts' own against the file": (found["host"], record),
        "mis_ext.policy_loss against the hosts' own": (found["mis_ext"], found["host"]),
    }
    is_wrong = revisions != REVISIONS
    print(f"equal: within {RTOL:g} of a value plus {ATOL:g}")
    if is_wrong:
        print(f"{FILE.name} is of other revisions: {revisions}")
    for title, (ours, theirs) in comparisons.items():
        print(f"\n{title}:")
        for topology in sorted(ours.keys() | theirs.keys()):
            ranks = [of.get(topology, {}) for of in (ours, theirs)]
            for rank in sorted(ranks[0].keys() | ranks[1].keys()):
                both = [of.get(rank, {}) for of in ranks]
                wrong = differences(topology.partition("-")[0], *both)
                print(f"  {topology}, rank {rank}: {len(both[0])} losses, {len(wrong)} differ")
                print(*(f"    {name}: {what}\n" for name, what in sorted(wrong.items())), sep="", end="")
                is_wrong |= bool(wrong)
    return int(is_wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, or check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slime", type=Path, required=True)
    parser.add_argument("--miles", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="write nothing, compare; exit code 1 if something differs")
    parser.add_argument("--compiled", action="store_true", help="compile what the hosts compile; goes with --check")
    options = parser.parse_args(arguments)
    if options.compiled and not options.check:
        parser.error("what is recorded is not compiled: --compiled goes with --check")
    clones = {host: getattr(options, host) for host in REVISIONS}
    found = run_hosts(clones, check=options.check, compiled=options.compiled)
    if options.check:
        return check(found)
    with lzma.open(FILE, "wb", preset=9) as file:
        torch.save({"revisions": REVISIONS} | found["host"], file)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_host(sys.argv[2], sys.argv[3], check="--check" in sys.argv)
    else:
        sys.exit(main())
