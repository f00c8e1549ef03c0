"""How every figure of a study looks and reaches the disk."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from experiments.artifacts import replacing

# Okabe and Ito: tell apart with any common colour blindness, and by brightness in print.
BLUE, ORANGE, SKY, GREY, BLACK = "#0072B2", "#D55E00", "#8CC4E8", "#8A8A8A", "#222222"
DPI = 130
COLOURS = 96  # of a saved figure: a palette makes the file a third as large
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#666666",
    "axes.grid": True, "grid.color": "#E8E8E8", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "xtick.color": "#444444", "ytick.color": "#444444", "figure.facecolor": "white",
}


def style():
    """A context in which figures are drawn."""
    return matplotlib.rc_context(STYLE)


def save_figure(path: Path, drawn: Figure, stamp: str | None = None) -> None:
    """Writes a figure whole or not at all, with `stamp` across it: a figure travels without its report."""
    if stamp:
        drawn.text(
            0.5, 0.5, stamp, ha="center", va="center", rotation=24, fontsize=46, color="#B00020", alpha=0.16, zorder=10,
        )
    with io.BytesIO() as whole, replacing(path) as temporary:
        drawn.savefig(whole, format="png", dpi=DPI)
        picture = Image.open(whole).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        picture.save(temporary, format="png", optimize=True)
