"""Whether this revision of the hook is slower than another one: both in one process, call by call in turn.

    git worktree add ../before REVISION
    python benchmarks/compare_revisions.py ../before [--calls 300] [--shapes ...] [--configs ...] [--device cuda]

Each turn gives the same inputs to this revision, to the other one, and to the other one loaded a second time, in a
random order. What disturbs the host disturbs neighbouring calls alike, and drops out of their ratio. The table has the
medians of the ratios within a turn with 95 % confidence intervals (bootstrap); the last column, the other revision
against itself, says how far noise alone goes. Configurations are files of this revision's ``yaml/``; the other one must
know their keys.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from workload import Item, Shape, Workload, World, settings

THIS = Path(__file__).parents[1]
CONFIGS = ["metrics_only", "token_tis", "icepop", "sequence_mis", "gated_mis"]
SHAPES = ["8x2048", "64x2048", "256x1024", "64x8192"]
# The watch over rejected shares ends with its first warning; here it never warns, and goes on.
QUIET = {"mis_metrics": "core", "mis_guard": "warn", "mis_max_reject_fraction": 1.0}
WARM_UP_TURNS, RESAMPLES = 10, 1000


class Revision:
    """A copy of the package with modules of its own."""

    def __init__(self, folder: Path) -> None:
        self._modules: dict[str, ModuleType] = {}
        with_package = str(folder.resolve())
        sys.path.insert(0, with_package)
        _take_modules()
        self._package = importlib.import_module("mis_ext")
        self.hook = self._package.compute_mis_weights_with_cp
        self.leave()
        sys.path.remove(with_package)
        assert Path(str(self._package.__file__)).is_relative_to(folder.resolve()), self._package.__file__

    def enter(self) -> None:
        """Let imports inside of the package find this copy."""
        sys.modules.update(self._modules)

    def leave(self) -> None:
        """Take the modules away, those too that a call has imported."""
        self._modules = _take_modules()

    def seconds(self, args: Any, item: Item, world: World) -> tuple[float, float]:
        """Of one call: until the device is idle, and until the call returns."""
        self.enter()
        world.synchronize()
        start = time.perf_counter()
        out = self.hook(args, **item)
        returned = time.perf_counter()
        world.synchronize()
        done = time.perf_counter()
        del out
        self.leave()
        return done - start, returned - start


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "mis_ext"]
    return {name: sys.modules.pop(name) for name in names}


def main() -> None:
    """Measure in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder with the other revision")
    parser.add_argument("--calls", type=int, default=300, help="turns per row")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    world = World.join(options.device, 1)
    progress = Console(stderr=True)
    revisions = [Revision(folder) for folder in (THIS, options.other, options.other)]
    print("| shape | configuration | layout | this, ms | other, ms | this / other | host only | other / other |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in options.shapes:
        workload = Workload(Shape.parse(shape), world=world, seed=options.seed)
        for config in options.configs:
            keys = yaml.safe_load((THIS / "yaml" / f"{config}.yaml").read_text(encoding="utf-8")) | QUIET
            for layout, next_item in (("same", workload.same_layout), ("new", workload.new_layout)):
                args = [settings(keys) for _ in revisions]
                turns = []
                for turn in track(range(WARM_UP_TURNS + options.calls), f"{shape} {config} {layout}", console=progress):
                    item = next_item()
                    order = random.sample(range(len(revisions)), len(revisions))
                    taken = {i: revisions[i].seconds(args[i], item, world) for i in order}
                    if turn >= WARM_UP_TURNS:
                        turns.append([taken[i] for i in range(len(revisions))])
                print(f"| {shape} | {config} | {layout} | {_cells(turns)} |", flush=True)


def _cells(turns: list[list[tuple[float, float]]]) -> str:
    totals = [[call[0] for call in turn] for turn in turns]
    hosts = [[call[1] for call in turn] for turn in turns]
    times = [f"{1e3 * statistics.median(turn[i] for turn in totals):.3f}" for i in (0, 1)]
    return " | ".join([*times, _ratio(totals, 0), _ratio(hosts, 0), _ratio(totals, 2)])


def _ratio(turns: list[list[float]], index: int) -> str:
    """Median of the ratios to the other revision, and its 95 % interval."""
    ratios = [turn[index] / turn[1] for turn in turns]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
