# SPDX-License-Identifier: Apache-2.0
"""The first screen of a report: what headless Chromium shows of its page.

The guide's picture is of the recorded run that syncs its weights every four steps:

tar xJf tests/data/example_dumps/dumps.tar.xz
mis-ext report sync_every_4 --out mismatch
python docs/picture_of_report.py mismatch/report.html
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("lab/studies", "tests/support")]

from browser import NAMES, Browser, find_browser  # noqa: E402
from PIL import Image  # noqa: E402

WIDTH, HEIGHT = 1080, 878


def draw_first_screen(page: Path, path: Path) -> None:
    """Open ``report.html`` and write what is seen before one scrolls."""
    from evidence.pictures import with_palette

    program = find_browser()
    if program is None:
        raise SystemExit(f"none of {', '.join(NAMES)} is installed")
    with Browser(program) as browser:
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        browser.open(page, width=WIDTH, height=HEIGHT)
        with_palette(Image.open(io.BytesIO(browser.screenshot()))).save(path, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="report.html; what it shows first becomes docs/images/report.png")
    draw_first_screen(parser.parse_args().page, ROOT / "docs" / "images" / "report.png")
