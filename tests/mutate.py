# SPDX-License-Identifier: Apache-2.0
"""Do the tests see a change of meaning? Each change of a seeded draw over the package runs against its tests.

    python tests/mutate.py --seed 1 --count 100 --results changes.jsonl

A change is made in a copy of the checkout, and the test files that may see it run until a test is red that is green
without it. Each result is a line of a file: an interrupted run goes on where it stopped. At the end all survivors are
printed, and a table.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import yaml
from mutations import Change, change_at, places_of
from near_tests import NearTests

PACKAGE = "mis_ext"
EQUIVALENT = Path("tests", "data", "equivalent_changes.yaml")
"""Changes that alter no behaviour: path, before, after, and why."""


def equivalent_changes(root: Path) -> list[dict[str, str]]:
    """The changes of a checkout that are not drawn."""
    listed = root / EQUIVALENT
    return yaml.safe_load(listed.read_text(encoding="utf-8")) if listed.is_file() else []


def draw(root: Path, seed: int, count: int, only: Sequence[str] = ("",), package: str = PACKAGE) -> list[Change]:
    """``count`` changes, each at a place of its own: the same ones for the same seed and sources."""
    equivalent = {(row["path"], row["before"], row["after"]) for row in equivalent_changes(root)}
    paths = sorted(path.relative_to(root).as_posix() for path in (root / package).rglob("*.py"))
    sources = {path: (root / path).read_text(encoding="utf-8") for path in paths if path.startswith(tuple(only))}
    places = [place for path, source in sources.items() for place in places_of(path, source)]
    generator = random.Random(seed)
    generator.shuffle(places)
    found: list[Change] = []
    for place in places:
        change = change_at(place, sources[place.path], generator)
        if change and (change.path, change.before.strip(), change.after.strip()) not in equivalent:
            found.append(change)
        if len(found) == count:
            break
    return found


class SendsRed:
    """A plugin of pytest: sends the name of a test that fails, or of a file that cannot be imported."""

    def __init__(self, pipe) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self._pipe.send(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


class Copy:
    """A copy of a checkout, whose tests run in processes that have imported nothing of it before.

    Args:
        root: The checkout.
        folder: Where the copy is made.
        limit: Seconds that one test may take: an endless loop is red.
    """

    def __init__(self, root: Path, folder: Path, limit: int) -> None:
        self._root, self._folder, self._limit = root, folder, limit
        self._num_writes = 0
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: name and (root / name).exists(), listed.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)

    def first_red(self, change: Change, file: str) -> str | None:
        """The first test of a file that fails with a change and passes without it."""
        path = self._folder / change.path
        unchanged = path.read_text(encoding="utf-8")
        red_anyway: list[str] = []
        while True:
            self._write(path, change.text)
            red = self._run(file, *(f"--deselect={each}" for each in red_anyway))
            self._write(path, unchanged)
            if red is None or self._is_green(red):
                return red
            if red == file or red in red_anyway:
                raise RuntimeError(f"{file} does not run, with or without a change")
            red_anyway.append(red)

    @cache  # noqa: B019
    def _is_green(self, test: str) -> bool:
        return self._run(test, *(() if "::" in test else ("--collect-only",))) is None

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # By its seconds Python knows whether a compiled file is that of today: no two writes have the same.
        self._num_writes += 1
        os.utime(path, (self._num_writes, self._num_writes))

    def _run(self, *arguments: str) -> str | None:
        """The first red test; what was asked for, if the process died."""
        # What nobody holds any more ends here: a process group of gloo waits for ever where its threads are not.
        gc.collect()
        receives, sends = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=self._pytest, args=(arguments, sends))
        process.start()
        sends.close()
        try:
            process.join(20 * self._limit)
            red = receives.recv() if receives.poll() else None
        except EOFError:
            red = None
        finally:
            # With the processes that its tests started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return red or (None if process.exitcode in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else arguments[0])

    def _pytest(self, arguments: Sequence[str], pipe) -> None:
        # What this process holds is not looked through, and so not copied, each time that the fork collects.
        gc.freeze()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(self._folder)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        of_checkout = [str(self._root / name) for name in ("", "tests", "tests/support")]
        sys.path[:] = [str(self._folder), *(each for each in sys.path if each not in of_checkout)]
        os.environ["PYTHONPATH"] = str(self._folder)
        # The same examples each time, and a failing one as it is found.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "changes", phases=phases, max_examples=300, derandomize=True, database=None
        )
        hypothesis.settings.load_profile("changes")
        options = ["-x", "-m", "not whole_run", "-p", "no:cacheprovider", f"--timeout={self._limit}"]
        # What is imported already cannot be rewritten by pytest: it need not be.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        os._exit(pytest.main([*options, *arguments], plugins=[SendsRed(pipe)]))


class Results:
    """A file with a line for each change that was run; the last line of a change counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self._rows = {self._key(row): row for row in map(json.loads, lines)}

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple:
        return tuple(row[name] for name in ("path", "line", "before", "after"))

    def of(self, change: Change) -> dict[str, Any] | None:
        return self._rows.get(self._key(change._asdict()))

    def add(self, change: Change, **found: Any) -> None:
        row = {name: value for name, value in change._asdict().items() if name != "text"} | found
        self._rows[self._key(row)] = row
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def seconds(self) -> dict[str, float]:
        """What each test file took, the last time that no test of it was red."""
        return {file: seconds for row in self._rows.values() for file, seconds in row["seconds"].items()}


