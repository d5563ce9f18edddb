# SPDX-License-Identifier: Apache-2.0
"""tests/mutate.py tells a change that a test sees from one that none sees, in a small package of its own."""

import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import mutate
import pytest
import yaml
from mutate import EQUIVALENT, Copy, Results, draw, report, run
from mutations import Change, change_at, places_of
from near_tests import NearTests

SUMS = """
def clipped(x, high=3):
    return min(x, high)


def unseen(x):
    return x + 1


def count_down(n):
    while n:
        n -= 1
    return n
"""
TESTS = """
from made_up.sums import clipped, count_down


def test_clipped():
    assert [clipped(x) for x in (0, 2, 3, 9)] == [0, 2, 3, 3]


def test_count_down():
    assert count_down(2) == 0
"""
NOT_DRAWN = '''"""Not a change: 1 < 2."""
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from collections import Counter
__all__ = ["a" + "b"]
@cache(size=3)
def function(x: Literal[1, 2], path: "str | None") -> dict[str, 1 + 1]:
    """Nor this: 2 > 1."""
    open(path, encoding="utf-8")
    zip(x, x, strict=True)
    "a" + f"{x}"
    raise ValueError(f"{x + 1}", 2 * x)
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    # Each run collects garbage, and would look through all that earlier tests left.
    gc.freeze()
    root = tmp_path / "checkout"
    for name, text in (("made_up/__init__.py", ""), ("made_up/sums.py", SUMS), ("tests/test_sums.py", TESTS)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def drawn(root: Path, *, seed: int = 1, count: int = 100, only: tuple[str, ...] = ("",)) -> list[Change]:
    return draw(root, seed, count, only, package="made_up")


def run_all(root: Path, changes: list[Change], folder: Path, **options: bool) -> Results:
    results = Results(folder / "results.jsonl")
    copy = folder / "copy"
    copy.mkdir(exist_ok=True)
    run(changes, Copy(root, copy, limit=2), NearTests(root, "made_up"), results, **options)
    return results


def in_function(changes: list[Change], name: str) -> list[Change]:
    found = [change for change in changes if change.scopes == (name,)]
    assert found
    return found


def all_changes(source: str) -> set[str]:
    """What each change of each place writes: which of them a generator takes is chance."""
    pairs = [(place, pair) for place in places_of("a.py", source) for pair in place.pairs]
    changes = [change_at(place._replace(pairs=(pair,)), source, random.Random(0)) for place, pair in pairs]
    return {change.after.strip() for change in changes if change}


@pytest.mark.whole_run
def test_what_a_test_sees_is_red_and_what_none_sees_survives(checkout, tmp_path) -> None:
    red_anyway = checkout / "tests" / "test_sums.py"
    red_anyway.write_text(f"def test_it_is_red_anyway():\n    assert False\n{TESTS}")
    before = {path: path.read_bytes() for path in checkout.rglob("*.py")}
    changes = drawn(checkout)
    largest = next(change for change in in_function(changes, "clipped") if "max" in change.after)
    chosen = [largest, in_function(changes, "unseen")[0]]
    results = run_all(checkout, chosen, tmp_path)
    assert [results.of(change)["red"] for change in chosen] == ["tests/test_sums.py::test_clipped", None]
    assert report([results.of(change) for change in chosen]).splitlines() == [
        "made_up/sums.py:7",
        "-    return x + 1",
        f"+{chosen[1].after}",
        "",
        "| room | changes | red |",
        "|---|---|---|",
        "| sums | 2 | 1 |",
        "| all | 2 | 1 |",
    ]
    assert {path: path.read_bytes() for path in checkout.rglob("*.py")} == before


@pytest.mark.whole_run
def test_a_loop_without_end_is_red(checkout, tmp_path) -> None:
    # At one place there may be several changes.
    changes = (change for seed in range(100) for change in drawn(checkout, seed=seed))
    change = next(change for change in changes if change.after.strip() == "n += 1")
    assert run_all(checkout, [change], tmp_path).of(change)["red"] == "tests/test_sums.py::test_count_down"


@pytest.mark.whole_run
def test_what_an_earlier_test_left_to_the_collector_is_not_destroyed_in_a_fork(checkout, tmp_path) -> None:
    class Threads:
        def __init__(self) -> None:
            self.itself, self._process = self, os.getpid()

        def __del__(self) -> None:
            while os.getpid() != self._process:
                time.sleep(1)

    (checkout / "tests" / "test_sums.py").write_text("import gc, made_up.sums\ngc.collect()\ndef test_unseen(): pass\n")
    chosen = in_function(drawn(checkout), "unseen")[:1]
    Threads()
    assert run_all(checkout, chosen, tmp_path).of(chosen[0])["red"] is None


@pytest.mark.whole_run
def test_it_stops_at_a_survivor_whose_result_is_kept_and_which_runs_again_when_asked(checkout, tmp_path) -> None:
    first, *others = [*in_function(drawn(checkout), "unseen"), *in_function(drawn(checkout), "clipped")]
    results, chosen = run_all(checkout, [first, *others], tmp_path, stop=True), [first]
    assert results.of(first)["red"] is None
    assert not any(map(results.of, others))
    (checkout / "tests" / "test_unseen.py").write_text(
        "import made_up.sums\ndef test_unseen():\n    assert made_up.sums.unseen(1) == 2\n"
    )
    assert run_all(checkout, chosen, tmp_path).of(chosen[0])["red"] is None
    assert run_all(checkout, chosen, tmp_path, again=True).of(chosen[0])["red"] == "tests/test_unseen.py::test_unseen"
    assert Results(tmp_path / "results.jsonl").of(chosen[0])["red"] == "tests/test_unseen.py::test_unseen"


def test_equal_seeds_draw_equal_changes(checkout) -> None:
    assert drawn(checkout, seed=1) == drawn(checkout, seed=1)
    assert drawn(checkout, seed=1) != drawn(checkout, seed=2)
    assert drawn(checkout, count=3) == drawn(checkout)[:3]
    assert drawn(checkout, only=("made_up/other",)) == []


def test_an_equivalent_change_is_not_drawn(checkout) -> None:
    changes = drawn(checkout)
    (swapped,) = [change for change in changes if "min(high, x)" in change.after]
    row = {"path": swapped.path, "before": swapped.before.strip(), "after": swapped.after.strip(), "why": "symmetric"}
    (checkout / EQUIVALENT).parent.mkdir(parents=True)
    (checkout / EQUIVALENT).write_text(yaml.safe_dump([row]))
    assert drawn(checkout) == [change for change in changes if change != swapped]


def test_what_has_no_meaning_is_not_changed() -> None:
    assert all_changes(NOT_DRAWN) == {"pass"}


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a < b <= c", {"a <= b <= c", "a > b <= c", "a < b < c", "a < b >= c"}),
        ("(a + b) * c", {"(a - b) * c", "(a + b) / c"}),
        ("a and b or c", {"(a or b) or c", "b or c", "a or c", "(a and b) and c", "c", "a and b"}),
        ("not a", {"a"}),
        ("[a[1:], -1e-4]", {"[a[2:], -1e-4]", "[a[0:], -1e-4]", "[a[1 + 1:], -1e-4]", "[a[1 - 1:], -1e-4]"} | {
            "[a[1:], 0.0001]", "[a[1:], -0.0002]"}),
        ("x = f(a, b, *c, key=True)", {
            "x = f(b, a, *c, key=True)", "x = f(a, *c, b, key=True)", "x = f(a, b, *c)", "x = f(a, b, *c, key=False)"}),
        ("x = any(y for y in range(n) if y)", {
            "x = all(y for y in range(n) if y)", "x = any(y for y in range(n + 1) if y)",
            "x = any(y for y in range(n - 1) if y)", "x = any(y for y in range(n) if not y)"}),
        ("if a:\n    b.c = d", {"if not a:", "pass"}),
        ("b(1)\nx += c", {"b(2)", "b(0)", "pass", "x -= c"}),
    ],
)  # fmt: skip
def test_these_are_the_changes_of_an_expression(source, changed) -> None:
    assert all_changes(source) == changed


def test_a_file_is_near_by_what_it_imports_and_by_the_names_that_it_calls(tmp_path) -> None:
    for name, text in {
        "p/__init__.py": "from p.a import first",
        "p/a.py": "def first(): pass",
        "p/b.py": "from p.a import first",
        "p/c.py": "import p.b",
        "tests/support/helper.py": "from p import first",
        "tests/test_a.py": "import p\np.first()",
        "tests/test_b.py": "import p.b",
        "tests/test_c.py": "from p import c",
        "tests/room/test_helper.py": "from helper import first",
        "tests/test_name.py": "# of some_name",
        "tests/test_skip.py": "pytest.importorskip('p.a')",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    near = {"tests/test_a.py": 0, "tests/test_b.py": 1, "tests/room/test_helper.py": 0, "tests/test_skip.py": 0}
    tests = NearTests(tmp_path, "p")
    assert tests.files("p/a.py", (), fewest=4) == near
    assert tests.files("p/a.py", (), fewest=5) == near | {"tests/test_c.py": 2}
    assert tests.files("p/a.py", (), through=2, fewest=0) == near | {"tests/test_c.py": 2}
    assert tests.files("p/a.py", ("some_name",), fewest=0) == near | {"tests/test_name.py": 0}
    assert tests.files("p/c.py", ()) == {"tests/test_c.py": 0}


def program(root: Path, results: Path, temporary: Path) -> None:
    """In a process of its own, which has imported what it needs."""
    tempfile.tempdir = str(temporary)
    sys.argv = ["mutate.py", "--root", str(root), "--package", "made_up", "--results", str(results)]
    sys.exit(mutate.main())


@pytest.mark.whole_run
def test_an_interrupted_run_leaves_nothing_behind(checkout, tmp_path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    (checkout / "tests" / "test_sums.py").write_text(
        f"import made_up.sums, pathlib, time\npathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(60)\n"
    )
    process = get_context("fork").Process(target=program, args=(checkout, tmp_path / "results.jsonl", folder))
    process.start()
    while not (tmp_path / "begun").exists():
        assert process.is_alive()
        time.sleep(0.05)
    assert [path.name for path in folder.glob("*/made_up/sums.py")] == ["sums.py"]
    process.terminate()
    process.join()
    assert process.exitcode == 1
    assert list(folder.iterdir()) == []
