"""benchmarks/compare_revisions.py times two revisions of the package, not one of them twice."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOWER = """
from mis_ext.hosts.slime_miles import hook as _hook
import time as _time
def compute_mis_weights_with_cp(*args, **kwargs):
    _time.sleep(0.05)
    return _hook.compute_mis_weights_with_cp(*args, **kwargs)
"""


@pytest.mark.whole_run
def test_a_slower_revision_is_seen_and_equals_itself(tmp_path: Path) -> None:
    copy = tmp_path / "mis_ext"
    copy.mkdir()
    for entry in (ROOT / "mis_ext").iterdir():
        if entry.name != "__init__.py":
            (copy / entry.name).symlink_to(entry)
    package = (ROOT / "mis_ext" / "__init__.py").read_text(encoding="utf-8")
    (copy / "__init__.py").write_text(package + SLOWER, encoding="utf-8")

    command = [sys.executable, str(ROOT / "benchmarks" / "compare_revisions.py"), str(tmp_path), "--device", "cpu"]
    command += ["--calls", "5", "--shapes", "2x8", "--configs", "metrics_only"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [row[:2] for row in rows] == [["2x8", f"metrics_only, {layout}"] for layout in ("same", "new")]
    for row in rows:
        assert float(row[4].split()[0]) < 0.5, "the other revision sleeps"
        assert float(row[6].split()[0]) > 0.5, "loaded twice, it is as slow as itself"