def run(
    changes: Sequence[Change],
    copy: Copy,
    tests: NearTests,
    results: Results,
    *,
    through: int = 1,
    again: bool = False,
    stop: bool = False,
) -> None:
    """Run the changes that have no result yet; with ``again`` also those that survived."""
    for number, change in enumerate(changes, start=1):
        known = results.of(change)
        if known and (known["red"] or not again):
            continue
        distance, cost = tests.files(change.path, change.scopes, through=through), results.seconds()
        seconds, red = {}, None
        for file in sorted(distance, key=lambda file: (min(distance[file], 1), cost.get(file, tests.size(file)), file)):
            show_progress(number, len(changes), f"{change.path}:{change.line}  {file}")
            begun = time.monotonic()
            red = copy.first_red(change, file)
            seconds[file] = round(time.monotonic() - begun, 1)
            if red:
                break
        results.add(change, red=red, seconds=seconds)
        if stop and not red:
            break
    show_progress(len(changes), len(changes), "")


def show_progress(number: int, count: int, text: str) -> None:
    """A bar, where somebody looks."""
    if sys.stderr.isatty():
        bar = "#" * (20 * number // count)
        line = f"[{bar:20}] {number}/{count}  {text}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{line}", end="" if text else "\n", file=sys.stderr, flush=True)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The survivors as differences, and a table of the rooms."""
    parts, drawn, red = [], Counter(), Counter()
    for row in rows:
        room = row["path"].split("/")[1].removesuffix(".py")
        drawn.update((room, "all"))
        red.update((room, "all") if row["red"] else ())
        if not row["red"]:
            signed = [
                sign + line for sign, name in (("-", "before"), ("+", "after")) for line in row[name].splitlines()
            ]
            parts.append("\n".join((f"{row['path']}:{row['line']}", *signed, "")))
    table = [f"| {room} | {drawn[room]} | {red[room]} |" for room in (*sorted(drawn.keys() - {"all"}), "all")]
    return "\n".join((*parts, "| room | changes | red |", "|---|---|---|", *table))


def main() -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="equal seeds draw equal changes of equal sources")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATH", help="files that begin so")
    parser.add_argument("--results", type=Path, default=Path("changes.jsonl"), help="a line for each change")
    parser.add_argument("--limit", type=int, default=120, help="seconds of one test: an endless loop is red")
    parser.add_argument("--through", type=int, default=1, help="imports between a test file and the changed module")
    parser.add_argument("--again", action="store_true", help="run the survivors of the file anew")
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    parser.add_argument("--package", default=PACKAGE)
    parser.add_argument("-x", dest="stop", action="store_true", help="stop at the first survivor")
    arguments = parser.parse_args()
    changes = draw(arguments.root, arguments.seed, arguments.count, arguments.only, arguments.package)
    results = Results(arguments.results)
    if not arguments.list:
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        # So that the copy goes away.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        with tempfile.TemporaryDirectory() as folder:
            run(
                changes,
                Copy(arguments.root, Path(folder), arguments.limit),
                NearTests(arguments.root, arguments.package),
                results,
                through=arguments.through,
                again=arguments.again,
                stop=arguments.stop,
            )
    if arguments.list:
        print(report([{**change._asdict(), "red": None} for change in changes]))
    else:
        print(report([row for row in map(results.of, changes) if row]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
