# SPDX-License-Identifier: Apache-2.0
"""Plots as small files."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

NUM_COLORS = 256


def save(figure: Figure, path: Path, *, dpi: int = 110) -> None:
    """Write and close a figure, with a palette: a third of the size, and no difference to the eye."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    plt.close(figure)
    with_palette(Image.open(content)).save(path, optimize=True)


def with_palette(picture: Image.Image) -> Image.Image:
    """Reduce the colors; dithering would be noise in plain areas, which also compresses badly."""
    return picture.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
