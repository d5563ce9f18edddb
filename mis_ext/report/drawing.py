"""How a picture of a report is drawn: for print and for colour-blind readers, every line with dashes and marker."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mis_ext.report.summary import Group, Mismatch

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#595959"
K3, LOG_RATIO = BLUE, ORANGE
"""The same in all pictures; of a comparison A and B have these colours, and it shows k3 only."""
SIZE = 5.2, 3.4
FEWEST_STEPS = 2
"""Of a picture over steps."""


class Picture(NamedTuple):
    """A picture: the stem of its file, a title, what it says in words, and how to draw it."""

    name: str
    title: str
    text: str
    draw: Callable[[Any], None]


def drawn(picture: Picture, *, file_format: str) -> bytes:
    """A picture drawn, as the bytes of a file of this format."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "axes.axisbelow": True,
        "svg.hashsalt": picture.name,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(picture.title, loc="left", fontsize=10, fontweight="bold")
        picture.draw(axes)
        content = io.BytesIO()
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(content, format=file_format, dpi=150, metadata=metadata)
    return content.getvalue()


def logarithmic(axes: Any, rows: Iterable[Group | Mismatch]) -> None:
    """A logarithmic axis, but not for equal engines, which have nothing that it could show."""
    from matplotlib.ticker import LogFormatterSciNotation

    if any(row.k3 > 0.0 for row in rows):
        axes.set_yscale("log")
        # Within two decades the ticks between powers of ten need numbers too.
        axes.yaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(2.0, 0.6)))
