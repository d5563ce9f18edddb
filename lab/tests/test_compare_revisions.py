# SPDX-License-Identifier: Apache-2.0
"""lab/benchmarks/compare_revisions.py sees one ULP, and times two revisions of the package, not one of them twice."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "lab" / "benchmarks"))

from compare_revisions import differences, main  # noqa: E402
from revision_outputs import packed, unpacked  # noqa: E402

SLOWER = """
from mis_ext.hosts.slime_miles import hook as _hook
import time as _time
def compute_mis_weights_with_cp(*args, **kwargs):
    _time.sleep(0.1)
    return _hook.compute_mis_weights_with_cp(*args, **kwargs)
"""

ONE_ULP = """
import torch as _torch
class _Off:
    def __init__(self, row):
        self._row = row
    def __getattr__(self, name):
        return getattr(self._row, name)
    def __call__(self, **parameters):
        method = self._row(**parameters)
        def call(**given):
            found = method(**given)
            return found._replace(coefficient_T=_torch.nextafter(found.coefficient_T, found.coefficient_T + 1.0))
        return call
METHODS["sapo"] = _Off(METHODS["sapo"])
"""


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), None),
        (torch.tensor([float("nan")]), -torch.tensor([float("nan")]), None),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-22]), "1 of 2 differ, by at most 1 ULP (2.4e-07)"),
        (torch.tensor([2.0**-149]), torch.tensor([-(2.0**-149)]), "1 of 1 differ, by at most 2 ULP (2.8e-45)"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 1 differ, by at most 0 ULP (0)"),
        (torch.ones(1).bfloat16(), torch.tensor([1 + 2**-7]).bfloat16(), "1 of 1 differ, by at most 1 ULP (0.0078)"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 differ"),
        (torch.ones(2), torch.ones(3), "torch.float32 [2] became torch.float32 [3]"),
        ("says this", "says that", "'says this' became 'says that'"),
        (torch.ones(1), None, "only in base"),
    ],
)
def test_every_difference_is_a_line(before, after, line) -> None:
    found = [*differences({"name": before}, {} if after is None else {"name": after})]
    assert found == ([] if line is None else [f"name: {line}"])


def test_a_number_that_one_side_has_not_is_said() -> None:
    (line,) = differences({"name": torch.tensor([1.0])}, {"name": torch.tensor([float("inf")])})
    assert line.endswith(", 1 of them finite in one alone")


def test_what_is_packed_comes_out_again() -> None:
    given = {"a": torch.ones(2, 3), "b": "text", "c": torch.zeros(0, 2), "d": torch.tensor(4), "e": torch.zeros(2)}
    found = unpacked(packed(given))
    assert [*found] == [*given]
    assert [*differences(given, found)] == []


@pytest.mark.whole_run
@pytest.mark.long_run
def test_one_ulp_in_one_method_is_listed_and_nothing_else(tmp_path: Path, monkeypatch, capsys) -> None:
    copy = tmp_path / "mis_ext"
    (copy / "methods").mkdir(parents=True)
    for folder in (copy, copy / "methods"):
        for entry in (ROOT / folder.relative_to(tmp_path)).iterdir():
            if entry.name not in ("methods", "catalogue.py", "__pycache__"):
                (folder / entry.name).symlink_to(entry)
    catalogue = (ROOT / "mis_ext" / "methods" / "catalogue.py").read_text(encoding="utf-8")
    (copy / "methods" / "catalogue.py").write_text(catalogue + ONE_ULP, encoding="utf-8")
    (tmp_path / "yaml").symlink_to(ROOT / "yaml")
    options = ["--parts", "methods", "--capabilities", "default"]
    monkeypatch.setattr(sys, "argv", ["compare_revisions.py", str(ROOT), str(tmp_path), *options])
    with pytest.raises(SystemExit, match="1"):
        main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert len(lines) == 3
    assert all(line.startswith("- methods: sapo ") and "coefficient_T" in line for line in lines)
    assert all("by at most 1 ULP" in line for line in lines)


def cells(printed: str) -> list[list[str]]:
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[2:]]


@pytest.mark.long_run
@pytest.mark.whole_run
@pytest.mark.slow
def test_a_slower_revision_is_seen_and_equals_itself(tmp_path: Path) -> None:
    copy = tmp_path / "mis_ext"
    copy.mkdir()
    for entry in (ROOT / "mis_ext").iterdir():
        if entry.name != "__init__.py":
            (copy / entry.name).symlink_to(entry)
    package = (ROOT / "mis_ext" / "__init__.py").read_text(encoding="utf-8")
    (copy / "__init__.py").write_text(package + SLOWER, encoding="utf-8")
    for name in ("yaml", "lab", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, str(ROOT / "lab" / "benchmarks" / "compare_revisions.py"), str(ROOT), str(tmp_path)]
    options = ["--what", "hook", "methods", "--configs", "metrics_only", "--rows", "veto", "ppo", "--device", "cpu"]
    done = subprocess.run(
        [*command, *options, "--calls", "5", "--shapes", "2x8"], capture_output=True, text=True, check=True
    )
    rows = cells(done.stdout)
    assert [row[:2] for row in rows[2:]] == [["2x8", "veto"], ["2x8", "ppo"]]
    assert [row[:2] for row in rows[:2]] == [["2x8", f"metrics_only, {layout}"] for layout in ("same", "new")]
    for row in rows[:2]:
        new, base_again = float(row[4].split()[0]), float(row[6].split()[0])
        assert new > 1.2 * max(1.0, base_again), "the new revision sleeps"
    # Of five calls an interval may reach below it.
    assert done.stdout.splitlines()[-1].startswith("slower, with the whole interval above 1.05: ")
