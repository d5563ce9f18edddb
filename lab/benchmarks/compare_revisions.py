# SPDX-License-Identifier: Apache-2.0
"""Whether a revision gives other numbers than another one, and whether it is slower.

    python lab/benchmarks/compare_revisions.py BASE [NEW] [--seed 7] [--capabilities default avx2] [--device cuda]
    python lab/benchmarks/compare_revisions.py BASE [NEW] --what hook policy_loss methods [--calls 300] [--shapes ...]
    torchrun --standalone --nproc-per-node 4 lab/benchmarks/compare_revisions.py BASE --what hook --cp 4 --shapes 8x2048

Each revision is a folder, or a name that git knows; NEW is this checkout if it is omitted.

**Outputs** (some three minutes on two cores): ``revision_outputs.py`` computes with both revisions, each in a process
of its own, on the same drawn inputs, and with the kernels of each CPU capability: all methods, 200 drawn configurations
of the hook and the presets, the whole loss with its gradient norm in slime, Miles and Megatron-Core, scoring, the other
frameworks' entries, ranks over gloo, and what the commands print. Everything whose bits differ is listed, with the
distance in ULPs. The exit code is 1 if something differs.

**Times**: each turn gives the same numbers to NEW, to BASE, and to BASE loaded a second time, in a random order. What
disturbs the host disturbs neighboring calls alike, and drops out of their ratio. The table has the medians of the
ratios within a turn with 95 % confidence intervals (bootstrap); the last column, BASE against itself, says how far
noise alone goes. NEW is slower where the whole interval lies above 1.05, which the last line says. Runs in processes of
their own would not do: on a shared host the medians of one revision's own runs differed by up to 2. With ``--cp`` all
ranks begin a call together, and the times are of the first one.

- ``hook``: calls of ``mis_ext.compute_mis_weights_with_cp`` with configurations of NEW's ``yaml/``, whose keys BASE
  must know.
- ``policy_loss``, ``methods``: what each revision's own ``bench_policy_loss.py`` and ``bench_methods.py`` time, without
  the hosts' loops and without compilation; rows that both have, or those of them that ``--rows`` names.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from revision_outputs import OF_A_CPU, PARTS, unpacked
from rich.console import Console
from rich.progress import track
from workload import Shape, Workload, World, settings

THIS = Path(__file__).parents[2]
OUTPUTS = Path(__file__).with_name("revision_outputs.py")
CAPABILITIES = ("default", "avx2", "avx512")
LISTED = 60
SLOWER = 1.05
CONFIGS = ["metrics_only", "mis", "icepop", "sequence_mis", "miles_compat"]
SHAPES = {"hook": ["8x2048", "64x2048", "256x1024", "64x8192"], "policy_loss": ["64x2048"], "methods": ["64x2048"]}
# The watch over rejected shares ends with its first warning; here it never warns, and goes on.
QUIET = {"mis_metrics": "core", "mis_guard": "warn"}
WHAT = ("outputs", *SHAPES)
WARM_UP_TURNS, RESAMPLES = 10, 1000

Call = Callable[[], Any]
Rows = dict[str, Callable[[], Call]]
"""By name what gives the next call, its inputs ready."""


class Revision:
    """A copy of the package, and of its benchmarks where they are asked for, with modules of their own."""

    def __init__(self, folder: Path, *, benchmarks: bool = False) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._own = {"mis_ext"}
        self.folder = folder = folder.resolve()
        found = [folder]
        if benchmarks:
            # Wherever the revision keeps them.
            kept = [path for top in ("benchmarks", "lab", "tests") for path in (folder / top).rglob("*.py")]
            found += [path.parent for path in kept if path.name in ("bench_methods.py", "host_loop.py")]
            self._own |= {path.stem for path in found[1].glob("*.py")} | {"host_loop"}
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
        """Times of one call: until the device is idle, and until the call returns."""
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
                rows[name] = partial(_prepared, lambda method, item: method(**item), methods[name].method, inputs.next)
        torch.random.set_rng_state(random_state)
        self.leave()
        return rows


def _prepared(function: Callable[..., Any], *given: Any) -> Call:
    *arguments, next_item = given
    return partial(function, *arguments, next_item())


def main() -> None:
    """Measure in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a folder, or a revision that git knows")
    parser.add_argument("new", nargs="?", default=str(THIS), help="likewise; this checkout by default")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["outputs"])
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), help="of the outputs; all by default")
    parser.add_argument("--capabilities", nargs="+", choices=CAPABILITIES, default=CAPABILITIES, help="of the outputs")
    parser.add_argument("--calls", type=int, default=300, help="turns per row")
    parser.add_argument("--shapes", nargs="+", help="of all; 64x2048 by default, of the hook more")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="of the hook")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="of policy_loss and methods; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda by default, of the outputs cpu")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks of the hook; started with torchrun")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    timed = [what for what in options.what if what != "outputs"]
    if options.cp > 1 and options.what != ["hook"]:
        parser.error("--cp is for --what hook")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [_folder(each, Path(scratch) / name) for name, each in (("base", options.base), ("new", options.new))]
        is_equal = "outputs" not in options.what or _compare_outputs(*folders, Path(scratch), options)
        if timed:
            _compare_times(*folders, timed, options, parser)
    sys.exit(0 if is_equal else 1)


