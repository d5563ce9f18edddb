# SPDX-License-Identifier: Apache-2.0
"""Says of every claim of the pages at a revision where it is today.

    python docs/claims.py REVISION          # the claims that no page makes, with all of their numbers in one place
    python docs/claims.py REVISION --all    # every claim, and the page that makes it

A claim is a sentence or a cell of a table with a number in it, or with "not tested" or "not measured". Links, emphasis
and line breaks do not count. A claim is made in other words where a paragraph or a row of today has all of its numbers
and half of its long words. Whoever moves or shortens pages reads what is left: nothing goes in silence.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("README.md", "docs", "lab")
CLAIM = re.compile(r"\d|not (?:yet )?(?:tried|tested|measured|run)", re.IGNORECASE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE = re.compile(r"(?<=[.:;!?])\s+(?=[^a-z])|\s*\|\s*")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
WORD = re.compile(r"[a-z_]{4,}")
SHARE = 0.5
"""Of the long words of a claim that a paragraph must have to make it in other words."""


class Paragraph(NamedTuple):
    """Of a page of today, or one row of a table."""

    page: str
    text: str
    numbers: frozenset[str]
    words: frozenset[str]

    @classmethod
    def of(cls, page: str, text: str) -> Paragraph:
        """What is compared with a claim."""
        text = _plain(" ".join(text.split()))
        return cls(page, text, frozenset(NUMBER.findall(text)), frozenset(WORD.findall(text)))


def paragraphs(text: str) -> list[str]:
    """Of a page, without blocks of code and comments; a row of a table, an item and a heading are one each."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|</?[a-z][^>]*>", " ", text, flags=re.DOTALL | re.MULTILINE)
    return re.split(r"\n\s*\n|\n(?=[-|#])", LINK.sub(r"\1", text))


def claims(text: str) -> set[str]:
    """Sentences and cells that say a number or what is missing."""
    found = (_plain(each) for part in paragraphs(text) for each in SENTENCE.split(" ".join(part.split())))
    return {each for each in found if CLAIM.search(each)}


def place(claim: str, today: list[Paragraph]) -> str | None:
    """The page that makes the claim in its words, or else in others; None if there is none."""
    for each in today:
        if claim in each.text:
            return each.page
    numbers, words = {*NUMBER.findall(claim)}, {*WORD.findall(claim)}
    alike = [each for each in today if numbers <= each.numbers and len(words & each.words) >= SHARE * len(words)]
    best = max(alike, key=lambda each: len(words & each.words), default=None)
    return f"{best.page}, in other words" if best else None


def _plain(text: str) -> str:
    return re.sub(r"[*`$_\\{}]", "", text).strip(" .:;-#").lower()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print them, by page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REVISION", help="whose claims are looked for in today's pages")
    parser.add_argument("--all", action="store_true", help="also those that a page makes")
    arguments = parser.parse_args()
    pages = [ROOT / "README.md", *sorted(page for folder in FOLDERS[1:] for page in (ROOT / folder).rglob("*.md"))]
    today = [
        Paragraph.of(page.relative_to(ROOT).as_posix(), part)
        for page in pages
        for part in paragraphs(page.read_text(encoding="utf-8"))
    ]
    for path in _git("ls-tree", "-r", "--name-only", arguments.revision, *FOLDERS[:2]).split():
        if path.endswith(".md"):
            for claim in sorted(claims(_git("show", f"{arguments.revision}:{path}"))):
                found = place(claim, today)
                if arguments.all or found is None:
                    print(f"{path}: {claim}" + (f" -> {found}" if found else ""))


if __name__ == "__main__":
    sys.exit(main())
