"""Whether this revision is slower than another one: ``bench_correction.py`` of both, call by call in turn.

    git worktree add ../before REVISION
    python benchmarks/compare_revisions.py ../before [--turns 8] [--shapes ...] [--configs ...] [further arguments ...]

Three processes stay alive: one of this revision and two of the other. For each shape and configuration they measure
one after the other, in an order that turns around every time. The table has the medians of the turns and the median of
the ratios within a turn. The last column, the other revision against itself, says how far noise alone goes. Both must
know the configurations' names: before 0.2, gated MIS was called recommended.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

THIS = Path(__file__).parents[1]
WORKER = """
import json, sys
sys.path.insert(0, "benchmarks")
answers, sys.stdout = sys.stdout, sys.stderr
import bench_correction
for line in sys.stdin:
    bench_correction.main(json.loads(line))
    print(file=answers, flush=True)
"""
Line = tuple[str, str, str, str]


def main() -> None:
    """Measure in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder with the other revision")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", default=["8x2048", "64x2048", "256x1024", "64x8192"])
    parser.add_argument("--configs", nargs="+", default=["gated MIS", "metrics only"])
    parser.add_argument("--seed", default="7")
    options, rest = parser.parse_known_args()
    workers = [Worker(folder) for folder in (THIS, options.other, options.other)]
    rows = [["--shapes", shape, "--configs", config] for shape in options.shapes for config in options.configs]
    seconds: dict[Line, list[list[float]]] = {}
    try:
        for turn in range(options.turns):
            for row in rows:
                print(f"turn {turn + 1} of {options.turns}: {row[1]}, {row[3]}", file=sys.stderr, flush=True)
                order = workers if turn % 2 else workers[::-1]
                taken = {worker: worker.measure([*rest, *row, "--seed", options.seed]) for worker in order}
                for line in taken[workers[0]]:
                    seconds.setdefault(line, []).append([taken[worker][line] for worker in workers])
    except KeyboardInterrupt:
        print("interrupted: the table is of the turns until here", file=sys.stderr)
    print("| shape | configuration | contender | layout | this, ms | other, ms | this / other | other / other |")
    print("|---|---|---|---|---|---|---|---|")
    for line, turns in seconds.items():
        times = [statistics.median(column) for column in list(zip(*turns, strict=True))[:2]]
        ratios = [statistics.median(turn[i] / turn[1] for turn in turns) for i in (0, 2)]
        cells = [*line, *(f"{1e3 * x:.3f}" for x in times), *(f"{x:.2f}" for x in ratios)]
        print(f"| {' | '.join(cells)} |")


class Worker:
    """A process with one revision that answers one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{folder.resolve()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def measure(self, arguments: list[str]) -> dict[Line, float]:
        """The median of each line's repeats, in seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "rows.json"
            self.process.stdin.write(json.dumps([*arguments, "--json", str(report)]) + "\n")
            self.process.stdin.flush()
            if not self.process.stdout.readline():
                raise SystemExit(f"bench_correction.py of {self.folder} ended with status {self.process.wait()}")
            rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
        return {(row["shape"], row["configuration"], row["contender"], row["layout"]): row["median_s"] for row in rows}


if __name__ == "__main__":
    main()
