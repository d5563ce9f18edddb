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


def compare(other: Path, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(ROOT / "benchmarks" / "compare_revisions.py"), str(other)]
    options = ("--device", "cpu", "--calls", "5", "--shapes", "2x8", "--cp", str(ranks), *options)
    return subprocess.run([*command, *options], capture_output=True, text=True)


def cells(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]


@pytest.mark.whole_run
def test_a_slower_revision_is_seen_and_equals_itself_on_two_ranks(tmp_path: Path) -> None:
    copy = tmp_path / "mis_ext"
    copy.mkdir()
    for entry in (ROOT / "mis_ext").iterdir():
        if entry.name != "__init__.py":
            (copy / entry.name).symlink_to(entry)
    package = (ROOT / "mis_ext" / "__init__.py").read_text(encoding="utf-8")
    (copy / "__init__.py").write_text(package + SLOWER, encoding="utf-8")

    rows = cells(compare(tmp_path, "--configs", "metrics_only", ranks=2).stdout)
    assert [row[:2] for row in rows] == [["2x8", f"metrics_only, {layout}"] for layout in ("same", "new")]
    for row in rows:
        assert float(row[4].split()[0]) < 0.5, "the other revision sleeps"
        assert float(row[6].split()[0]) > 0.5, "loaded twice, it is as slow as itself"


@pytest.mark.whole_run
def test_only_the_rows_that_are_named_are_timed_and_an_unknown_name_is_an_error() -> None:
    found = compare(ROOT, "--what", "methods", "--rows", "veto", "ppo")
    assert [row[:2] for row in cells(found.stdout)] == [["2x8", "veto"], ["2x8", "ppo"]]
    found = compare(ROOT, "--what", "methods", "--rows", "ppo", "no_such_method")
    assert found.returncode != 0
    assert "--rows no_such_method" in found.stderr
    assert cells(found.stdout) == []
