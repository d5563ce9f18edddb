"""Whether this revision is slower than another one: ``bench_correction.py`` of both, in turn.

    git worktree add ../before REVISION
    python benchmarks/compare_revisions.py ../before [--turns 3] [arguments of bench_correction.py ...]

Each turn runs the other revision and then this one, with the same inputs. The table has for each line the smallest
median of the turns, of this revision and of the other, and their ratio: the noise of a shared machine only adds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

THIS = Path(__file__).parents[1]
Key = tuple[str, str, str, str]


def main() -> None:
    """Run in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder with the other revision")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", default="7")
    options, rest = parser.parse_known_args()
    best: dict[Path, dict[Key, dict[str, Any]]] = {options.other: {}, THIS: {}}
    for turn in range(options.turns):
        for folder, lines in best.items():
            print(f"turn {turn + 1} of {options.turns}: {folder}", file=sys.stderr, flush=True)
            for row in _rows(folder, [*rest, "--seed", options.seed]):
                key = tuple(row[name] for name in ("shape", "configuration", "contender", "layout"))
                if key not in lines or row["median_s"] < lines[key]["median_s"]:
                    lines[key] = row
    print("| shape | configuration | contender | layout | this, ms | other, ms | this / other |")
    print("|---|---|---|---|---|---|---|")
    for key, row in best[THIS].items():
        other = best[options.other].get(key)
        if other is not None:
            times = [f"{x['median_s'] * 1e3:.3f}" for x in (row, other)]
            print(f"| {' | '.join((*key, *times))} | {row['median_s'] / other['median_s']:.2f} |")


def _rows(folder: Path, arguments: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "rows.json"
        subprocess.run(
            [sys.executable, "benchmarks/bench_correction.py", *arguments, "--json", str(report)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["rows"]
        return rows


if __name__ == "__main__":
    main()
