# SPDX-License-Identifier: Apache-2.0
"""Draw the table of the tiny model in ``lab/evidence/README.md`` as a forest plot, a panel per staleness.

python lab/studies/forest.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
from evidence.pictures import save

PAGE = Path(__file__).parents[1] / "evidence" / "README.md"
CELL = re.compile(r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]")
STALENESS = re.compile(r"\[weights (\d+) steps? (?:old|stale)")
METHODS = slice(4, 10)
"""The columns of methods."""


def effects(page: str) -> dict[int, list[tuple[str, float, float, float]]]:
    """Read method, difference, and interval of each cell by staleness; cells without an interval are skipped."""
    lines = page.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| engine | seeds"))
    names = [name.strip() for name in lines[start].strip("|").split("|")][METHODS]
    found: dict[int, list[tuple[str, float, float, float]]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split("|")
        stale = STALENESS.search(cells[0])
        rows = found.setdefault(int(stale[1]) if stale else 0, [])
        for name, cell in zip(names, cells[METHODS], strict=True):
            if number := CELL.search(cell):
                rows.append((name, *map(float, number.groups())))
    return dict(sorted(found.items()))


def main() -> None:
    """Write the picture next to the page."""
    by_staleness = effects(PAGE.read_text(encoding="utf-8"))
    names = list(dict.fromkeys(name for rows in by_staleness.values() for name, *_ in rows))
    figure, axes = plt.subplots(1, len(by_staleness), figsize=(13, 3.4), sharey=True, constrained_layout=True)
    for axis, (staleness, rows) in zip(axes, by_staleness.items(), strict=True):
        for at, name in enumerate(names):
            own = [row for row in rows if row[0] == name]
            for place, (_, value, low, high) in enumerate(own):
                height = at + 0.7 * ((place + 1) / (len(own) + 1) - 0.5)
                color = "C2" if low > 0 else "C3" if high < 0 else "0.5"
                axis.plot((low, high), (height, height), color=color, linewidth=1.4)
                axis.plot(value, height, "o", color=color, markersize=3)
        axis.axvline(0, color="0.7", linewidth=0.8)
        axis.set(title=f"staleness {staleness}" if staleness else "up-to-date weights", xlim=(-0.45, 0.5))
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("mean reward minus that without a correction, 95 % interval", fontsize=10)
    save(figure, PAGE.with_name("forest.png"))


if __name__ == "__main__":
    main()
