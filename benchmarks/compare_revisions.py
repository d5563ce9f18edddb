"""Whether this revision is slower than another one: both in one process, call by call in turn.

    git worktree add ../before REVISION
    python benchmarks/compare_revisions.py ../before [--what hook policy_loss methods] [--calls 300] [--shapes ...]
        [--configs ...] [--rows ...]
    torchrun --standalone --nproc-per-node 4 benchmarks/compare_revisions.py ../before --cp 4 --shapes 8x2048

Each turn gives the same numbers to this revision, to the other one, and to the other one loaded a second time, in a
random order. What disturbs the host disturbs neighbouring calls alike, and drops out of their ratio. The table has the
medians of the ratios within a turn with 95 % confidence intervals (bootstrap); the last column, the other revision
against itself, says how far noise alone goes. Runs in processes of their own would not do: on a shared host the medians
of one revision's own runs differed by up to 2. With ``--cp`` all ranks begin a call together, and the times are of the
first one.

- ``hook``: calls of ``mis_ext.compute_mis_weights_with_cp`` with configurations of this revision's ``yaml/``, whose
  keys the other one must know.
- ``policy_loss``, ``methods``: what each revision's own ``bench_policy_loss.py`` and ``bench_methods.py`` time, without
  the hosts' loops and without compilation; rows that both have, or those of them that ``--rows`` names.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import track
from workload import Shape, Workload, World, settings

THIS = Path(__file__).parents[1]
CONFIGS = ["metrics_only", "token_tis", "icepop", "sequence_mis", "gated_mis"]
SHAPES = {"hook": ["8x2048", "64x2048", "256x1024", "64x8192"], "policy_loss": ["64x2048"], "methods": ["64x2048"]}
# The watch over rejected shares ends with its first warning; here it never warns, and goes on.
QUIET = {"mis_metrics": "core", "mis_guard": "warn", "mis_max_reject_fraction": 1.0}
WARM_UP_TURNS, RESAMPLES = 10, 1000

Call = Callable[[], Any]
Rows = dict[str, Callable[[], Call]]
"""By name what gives the next call, its inputs ready."""


class Revision:
    """A copy of the package, and of its benchmarks where they are asked for, with modules of their own."""

    def __init__(self, folder: Path, *, benchmarks: bool = False) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._own = {"mis_ext"}
        folder = folder.resolve()
        found = [folder]
        if benchmarks:
            found += [folder / "benchmarks", folder / "tests"]
            self._own |= {path.stem for path in (folder / "benchmarks").glob("*.py")} | {"host_loop"}
        before = self._take_modules()
        sys.path[:0] = [str(each) for each in found]
        self._package = importlib.import_module("mis_ext")
        self.hook = self._package.compute_mis_weights_with_cp
        if benchmarks:
            self.policy_loss = importlib.import_module("bench_policy_loss")
            self.methods = importlib.import_module("bench_methods")
        self.leave()
        sys.modules.update(before)
        del sys.path[: len(found)]
        assert Path(str(self._package.__file__)).is_relative_to(folder), self._package.__file__

    def enter(self) -> None:
        """Let imports inside of the package find this copy."""
        sys.modules.update(self._modules)

    def leave(self) -> None:
        """Take the modules away, those too that a call has imported."""
        self._modules = self._take_modules()

    def _take_modules(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in self._own]
        return {name: sys.modules.pop(name) for name in names}

    def seconds(self, call: Call, world: World) -> tuple[float, float]:
        """Of one call: until the device is idle, and until the call returns."""
        self.enter()
        world.barrier()
        start = time.perf_counter()
        out = call()
        returned = time.perf_counter()
        world.synchronize()
        done = time.perf_counter()
        del out
        self.leave()
        return done - start, returned - start

    def rows_of(self, what: str, shape: str, *, device: torch.device, seed: int) -> Rows:
        """The rows of a benchmark of this revision, on inputs that are the same for every revision."""
        self.enter()
        random_state = torch.random.get_rng_state()
        rows: Rows = {}
        if what == "policy_loss":
            bench = self.policy_loss
            inputs = bench.Inputs(Shape.parse(shape), device=device, seed=seed)
            keys = bench.GATED_MIS | {"mis_metrics": "all"}
            for name, loss in bench.contenders(keys).items():
                if not name.startswith("loop") and not name.endswith("compiled"):
                    for layout in ("same", "new"):
                        rows[f"{name}, {layout}"] = partial(_prepared, bench.run, loss, getattr(inputs, layout))
        else:
            bench, catalogue = self.methods, self.methods
            inputs = bench.Inputs(Shape.parse(shape), device=device, seed=seed)
            methods = getattr(catalogue, "METHODS", None) or catalogue.PRESETS
            for name in methods:
                rows[name] = partial(_prepared, bench.call, methods[name].method, False, inputs.next)
        torch.random.set_rng_state(random_state)
        self.leave()
        return rows


def _prepared(function: Callable[..., Any], *given: Any) -> Call:
    *arguments, next_item = given
    return partial(function, *arguments, next_item())


def main() -> None:
    """Measure in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder with the other revision")
    parser.add_argument("--what", nargs="+", choices=[*SHAPES], default=["hook"])
    parser.add_argument("--calls", type=int, default=300, help="turns per row")
    parser.add_argument("--shapes", nargs="+", help="of all; 64x2048 by default, of the hook more")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="of the hook")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="of policy_loss and methods; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks of the hook; started with torchrun")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if options.cp > 1 and options.what != ["hook"]:
        parser.error("--cp is for --what hook")
    warnings.simplefilter("ignore")
    world = World.join(options.device, options.cp)
    if world.size != options.cp:
        parser.error(f"--cp {options.cp}: must be the number of processes, {world.size}")
    # Every rank takes the revisions in the same order.
    random.seed(options.seed)
    with_benchmarks = options.what != ["hook"]
    folders = (THIS, options.other, options.other)
    revisions = [Revision(folder, benchmarks=with_benchmarks) for folder in folders]
    if world.rank == 0:
        print("| shape | row | this, ms | other, ms | this / other | host only | other / other |")
        print("|---|---|---|---|---|---|---|")
    for what in options.what:
        for shape in options.shapes or SHAPES[what]:
            compare = _compare_hook if what == "hook" else partial(_compare_rows, what)
            compare(revisions, shape, world=world, options=options)


