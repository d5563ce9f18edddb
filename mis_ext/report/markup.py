"""Pieces of a page of HTML: tables, figures, and numbers in them."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence

from mis_ext.files import printable
from mis_ext.report.drawing import Picture, drawn

_LONG = 20
"""Characters from which on a cell of a table is wrapped."""


def escape(text: str) -> str:
    """What a browser shows as it is; names and tokens may hold bytes that a terminal would obey."""
    return html.escape(printable(text))


def figure(picture: Picture) -> str:
    """A picture with its text, inside the page."""
    content = base64.b64encode(drawn(picture, file_format="svg")).decode()
    text = escape(picture.text)
    return (
        f'<figure><img alt="{escape(picture.title)}. {text}" src="data:image/svg+xml;base64,{content}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def table(title: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in a box that scrolls by itself, also with the keyboard."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(content: object) -> str:
    text = breakable(str(content))
    return f'<td class="long">{text}</td>' if len(str(content)) > _LONG else f"<td>{text}</td>"


def breakable(name: str) -> str:
    """With places where a long name may go on in the next line."""
    return escape(name).replace("_", "_<wbr>").replace("/", "/<wbr>")


def number(value: float) -> str:
    """Three digits; a dash for what was not measured."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def percent(value: float) -> str:
    """A share in percent, with one digit; a dash for what was not measured."""
    return "-" if math.isnan(value) else f"{value:.1%}"
