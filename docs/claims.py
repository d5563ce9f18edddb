"""Lists every claim of the pages at a revision that today's pages no longer make in the same words.

    python docs/claims.py REVISION

A claim is a sentence or a cell of a table with a number in it, or with "not tried" or "not measured". Links, emphasis
and line breaks do not count. Whoever moves or shortens pages reads what is printed: each claim is said in other words
somewhere, or it went on purpose.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLAIM = re.compile(r"\d|not (?:yet )?(?:tried|measured|run)", re.IGNORECASE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE = re.compile(r"(?<=[.:;!?])\s+(?=[^a-z])|\s*\|\s*")


def claims(text: str) -> set[str]:
    """Sentences and cells that say a number or what is missing."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|</?[a-z][^>]*>", " ", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?=[-|#])", LINK.sub(r"\1", text))
    found = (_plain(each) for paragraph in paragraphs for each in SENTENCE.split(" ".join(paragraph.split())))
    return {each for each in found if CLAIM.search(each)}


def _plain(text: str) -> str:
    return re.sub(r"[*`$_\\{}]", "", text).strip(" .:;-#").lower()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print them, by page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REVISION", help="whose claims are looked for in today's pages")
    revision = parser.parse_args().revision
    folders = ("README.md", "docs", "lab")
    today = " ".join(
        _plain(" ".join(LINK.sub(r"\1", path.read_text(encoding="utf-8")).split()))
        for folder in folders
        for path in ([ROOT / folder] if folder.endswith(".md") else (ROOT / folder).rglob("*.md"))
    )
    for path in _git("ls-tree", "-r", "--name-only", revision, *folders[:2]).split():
        if path.endswith(".md"):
            gone = sorted(each for each in claims(_git("show", f"{revision}:{path}")) if each not in today)
            for each in gone:
                print(f"{path}: {each}")


if __name__ == "__main__":
    sys.exit(main())
