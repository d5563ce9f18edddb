# SPDX-License-Identifier: Apache-2.0
"""Records ``losses.pt.xz`` again: loss, metrics and gradients of the frameworks' own policy losses, run here on a CPU.

The hosts' code is not part of this repository. With a clone of each, and httpx installed, from the repository's root:

    python lab/peers/host_losses/record.py --slime ~/slime --miles ~/miles [--check] [--compiled]

Each host runs at one revision (``REVISIONS``, and in the file) on the micro-batch and the options of
``tests/support/loss_cases.py``, with the hook of mis_ext where an option has a correction; some options also with two
context-parallel ranks, in Miles packed and padded. ``--check`` writes nothing. It compares the hosts' own losses with
the file, and ``mis_ext.policy_loss`` with them: that one runs in each host's process, where it takes the host's own
groups, once with the host's own log-probs and once with fused scoring. There are then more options, which are about
scoring, and two tensor-parallel ranks. With ``--compiled`` the hosts' small functions are compiled, as they are on a
GPU.
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
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "data" / "host_losses" / "losses.pt.xz"
REVISIONS = {
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "miles": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
}
RTOL, ATOL = 1e-5, 1e-6
FUSED = 2e-6
"""Tolerance of fused scoring, as a share of the largest entry of loss, metrics and gradient."""
SMALLEST = {"loss": 0.1}
"""The terms of a loss have both signs. If they cancel, a share of the rest is not informative."""
WHOSE = ("host", "mis_ext", "fused")
"""The framework's own loss, and ours with the framework's log-probs and with fused scoring."""
ROUNDED = 2**-8
"""The same for the gradient in Miles, which scores by a function of Megatron-Core that rounds it to bfloat16."""
TOPOLOGIES = {False: ((1, 1), (2, 1)), True: ((1, 1), (2, 1), (1, 2))}
"""Context- and tensor-parallel ranks, by whether it is checked."""
NO_CACHED_GRAPHS = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""With them torch 2.13 takes a graph of other clip bounds of the disk: ``gspo`` is wrong (docs/reference/errors.md)."""

sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

import loss_cases  # noqa: E402


def recorded(function: Callable, batch: dict, reducer: Callable, options: dict) -> dict[str, Any]:
    """The result of a loss function on this rank."""
    args = loss_cases.host_args(**options)
    local = loss_cases.with_options(batch, args)
    logits = local.pop("logits").clone().requires_grad_()
    loss, metrics = function(args, local, logits, reducer(args, local))
    loss.backward()
    metrics = {name: torch.as_tensor(value).detach().float().reshape(()) for name, value in metrics.items()}
    return {"loss": loss.detach(), "metrics": metrics, "gradient": logits.grad}


def options_of(host: str, place: dict, *, check: bool) -> dict[str, dict]:
    """The options that this host has on such ranks."""
    chosen = loss_cases.OPTIONS | (loss_cases.NOT_RECORDED if check else {})
    if host != "slime":
        chosen = {name: keys for name, keys in chosen.items() if name not in loss_cases.OF_SLIME_ONLY}
    if host != "miles":
        chosen = {name: keys for name, keys in chosen.items() if name not in loss_cases.OF_MILES_ONLY}
    if place["cp_size"] * place["tp_size"] > 1:
        chosen = {
            name: keys
            for name, keys in chosen.items()
            # Miles' own function fails with one token of a response on a rank.
            if name in (*loss_cases.CONTEXT_PARALLEL, *loss_cases.NOT_RECORDED) and name != "true on-policy"
        }
    if place["is_padded"]:
        chosen = {name: keys for name, keys in chosen.items() if name not in loss_cases.NOT_PADDED}
    return chosen


def local_batch(keys: dict, place: dict) -> dict:
    """The micro-batch of this rank."""
    whole = loss_cases.whole_batch()
    if keys.get("true_on_policy_mode"):
        # Or on all of it.
        whole = loss_cases.without_sample(whole, loss_cases.RESPONSES.index(1))
    if "rollout_top_p" in keys:
        whole = loss_cases.with_top_p(whole, unrecorded=3)
    of_cp = {"cp_rank": place["cp_rank"], "cp_size": place["cp_size"]}
    batch = loss_cases.local_batch(whole, **of_cp, is_padded=place["is_padded"])
    if keys.get("allgather_cp"):
        batch["logits"] = loss_cases.contiguous_rows(whole, **of_cp)
    batch["logits"] = batch["logits"].chunk(place["tp_size"], dim=-1)[place["tp_rank"]]
    return batch


