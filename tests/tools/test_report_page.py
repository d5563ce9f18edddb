"""The report's page in headless Chromium: by keyboard alone, and on a telephone."""

import json
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
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)")

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


@pytest.mark.whole_run
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_never_wider_than_the_window(browser, page, width) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(WIDER_THAN_THE_PAGE) == []
    assert browser.evaluate(SCROLLS_WITHOUT_FOCUS) == []


def test_every_picture_is_shown_and_nothing_is_complained_of(browser, page) -> None:
    browser.open(page, width=1280)
    widths = browser.evaluate("[...document.images].map(each => each.complete && each.naturalWidth)")
    assert len(widths) == 8
    assert all(width > 100 for width in widths)
    assert browser.complaints == []


@pytest.mark.parametrize("width", [400, 1280])
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


def test_the_first_link_skips_to_the_recommendation(browser, page) -> None:
    browser.open(page, width=400)
    browser.press_tab()
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the recommendation"
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
    )
    browser.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)
    assert browser.evaluate("location.hash") == "#what-to-do"


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
