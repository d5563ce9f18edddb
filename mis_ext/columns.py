"""Text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap

WIDTH = 80


def hanging(label: str, text: str) -> str:
    """A label and a text in lines of at most ``WIDTH`` columns, all of which begin behind the label."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
