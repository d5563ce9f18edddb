# SPDX-License-Identifier: Apache-2.0
"""`mis-ext report A --against B`: what is written and shown, and files of B that cannot be read."""

import html
import json
import re
from pathlib import Path

import pytest
from test_report_cli import Page
from test_report_comparison import rows_of, written

from mis_ext.tools.cli import main
from mis_ext.tools.report.noise import digits

pytest.importorskip("jinja2")
pytest.importorskip("rich")


NEW, SHOWN = "n<\x1b\udcff>", r"n<\x1b\udcff>"


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """A folder with both runs, what was written in out, and what was shown in a terminal of 80 columns.

    The numbers are wide, so that the table has to be made narrower. A terminal would obey the name of the first run.
    """
    folder = tmp_path_factory.mktemp("against")
    for name, spread in ((NEW, 0.2), ("old", 0.0001)):
        (folder / name).mkdir()
        for step in range(2):
            rows = rows_of(step, spread=spread, steps=1, first_step=step)
            # What gives no gradient is then not known.
            rows = [{key: value for key, value in row.items() if key != "reward"} for row in rows]
            written(folder / name / f"{step}.jsonl", rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        patched.chdir(folder)
        with (folder / "terminal.txt").open("w") as shown, pytest.MonkeyPatch.context() as output:
            output.setattr("sys.stdout", shown)
            assert main(["report", NEW, "--against", "old", "--preset", "mis", "--out", "out"]) == 0
    return folder


def test_the_page_has_both_runs_and_what_to_do_is_of_the_first(compared) -> None:
    text = (compared / "out" / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.outside == []
    assert len(page.ids) == len({*page.ids})
    assert page.ids[:3] == ["what-to-do", "against", "why"]
    assert {found["href"][1:] for tag, found in page.tags if tag == "a"} == {*page.ids}
    assert "\x1b" not in text
    name = html.escape(SHOWN)
    assert f"<dt>A: {name}/0.jsonl to {name}/1.jsonl, 2 files</dt>" in text
    assert "<dt>B: old/0.jsonl to old/1.jsonl, 2 files</dt>" in text
    assert "<h3>Read of B</h3><ul><li>old/0.jsonl</li><li>old/1.jsonl</li></ul>" in text
    found = json.loads((compared / "out" / "summary.json").read_text())
    first, second = (each["summary"]["overall"]["k3"] for each in (found, found["against"]))
    assert f"k3 is {first:.2g} per token" in text
    assert 3.5e6 < first / second < 4.5e6
    section = text.partition('<section id="against"><h2>Two runs side by side</h2>')[2].partition("</section>")[0]
    (k3,) = [each for each in found["against"]["numbers"] if each["name"] == "k3"]
    interval = " to ".join(digits(k3["interval"][end]) for end in ("low", "high"))
    cells = (f"{first:.3g}", f"{second:.3g}", f"x {digits(k3['change'])}", interval)
    shown = re.sub(r'<td data-title="[^"]*"', "<td", section)
    assert "<tr><td>k3</td>" + "".join(f"<td>{cell}</td>" for cell in cells) in shown
    assert found["against"]["headline"] in section
    for each in found["against"]["causes"]:
        assert each["title"] in html.unescape(section)
        assert ("A alone</td>" in section) or each["second"]
        assert ("B alone</td>" in section) or each["first"]


def test_a_terminal_of_80_columns_shows_the_comparison_whole(compared) -> None:
    shown = (compared / "terminal.txt").read_text()
    found = json.loads((compared / "out" / "summary.json").read_text())["against"]
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert found["headline"] in " ".join(shown.split())
    assert "\x1b" not in shown
    assert f"  A: {SHOWN}/0.jsonl to {SHOWN}/1.jsonl, 2 files\n  B: old/0.jsonl to old/1.jsonl, 2 files\n" in shown
    for each in found["numbers"]:
        # Rewards are not known.
        values = (each[side] for side in ("first", "second"))
        cells = [each["name"], *("-" if value is None else f"{value:.3g}" for value in values)]
        assert re.search("│ " + " +│ ".join(map(re.escape, cells)) + " ", shown), cells
    k3 = found["numbers"][0]
    # The interval goes on in the next line.
    cells = (f"x {k3['change']:.3g}", f"{k3['interval']['low']:.3g} to")
    assert re.search("│ " + " +│ ".join(map(re.escape, cells)) + " ", shown), cells
    assert shown.index("k3 of A is") < shown.index("what each configuration would do")
    # Nothing was there before.
    assert "in the place of" not in " ".join(shown.split())


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_second_run_that_cannot_be_read_ends_it_before_anything_is_written(tmp_path, capsys, as_folder) -> None:
    dumps = written(tmp_path / "run.jsonl", rows_of(0, spread=0.1, prompts=1, steps=1))
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "broken.pt"
    path.write_bytes(b"")
    other = path.parent if as_folder else path
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(dumps), "--against", str(other), "--preset", "mis", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mis-ext report: ")
    assert printed.err.count("\n") == 1
    assert str(other) in printed.err
    assert not (tmp_path / "out").exists()
