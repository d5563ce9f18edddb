# SPDX-License-Identifier: Apache-2.0
"""The report's page in headless Chromium: by keyboard alone, and on a telephone."""

import json
import re
import sys
from pathlib import Path

import pytest
from browser import Browser, find_browser
from commands import json_of
from test_report_cli import write_dumps

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
sys.path.append(str(Path(__file__).parents[2] / "docs"))
from picture_of_report import HEIGHT, WIDTH, draw_first_screen
from PIL import Image

PROGRAM = find_browser()
# A browser takes seconds. What the page says is asked of its text in the other files; what its script does, here alone.
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
    pytest.mark.whole_run,
]

INTERACTIVE = "a[href], button, input, select, textarea, summary, [tabindex]"
NUMBER_THEM = f"""
[...document.querySelectorAll({INTERACTIVE!r})].forEach((each, at) => each.dataset.at = at);
document.querySelectorAll({INTERACTIVE!r}).length
"""
FOCUSED = """(() => {
    const it = document.activeElement, style = getComputedStyle(it), box = it.getBoundingClientRect();
    return {at: it.dataset.at === undefined ? null : Number(it.dataset.at), outline: style.outlineStyle,
            width: parseFloat(style.outlineWidth), color: style.outlineColor,
            seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth};
})()"""
WIDER_THAN_THE_PAGE = """[...document.querySelectorAll("body *")].filter(each =>
    each.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !each.closest(".scroll, pre"))
    .map(each => each.outerHTML.slice(0, 80))"""
PHONE = 390
HIDES_COLUMNS = """[...document.querySelectorAll(".scroll")].filter(each => each.scrollWidth > each.clientWidth)
    .map(each => each.ariaLabel)"""
SCROLLS_WITHOUT_FOCUS = """[...document.querySelectorAll("body *")].filter(each =>
    ["auto", "scroll"].includes(getComputedStyle(each).overflowX) && each.tabIndex !== 0)
    .map(each => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    dumps, other = (write_dumps(folder / name, kernels=kernels) for name, kernels in (("dumps", 0.12), ("other", 0.01)))
    # A folder that is asked for is written beside the document.
    tried = ["--preset=mis", "--preset=gated_mis", "--method=reinforce_sequence_snis"]
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
    assert browser.evaluate(SCROLLS_WITHOUT_FOCUS) == []
    assert browser.evaluate(HIDES_COLUMNS) == []


def test_the_first_screen_of_a_telephone_ends_with_what_to_do(browser, page) -> None:
    browser.open(page, width=PHONE, height=844)
    bottom = "document.querySelector('#what-to-do pre').getBoundingClientRect().bottom"
    assert browser.evaluate(f"{bottom} < innerHeight")
    assert browser.evaluate("document.querySelector('#what-to-do').getBoundingClientRect().bottom > 0.7 * innerHeight")


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


def test_in_the_dark_text_and_page_change_places(browser, page) -> None:
    for scheme, text, paper in (("light", 0.1, 1.0), ("dark", 0.9, 0.07)):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(page, width=1280)
        for name, expected in (("color", text), ("backgroundColor", paper)):
            parts = re.findall(r"\d+", browser.evaluate(f"getComputedStyle(document.body).{name}"))
            assert sum(map(int, parts)) / (3 * 255) == pytest.approx(expected, abs=0.05)
        is_turned = browser.evaluate("getComputedStyle(document.images[0]).filter.startsWith('invert')")
        assert is_turned == (scheme == "dark")
    browser.call("Emulation.setEmulatedMedia", features=[])


def test_every_picture_is_shown_and_nothing_is_complained_of(browser, page) -> None:
    browser.open(page, width=1280)
    widths = browser.evaluate("[...document.images].map(each => each.complete && each.naturalWidth)")
    assert len(widths) == 8
    assert all(width > 100 for width in widths)
    assert browser.complaints == []


@pytest.mark.parametrize("width", [PHONE, 1280])
def test_tab_reaches_everything_in_order_and_shows_where_it_is(browser, page, width) -> None:
    browser.open(page, width=width)
    count = browser.evaluate(NUMBER_THEM)
    assert count > 20
    for expected in range(count):
        browser.press_tab()
        found = browser.evaluate(FOCUSED)
        assert found["at"] == expected
        assert found["outline"] == "solid"
        assert found["width"] >= 2.0
        assert found["color"] == "rgb(213, 94, 0)"
        assert found["seen"], expected


def test_the_picture_of_the_pages_is_the_first_screen(page, tmp_path) -> None:
    picture, committed = tmp_path / "report.png", Path(__file__).parents[2] / "docs" / "images" / "report.png"
    draw_first_screen(page, picture)
    for path in (picture, committed):
        image = Image.open(path)
        assert (image.size, image.mode) == ((WIDTH, HEIGHT), "P")
        assert path.stat().st_size < 80_000
        # The heading is dark on white, and what one would scroll with is not in the way.
        gray = image.convert("L")
        assert gray.crop((16, 16, 260, 56)).getextrema()[0] < 64
        assert gray.crop((WIDTH - 10, 0, WIDTH, HEIGHT)).getextrema() == (255, 255)


def test_a_long_line_to_paste_is_read_without_scrolling(browser, page) -> None:
    browser.open(page, width=1280)
    widths = browser.evaluate("[...document.querySelectorAll('pre')].map(each => each.scrollWidth - each.clientWidth)")
    assert widths
    assert set(widths) == {0}