def _folder(revision: str, scratch: Path) -> Path:
    """The folder, or one with what git has of the revision."""
    if Path(revision).is_dir():
        return Path(revision).resolve()
    archive = subprocess.run(["git", "-C", str(THIS), "archive", revision], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # The filter came with Python 3.11.4.
        tar.extractall(scratch, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return scratch


def _compare_outputs(base: Path, new: Path, scratch: Path, options: argparse.Namespace) -> bool:
    """Print what differs; whether nothing does."""
    is_equal = True
    # torch takes the word for it, and dies of an instruction that the CPU has not got.
    had = CAPABILITIES[: [*CAPABILITIES].index(torch.backends.cpu.get_cpu_capability().lower()) + 1]
    for missing in sorted({*options.capabilities}.difference(had)):
        print(f"{missing}: not compared, because this CPU has not got it")
    options.capabilities = [each for each in options.capabilities if each in had]
    if not options.capabilities:
        raise SystemExit("nothing is left to compare")
    print(f"base {base}, new {new}, seed {options.seed}, torch {torch.__version__}", flush=True)
    for capability in [""] if options.device == "cuda" else options.capabilities:
        started = [_start(each, scratch / f"{index}.pt", capability, options) for index, each in enumerate((base, new))]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a revision failed; its error stands above")
        contents = [torch.load(scratch / f"{index}.pt", weights_only=True) for index in range(2)]
        before, after = map(unpacked, contents)
        title = capability or options.device
        found = list(differences(before, after))
        numbers = sum(each.numel() for each in before.values() if isinstance(each, torch.Tensor))
        print(f"\n{title}: {len(before):,} outputs, {numbers:,} numbers: ", end="")
        print(f"{len(found):,} outputs differ" if found else "all equal", flush=True)
        for line in found[:LISTED]:
            print(f"- {line}")
        if len(found) > LISTED:
            parts = Counter(line.partition(":")[0] for line in found)
            print(f"- ... in all {', '.join(f'{part} {count}' for part, count in parts.items())}")
        is_equal = is_equal and not found
    return is_equal


def _start(folder: Path, file: Path, capability: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": capability}
    if not capability:
        del environment["ATEN_CPU_CAPABILITY"]
    command = [sys.executable, OUTPUTS, file, "--seed", options.seed, "--device", options.device or "cpu"]
    # The output of the commands, only once.
    parts = [part for part in options.parts or PARTS if part != "documents" or capability == options.capabilities[-1]]
    command += ["--parts", *[part for part in parts if capability or part not in OF_A_CPU]]
    return subprocess.Popen([*map(str, command)], env=environment)


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """A line for each output that is not the same bit for bit, with how far apart its numbers are."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"{name}: only in {'new' if old is None else 'base'}"
        elif not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
            if old != new:
                yield f"{name}: {str(old)[:200]!r} became {str(new)[:200]!r}"
        elif old.shape != new.shape or old.dtype != new.dtype:
            yield f"{name}: {old.dtype} {list(old.shape)} became {new.dtype} {list(new.shape)}"
        elif not old.is_floating_point():
            if not torch.equal(old, new):
                yield f"{name}: {int((old != new).sum())} of {old.numel()} differ"
        elif line := _distance(old, new):
            yield f"{name}: {line}"


def _distance(old: torch.Tensor, new: torch.Tensor) -> str:
    """How far apart numbers are, nothing where all bits agree; one NaN is like another."""
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[old.element_size()]
    is_nan = old.isnan() & new.isnan()
    differs = (old.view(kind) != new.view(kind)) & ~is_nan
    if not differs.any():
        return ""
    old, new = old[differs], new[differs]
    # Whole numbers in the order of the floats; both zeros are 0.
    places = [each.view(kind).long() for each in (old, new)]
    first, second = (torch.where(each < 0, torch.iinfo(kind).min - each, each) for each in places)
    lost = int((old.isfinite() != new.isfinite()).sum())
    # The distance of two floats of unlike sign may not fit.
    ulps = (first.double() - second.double()).abs().max()
    far = (old.double() - new.double()).abs()[old.isfinite() & new.isfinite()]
    text = f"{int(differs.sum())} of {differs.numel()} differ, by at most {float(ulps):.0f} ULP"
    text += f" ({float(far.max()):.2g})" if len(far) else ""
    return text + (f", {lost} of them finite in one alone" if lost else "")


def _compare_times(
    base: Path, new: Path, timed: list[str], options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    warnings.simplefilter("ignore")
    world = World.join(options.device or "cuda", options.cp)
    if world.size != options.cp:
        parser.error(f"--cp {options.cp}: must be the number of processes, {world.size}")
    # Every rank takes the revisions in the same order.
    random.seed(options.seed)
    revisions = [Revision(folder, benchmarks=timed != ["hook"]) for folder in (new, base, base)]
    if world.rank == 0:
        print("| shape | row | new, ms | base, ms | new / base | host only | base / base |")
        print("|---|---|---|---|---|---|---|")
    slower: list[str] = []
    for what in timed:
        for shape in options.shapes or SHAPES[what]:
            compare = _compare_hook if what == "hook" else partial(_compare_rows, what)
            slower += compare(revisions, shape, world=world, options=options)
    if world.rank == 0:
        print(f"\nslower, with the whole interval above {SLOWER}: {'; '.join(slower) or 'nothing'}")


def _compare_hook(revisions: list[Revision], shape: str, *, world: World, options: argparse.Namespace) -> Iterator[str]:
    workload = Workload(Shape.parse(shape), world=world, seed=options.seed)
    for config in options.configs:
        keys = yaml.safe_load((revisions[0].folder / "yaml" / f"{config}.yaml").read_text(encoding="utf-8")) | QUIET
        keys |= {"mis_max_reject_fraction": 1.0} if keys["use_tis"] else {}
        for layout, next_item in (("same", workload.same_layout), ("new", workload.new_layout)):
            args = [settings(keys) for _ in revisions]

            def next_calls(args: list[Any] = args, next_item: Callable[[], Any] = next_item) -> list[Call]:
                item = next_item()
                return [partial(each.hook, own, **item) for each, own in zip(revisions, args, strict=True)]

            yield from _print_row(shape, f"{config}, {layout}", revisions, next_calls, world=world, options=options)


def _compare_rows(
    what: str, revisions: list[Revision], shape: str, *, world: World, options: argparse.Namespace
) -> Iterator[str]:
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

        yield from _print_row(shape, name, revisions, next_calls, world=world, options=options)


def _print_row(
    shape: str,
    name: str,
    revisions: list[Revision],
    next_calls: Callable[[], list[Call]],
    *,
    world: World,
    options: argparse.Namespace,
) -> Iterator[str]:
    """Print a row, and give its name if it is slower."""
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
        if _interval([[call[0] for call in turn] for turn in turns], 0)[1] > SLOWER:
            yield f"{shape} {name}"


def _cells(turns: list[list[tuple[float, float]]]) -> str:
    totals = [[call[0] for call in turn] for turn in turns]
    hosts = [[call[1] for call in turn] for turn in turns]
    times = [f"{1e3 * statistics.median(turn[i] for turn in totals):.3f}" for i in (0, 1)]
    return " | ".join([*times, _ratio(totals, 0), _ratio(hosts, 0), _ratio(totals, 2)])


def _ratio(turns: list[list[float]], index: int) -> str:
    median, low, high = _interval(turns, index)
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def _interval(turns: list[list[float]], index: int) -> tuple[float, float, float]:
    """Median of the ratios to the base, and its 95 % interval."""
    ratios = [turn[index] / turn[1] for turn in turns]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]


if __name__ == "__main__":
    main()