def _compare_hook(revisions: list[Revision], shape: str, *, world: World, options: argparse.Namespace) -> None:
    workload = Workload(Shape.parse(shape), world=world, seed=options.seed)
    for config in options.configs:
        keys = yaml.safe_load((THIS / "yaml" / f"{config}.yaml").read_text(encoding="utf-8")) | QUIET
        for layout, next_item in (("same", workload.same_layout), ("new", workload.new_layout)):
            args = [settings(keys) for _ in revisions]

            def next_calls(args: list[Any] = args, next_item: Callable[[], Any] = next_item) -> list[Call]:
                item = next_item()
                return [partial(each.hook, own, **item) for each, own in zip(revisions, args, strict=True)]

            _print_row(shape, f"{config}, {layout}", revisions, next_calls, world=world, options=options)


def _compare_rows(
    what: str, revisions: list[Revision], shape: str, *, world: World, options: argparse.Namespace
) -> None:
    rows = [each.rows_of(what, shape, device=world.device, seed=options.seed) for each in revisions]
    both = [name for name in rows[0] if name in rows[1]]
    if not both:
        raise SystemExit(f"{what}: the revisions have no row in common")
    unknown = sorted({*(options.rows or ())}.difference(both))
    if unknown:
        raise SystemExit(f"--rows {' '.join(unknown)}: not among the rows of {what} that both revisions have: {both}")
    for name in options.rows or both:

        def next_calls(name: str = name) -> list[Call]:
            calls = []
            for revision, own in zip(revisions, rows, strict=True):
                revision.enter()
                calls.append(own[name]())
                revision.leave()
            return calls

        _print_row(shape, name, revisions, next_calls, world=world, options=options)


def _print_row(
    shape: str,
    name: str,
    revisions: list[Revision],
    next_calls: Callable[[], list[Call]],
    *,
    world: World,
    options: argparse.Namespace,
) -> None:
    turns = []
    progress = Console(stderr=True, quiet=world.rank > 0)
    for turn in track(range(WARM_UP_TURNS + options.calls), f"{shape} {name}", console=progress):
        calls = next_calls()
        order = random.sample(range(len(revisions)), len(revisions))
        taken = {i: revisions[i].seconds(calls[i], world) for i in order}
        if turn >= WARM_UP_TURNS:
            turns.append([taken[i] for i in range(len(revisions))])
    if world.rank == 0:
        print(f"| {shape} | {name} | {_cells(turns)} |", flush=True)


def _cells(turns: list[list[tuple[float, float]]]) -> str:
    totals = [[call[0] for call in turn] for turn in turns]
    hosts = [[call[1] for call in turn] for turn in turns]
    times = [f"{1e3 * statistics.median(turn[i] for turn in totals):.3f}" for i in (0, 1)]
    return " | ".join([*times, _ratio(totals, 0), _ratio(hosts, 0), _ratio(totals, 2)])


def _ratio(turns: list[list[float]], index: int) -> str:
    """Median of the ratios to the other revision, and its 95 % interval."""
    ratios = [turn[index] / turn[1] for turn in turns]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
