# SPDX-License-Identifier: Apache-2.0
"""The cost of the full loss from the logits on in slime's and Miles' own code, and of scoring with several kernels.

    python lab/benchmarks/bench_scoring.py --miles ~/miles --slime ~/slime [--parts A,B] [--json FILE]

The code of slime and Miles is not part of this repository: the two folders are checkouts of it, and megatron-core must
be installed. ray alone is a stand-in. First checks, then times; prints Markdown. ``--json`` is written after every row,
so that nothing is lost by what fails later; parts and problems that it has from another run are kept. ``--show`` prints
the tables of such a file.

- **A**: the hosts' real ``loss_function``, forward and backward, new lengths at every call; PPO clip, entropy and a k3
  penalty with gradient; beside it ``mis_ext.policy_loss`` in the same place. Loss, gradient of the logits and metrics
  are first compared with the host's own; a wrong one ends the run (``--keep-going``: is named, timed, and exit code 1).
- **B**: log-prob and entropy of tokens alone, forward and backward, beside what others have.

Errors against float64 (parts C and D of the tables in ``results/``) are the tests' matter: ``tests/scoring``; revision
16a265ec has the program.

Part A over several ranks, here tensor- and context-parallel ones; what their product leaves is data-parallel:
``torchrun --standalone --nproc-per-node 4 lab/benchmarks/bench_scoring.py --parts A --tp 2 --cp 2``. One process with
half the vocabulary, or half as long samples, is the share of one rank of two.

Times are from the call until the device is idle, medians. The peak is ``torch.cuda.max_memory_allocated`` minus what
was allocated before the call, logits and micro-batch included: everything that the call needs, with the gradient of
the logits. Launches and synchronizations are of the profiler, on a CPU ATen operations and reads of a value.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

# So that it runs where mis_ext is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import reporting
import scoring_alone
import scoring_hosts
import scoring_whole
import torch
from scoring_measure import say
from workload import World

PARTS = {
    "A": ("The whole loss in the hosts' own code", scoring_whole.part, scoring_whole.markdown),
    "B": ("The scoring alone", scoring_alone.part, scoring_alone.markdown),
}
ON_GPU = ["8x2048:151936:float32", "8x2048:151936:bfloat16", "64x2048:64:float32", "256x1024:64:float32"]
ON_CPU = ["3x24:29:float32", "3x24:29:bfloat16"]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--miles", type=Path, metavar="DIR", help="a checkout of Miles")
    parser.add_argument("--slime", type=Path, metavar="DIR", help="a checkout of slime")
    parser.add_argument("--flash-attn", type=Path, metavar="FILE", help="flash_attn/ops/triton/cross_entropy.py")
    parser.add_argument("--parts", default="A,B", help="which parts, with commas")
    parser.add_argument("--problems", nargs="+", metavar="SxL:V:DTYPE", help=f"of part A; on a GPU {' '.join(ON_GPU)}")
    parser.add_argument("--losses", nargs="+", metavar="WORD", help="of part A, those with such a word in their name")
    parser.add_argument("--alone", metavar="T:V", help="tokens and vocabulary of part B; on a GPU 16384:151936")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; start as many with torchrun")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks, likewise")
    parser.add_argument("--metrics", choices=["core", "all"], default="all", help="what mis_ext emits in part A")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls per row at most")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timed calls per row; at least 5 calls")
    parser.add_argument("--keep-going", action="store_true", help="a wrong number does not end the run; exit code 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, after every row")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a --json, and measure nothing")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.problems = options.problems or (ON_GPU if on_gpu else ON_CPU)
    options.alone = options.alone or ("16384:151936" if on_gpu else "40:29")
    options.parts = options.parts.split(",")
    unknown = [each for each in options.parts if each not in PARTS]
    if unknown:
        parser.error(f"--parts {unknown[0]}: there are {', '.join(PARTS)}")
    if (options.tp, options.cp) != (1, 1) and options.parts != ["A"]:
        parser.error("--tp and --cp are for --parts A")
    return options


class Record:
    """The file of ``--json``, with what other runs have put into it."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.parts: dict[str, Any] = {}
        if file is not None and file.exists():
            self.parts = json.loads(file.read_text())

    def begin(self, name: str, header: dict[str, str], problems: list[str]) -> None:
        """Remove results that are measured again."""
        kept = [row for row in self.parts.get(name, []) if name == "A" and row["problem"] not in problems]
        self.parts[name] = kept
        self.parts.setdefault("headers", {})[name] = header

    def add(self, name: str, row: dict[str, Any]) -> None:
        """One row more, in the file too."""
        self.parts[name].append(row)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self.parts, indent=1))

    def markdown(self, name: str) -> str:
        """A part's tables."""
        title, _, markdown = PARTS[name]
        return f"\n## {name}. {title}\n\n{markdown(self.parts[name])}"


def _header(world: World, options: argparse.Namespace) -> dict[str, str]:
    """Hardware, versions and command, with the last part of each path."""
    header = reporting.header(world, options.seed)
    for path in (options.miles, options.slime, options.flash_attn, options.json):
        if path is not None:
            header["command"] = header["command"].replace(str(path), path.name)
    return header


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print; the exit code."""
    options = parsed(arguments)
    if options.show:
        record = Record(options.show)
        for name in (name for name in PARTS if name in record.parts):
            print("\n".join(record.parts["headers"][name].values()), record.markdown(name), sep="\n")
        return 0
    warnings.simplefilter("ignore")
    world = World.join(options.device, options.cp, tp_size=options.tp)
    if world.size > 1 and options.parts != ["A"]:
        raise SystemExit(f"{world.size} processes are for --parts A")
    ranks = scoring_whole.among(options, world)
    folders = {name: getattr(options, name) for name in ("miles", "slime") if getattr(options, name) is not None}
    hosts = scoring_hosts.load_hosts(folders, world, tp_size=options.tp, cp_size=options.cp) if folders else {}
    header = _header(world, options) | {"hosts": f"hosts: {', '.join(hosts) or 'none given'}"}
    if world.rank == 0:
        print(*header.values(), sep="\n")
    record, is_wrong = Record(options.json if world.rank == 0 else None), False
    for name in options.parts:
        title, part, _ = PARTS[name]
        say(f"part {name}: {title}")
        record.begin(name, header, [f"{each}{ranks}" for each in options.problems])
        for row in part(hosts, world, options):
            record.add(name, row)
            is_wrong |= bool(row.get("is_wrong"))
        if world.rank == 0:
            print(record.markdown(name), flush=True)
    if world.size > 1:
        torch.distributed.destroy_process_group()
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
