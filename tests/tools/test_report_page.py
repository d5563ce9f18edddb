# SPDX-License-Identifier: Apache-2.0
"""The report's page in headless Chromium: its width on a telephone, and its script."""

import json
from pathlib import Path

import pytest
from browser import Browser, find_browser
from commands import json_of
from test_report_cli import write_dumps

pytest.importorskip("jinja2")
pytest.importorskip("rich")
PROGRAM = find_browser()
# A browser takes seconds. What the page says is asked of its text in the other files; what its script does, here alone.
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
    pytest.mark.whole_run,
]

WIDER_THAN_THE_PAGE = """[...document.querySelectorAll("body *")].filter(each =>
    each.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !each.closest(".scroll, pre"))
    .map(each => each.outerHTML.slice(0, 80))"""
PHONE = 390
HIDES_COLUMNS = """[...document.querySelectorAll(".scroll")].filter(each => each.scrollWidth > each.clientWidth)
    .map(each => each.ariaLabel)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    dumps, other = (write_dumps(folder / name, kernels=kernels) for name, kernels in (("dumps", 0.12), ("other", 0.01)))
    # A folder that is asked for is written beside the document.
    tried = ["--preset=mis", "--preset=geometric_mis", "--method=reinforce_sequence_snis"]
    code, found = json_of("report", dumps, "--against", other, *tried, "--out", folder / "out")
    assert code == 0
    assert json.loads((folder / "out" / "summary.json").read_text()) == found
    return folder / "out" / "report.html"


@pytest.fixture(scope="module")
def browser():
    with Browser(PROGRAM) as browser:
        yield browser


@pytest.mark.parametrize("width", [PHONE, 1280])
def test_neither_the_page_nor_a_table_is_wider_than_the_window(browser, page, width) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(WIDER_THAN_THE_PAGE) == []
    assert browser.evaluate(HIDES_COLUMNS) == []


def test_a_click_on_a_title_sorts_the_table_and_another_turns_it_round(browser, page) -> None:
    browser.open(page, width=1280)
    column = "[...document.querySelectorAll('#what-if th')].find(each => each.textContent === 'tokens kept')"
    kept = "[...document.querySelectorAll('#what-if tbody tr')].map(each => parseFloat(each.cells[1].textContent))"
    before = browser.evaluate(kept)
    assert len(before) == 4
    for order, turned in (("descending", True), ("ascending", False)):
        browser.evaluate(f"{column}.querySelector('button').click()")
        assert browser.evaluate(f"{column}.ariaSort") == order
        assert browser.evaluate(kept) == sorted(before, reverse=turned)
    # What was not measured is last in either order, and a number of another size is no word.
    compared = "document.querySelector('#against table')"
    for sign in (-1, 1):
        browser.evaluate(f"{compared}.tHead.rows[0].cells[1].querySelector('button').click()")
        found = browser.evaluate(f"[...{compared}.tBodies[0].rows].map(each => each.cells[1].textContent)")
        numbers = [float(each) for each in found if each != "-"]
        assert found[len(numbers) :] == ["-"] * (len(found) - len(numbers))
        assert numbers == sorted(numbers, reverse=sign < 0)
    assert browser.complaints == []