def all_recorded(host: str, function: Callable, reducer: Callable, place: dict, *, check: bool) -> dict[str, dict]:
    """Every option on this rank, by whose loss it is."""
    out: dict[str, dict] = {whose: {} for whose in (WHOSE if check else WHOSE[:1])}
    for name, options in options_of(host, place, check=check).items():
        options = options | {"qkv_format": "bshd" if place["is_padded"] else "thd"}
        batch = local_batch(options, place)
        out["host"][name] = recorded(function, dict(batch), reducer, options)
        if not check:
            continue
        import mis_ext

        # Unset where a host's function is kept: that must be found out.
        by_host = {} if name in loss_cases.KEPT else {"mis_loss_scoring": "host"}
        out["mis_ext"][name] = recorded(mis_ext.policy_loss, dict(batch), reducer, options | by_host)
        if name not in loss_cases.KEPT:
            fused = options | {"mis_loss_scoring": "fused"}
            out["fused"][name] = recorded(mis_ext.policy_loss, dict(batch), reducer, fused)
    return out


def slime_rank(rank: int, cp_size: int, tp_size: int, store: str, folder: str, check: bool) -> None:
    """One rank of slime's trainer."""
    import torch.distributed as dist
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
    from slime.backends.megatron_utils.loss import policy_loss_function

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=cp_size * tp_size)
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp_size, context_parallel_size=cp_size)

    def reducer(args: Any, batch: dict) -> Callable:
        lengths = batch["total_lengths"], batch["response_lengths"]
        return get_sum_of_sample_mean(
            *lengths, batch["loss_masks"], batch["rollout_mask_sums"], args.calculate_per_token_loss
        )

    place = place_of(rank, cp_size, tp_size)
    found = all_recorded("slime", policy_loss_function, reducer, place, check=check)
    torch.save(found, f"{folder}/{topology_of(place)}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def miles_rank(rank: int, cp_size: int, tp_size: int, store: str, folder: str, check: bool) -> None:
    """One rank of Miles' trainer."""
    import torch.distributed as dist
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    world_size = cp_size * tp_size
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = [dist.new_group([other]) for other in range(world_size)][rank]
    alone, everyone = GroupInfo(rank=0, size=1, group=group), GroupInfo(rank, world_size, dist.group.WORLD)
    groups = dict.fromkeys(("intra_dp", "pp", "ep", "etp", "indep_dp"), alone)
    groups |= {"tp": everyone if tp_size > 1 else alone, "cp": everyone if cp_size > 1 else alone}
    set_parallel_state(ParallelState(**groups, intra_dp_cp=groups["cp"]))

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
        place = place_of(rank, cp_size, tp_size, is_padded=is_padded)
        found = all_recorded("miles", policy_loss_function, reducer, place, check=check)
        torch.save(found, f"{folder}/{topology_of(place)}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def place_of(rank: int, cp_size: int, tp_size: int, *, is_padded: bool = False) -> dict:
    """The position of a rank; only one of the two kinds of parallelism is used at a time."""
    of_cp = {"cp_rank": rank if cp_size > 1 else 0, "cp_size": cp_size}
    return of_cp | {"tp_rank": rank if tp_size > 1 else 0, "tp_size": tp_size, "is_padded": is_padded}


def topology_of(place: dict) -> str:
    """The name in the file."""
    ranks = f"tp{place['tp_size']}" if place["tp_size"] > 1 else f"cp{place['cp_size']}"
    return f"{ranks}-{'bshd' if place['is_padded'] else 'thd'}"


class _Stub(types.ModuleType):
    """Replacement for ray, which Miles imports only for decorators and annotations here."""

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
    for cp_size, tp_size in TOPOLOGIES[check]:
        # Forked, so that Megatron-Core is imported once.
        mp.start_processes(
            slime_rank if host == "slime" else miles_rank,
            args=(cp_size, tp_size, f"{folder}/store{cp_size}{tp_size}", folder, check),
            nprocs=cp_size * tp_size,
            start_method="fork",
        )


def run_hosts(clones: dict[str, Path], *, check: bool, compiled: bool) -> dict[str, dict]:
    """The results of each rank of each topology, by whose loss it is."""
    found: dict[str, dict] = {whose: {} for whose in WHOSE}
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


Judge = Callable[[str, dict, dict], str]
"""Maps framework and two losses to their differences; empty if equal."""


def differs(_host: str, found: dict, wanted: dict) -> str:
    """Number by number."""
    try:
        torch.testing.assert_close(found, wanted, rtol=RTOL, atol=ATOL)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def share_of_largest(quantity: str, found: Any, wanted: Any) -> float:
    """The largest difference as a share of the largest number; NaN is equal to NaN."""
    if isinstance(wanted, dict) and not wanted:
        return 0.0
    pair = [torch.stack([*x.values()]) if isinstance(x, dict) else x for x in (found, wanted)]
    found, wanted = (torch.where(pair[0].isnan() & pair[1].isnan(), 0.0, x).double() for x in pair)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(SMALLEST.get(quantity, 1e-30)))


def differs_by_share(host: str, found: dict, wanted: dict) -> str:
    """By a share of the largest entry."""
    out = []
    for quantity, value in wanted.items():
        share, limit = share_of_largest(quantity, found[quantity], value), FUSED
        if host == "miles" and quantity == "gradient" and wanted["metrics"]:
            limit = ROUNDED
        if not share <= limit:
            out.append(f"{quantity} by {share:.1e} of its largest entry, {limit:.1e} is allowed")
    return "; ".join(out)


def differences(host: str, found: dict[str, dict], wanted: dict[str, dict], judge: Judge) -> dict[str, str]:
    """How the losses of a rank differ, by the name of the option; those that do not are omitted."""
    out = {}
    for name in found.keys() | wanted.keys():
        if name not in found or name not in wanted:
            out[name] = "it is not in both"
            continue
        both = [loss_cases.without_differences(host, name, of[name]) for of in (found, wanted)]
        if [*both[0]["metrics"]] != [*both[1]["metrics"]]:
            out[name] = "other names of metrics, or another order"
        elif text := judge(host, *both):
            out[name] = text
    return out


def without(losses: dict[str, dict], *names: str) -> dict[str, dict]:
    """The same without some options, and without ranks that then have none."""
    kept = {
        topology: {rank: {name: x for name, x in of.items() if name not in names} for rank, of in ranks.items()}
        for topology, ranks in losses.items()
    }
    return {topology: ranks for topology, ranks in kept.items() if any(ranks.values())}


def without_metrics(losses: dict[str, dict], names: Collection[str]) -> dict[str, dict]:
    """Loss and gradient of some options: unlike metrics, they do not depend on the framework."""
    return {name: of | {"metrics": {}} for name, of in losses.items() if name in names}


def exact_gradients(found: dict[str, dict]) -> tuple[dict, dict]:
    """For packed samples, the results of fused scoring in Miles and of slime's own function, which rounds less."""
    ours, theirs = {}, {}
    for topology in [name for name in found["fused"] if name.startswith("miles") and name.endswith("thd")]:
        of_slime = found["host"].get(topology.replace("miles", "slime"), {})
        for rank in found["fused"][topology].keys() & of_slime.keys():
            names = found["fused"][topology][rank].keys() & of_slime[rank].keys()
            ours.setdefault(f"{topology} as slime", {})[rank] = without_metrics(found["fused"][topology][rank], names)
            theirs.setdefault(f"{topology} as slime", {})[rank] = without_metrics(of_slime[rank], names)
    return ours, theirs


def largest_shares(host: str, found: dict[str, dict], wanted: dict[str, dict]) -> str:
    """Differences of loss, metrics and gradient, over all common options."""
    names = found.keys() & wanted.keys()
    pairs = [[loss_cases.without_differences(host, name, of[name]) for of in (found, wanted)] for name in names]
    pairs = [pair for pair in pairs if [*pair[0]["metrics"]] == [*pair[1]["metrics"]]]
    shares = {
        key: max((share_of_largest(key, ours[key], theirs[key]) for ours, theirs in pairs), default=0.0)
        for key in ("loss", "metrics", "gradient")
    }
    return ", ".join(f"{key} {share:.1e}" for key, share in shares.items())


def check(found: dict[str, dict]) -> int:
    """Print the comparisons and differences; return the exit code."""
    with lzma.open(FILE, "rb") as file:
        record = torch.load(file)
    revisions = record.pop("revisions")
    on_file = {topology: of for topology, of in found["host"].items() if "-tp" not in topology}
    comparisons: dict[str, tuple[dict, dict, Judge]] = {
        "the hosts' own against the file": (without(on_file, *loss_cases.NOT_RECORDED), record, differs),
        "mis_ext.policy_loss against the hosts' own": (found["mis_ext"], found["host"], differs),
        "mis_ext.policy_loss with fused scoring against the hosts' own": (
            found["fused"],
            without(found["host"], *loss_cases.KEPT),
            differs_by_share,
        ),
        "loss and gradient with fused scoring in Miles against slime's own": (
            *exact_gradients(found),
            differs_by_share,
        ),
    }
    is_wrong = revisions != REVISIONS
    print(f"equal: within {RTOL:g} of a value plus {ATOL:g}")
    print(f"equal with fused scoring: within {FUSED:g} of the largest entry, the gradient in Miles {ROUNDED:g}")
    if is_wrong:
        print(f"{FILE.name} is of other revisions: {revisions}")
    for title, (ours, theirs, judge) in comparisons.items():
        print(f"\n{title}:")
        for topology in sorted(ours.keys() | theirs.keys()):
            ranks = [of.get(topology, {}) for of in (ours, theirs)]
            for rank in sorted(ranks[0].keys() | ranks[1].keys()):
                both = [of.get(rank, {}) for of in ranks]
                wrong = differences(topology.partition("-")[0], *both, judge)
                print(f"  {topology}, rank {rank}: {len(both[0])} losses, {len(wrong)} differ")
                if judge is differs_by_share:
                    print(f"    largest share: {largest_shares(topology.partition('-')[0], *both)}")
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
