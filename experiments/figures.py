"""Figures of the compress-ratio study: recall by distance, and quality against bytes per token."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

from experiments.artifacts import replacing
from experiments.gate import LEARNED, Gate
from experiments.rows import LARGE, MAIN, Row, by_schedule, figure, spread

# Okabe and Ito: tell apart with any common colour blindness, and by brightness in print.
BLUE, ORANGE, GREY, BLACK = "#0072B2", "#D55E00", "#8A8A8A", "#222222"
DPI = 130
MIN_ASKED = 10  # answers in a bin of distance: a share of fewer would be drawn as if it were known
COLOURS = 96  # of a saved figure: a palette makes the file a third as large
TOP = 116  # of the recall axis: room for the names of the distances
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#666666",
    "axes.grid": True, "grid.color": "#E8E8E8", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "xtick.color": "#444444", "ytick.color": "#444444", "figure.facecolor": "white",
}


def write_figures(folder: Path, rows: Sequence[Row], gate: Gate, chance: float) -> dict[str, str]:
    """Writes the figures that the rows allow. Returns file name -> what it shows; diverged rows are left out."""
    measured = [row for row in rows if "recall" in row]
    main, large = ([row for row in measured if row["group"] == group] for group in (MAIN, LARGE))
    written = {}
    for name, caption, group, draw in (
        ("recall_by_distance.png", "Recall by distance", main, draw_recall),
        ("quality_vs_bytes.png", "Quality against bytes per token", main, draw_quality),
        ("recall_by_distance_large.png", "Recall by distance, larger configuration", large, draw_recall),
    ):
        if group:
            _save(folder / name, draw, group, gate, chance)
            written[name] = caption
    return written


def _save(path: Path, draw: Callable[..., Figure], rows: Sequence[Row], gate: Gate, chance: float) -> None:
    with matplotlib.rc_context(STYLE):
        drawn = draw(rows, chance)
        if gate.status != LEARNED:
            drawn.text(
                0.5, 0.5, gate.status, ha="center", va="center", rotation=24, fontsize=46, color="#B00020", alpha=0.16,
                zorder=10,
            )
        with io.BytesIO() as whole, replacing(path) as temporary:
            drawn.savefig(whole, format="png", dpi=DPI)
            picture = Image.open(whole).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            picture.save(temporary, format="png", optimize=True)


def draw_recall(rows: Sequence[Row], chance: float) -> Figure:
    """One panel per schedule: recall against lag for aligned and split pairs, and with the global branch off."""
    grouped = by_schedule(rows)
    columns = next((n for n in (3, 2) if len(grouped) % n == 0), min(3, len(grouped)))
    lines = -(-len(grouped) // columns)
    drawn = Figure(figsize=(3.25 * columns + 0.6, 2.45 * lines + 0.75), layout="constrained")
    axes = drawn.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(grouped) :]:
        axis.set_visible(False)
    labelled: set[str] = set()
    for number, (axis, (name, runs)) in enumerate(zip(axes.flat, grouped.items(), strict=False)):
        _recall_panel(axis, name, runs, chance, labelled, first=number == 0)
    drawn.supxlabel("distance back to the pair's last occurrence (tokens)", fontsize=9)
    drawn.supylabel("recall (% of answers)", fontsize=9)
    return drawn


def _recall_panel(
    axis: Axes, name: str, runs: Sequence[Row], chance: float, labelled: set[str], *, first: bool,
) -> None:
    """One schedule. A curve is labelled where it appears first: `labelled` holds what has its label."""
    encoder, decoder, per_token = runs[0]["encoder"], runs[0]["decoder"], figure(runs[0], "kv_per_token")
    axis.set_title(name if encoder is None else f"encoder {encoder}, decoder {decoder}: {per_token:g} B/token")
    axis.axhline(100 * chance, color=BLACK, linewidth=0.9, linestyle=(0, (1, 2)))
    _mark_distances(axis, runs[0], with_names=first)
    curves = [
        ("pair in one group of two", "aligned", BLUE, "-", [row["recall_by_lag"] for row in runs]),
        ("pair split across two", "split", ORANGE, "--", [row["recall_by_lag"] for row in runs]),
    ]
    if all(row.get("global_off") for row in runs):
        off = [row["global_off"]["recall_by_lag"] for row in runs]
        curves.append(("global branch off", "all", GREY, "-.", off))
    for text, side, colour, dash, found in curves:
        lags, middle, low, high = _band([curve[side] for curve in found])
        axis.plot(lags, middle, color=colour, linestyle=dash, linewidth=1.8, label=text, solid_capstyle="round")
        if len(found) > 1:
            axis.fill_between(lags, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.set_ylim(-3, TOP)
    axis.set_xlim(left=0)
    axis.set_yticks(range(0, 101, 25))
    named = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    fresh = [line for line in named if line.get_label() not in labelled]
    if first:
        axis.annotate(
            f"chance {chance:.1%}", (0, 100 * chance), xycoords=("axes fraction", "data"), xytext=(4, 3),
            textcoords="offset points", fontsize=7.5, color=BLACK,
        )
    if fresh:
        axis.legend(
            handles=fresh, loc="best", fontsize=7.5, frameon=True, framealpha=0.9, edgecolor="none",
            handlelength=2.4, labelcolor="linecolor",
        )
        labelled.update(line.get_label() for line in fresh)


def _mark_distances(axis: Axes, row: Row, *, with_names: bool) -> None:
    """Vertical lines where near, mid and relay end, from the largest lag of each class."""
    edges = row["lag_classes"]
    start = 0
    ends = [*edges.values(), None]
    for name, end in zip([*edges, "far"], ends, strict=True):
        if end is not None:
            axis.axvline(end + 0.5, color="#BBBBBB", linewidth=0.9)
        if with_names and name != "relay":
            axis.annotate(
                name, (start + 1.5, TOP), xytext=(0, -1), textcoords="offset points", va="top", fontsize=7.5,
                color="#555555",
            )
        start = end if end is not None else start


def _band(curves: Sequence[Mapping[str, list[int]]]) -> tuple[list, list, list, list]:
    """(lag, median, least, greatest) in percent over the seeds, at the middle of every bin with enough answers."""
    points = []
    for number, (low, high) in enumerate(zip(curves[0]["lag_from"], curves[0]["lag_to"], strict=True)):
        asked = [curve["asked"][number] for curve in curves]
        if min(asked) >= MIN_ASKED:
            shares = [100 * curve["correct"][number] / count for curve, count in zip(curves, asked, strict=True)]
            points.append(((low + high - 1) / 2, statistics.median(shares), min(shares), max(shares)))
    return tuple(map(list, zip(*points, strict=True))) if points else ([], [], [], [])


def draw_quality(rows: Sequence[Row], chance: float) -> Figure:
    """Far recall and bits per byte against measured KV bytes per token; bars span the seeds."""
    drawn = Figure(figsize=(10.4, 3.8), layout="constrained")
    axes = drawn.subplots(1, 2)
    grouped = by_schedule(rows)
    _quality_panel(axes[0], grouped, "far", 100)
    axes[0].set_title("Far recall: higher is better")
    axes[0].set_ylabel("recall of far pairs (% of answers)")
    axes[0].set_ylim(-10, 112)
    axes[0].set_yticks(range(0, 101, 25))
    axes[0].axhline(100 * chance, color=BLACK, linewidth=0.9, linestyle=(0, (1, 2)))
    axes[0].annotate(
        f"chance {chance:.1%}", (1, 100 * chance), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", ha="right", va="top", fontsize=7.5,
    )
    _quality_panel(axes[1], grouped, "bits_per_byte", 1)
    axes[1].set_title("Text: lower is better")
    axes[1].set_ylabel("held-out bits per byte")
    axes[1].margins(y=0.25)
    for axis in axes:
        axis.set_xlabel("global KV bytes per token, measured; labels: (encoder ratio, decoder ratio)")
        axis.margins(x=0.12)
    return drawn


def _quality_panel(axis: Axes, grouped: Mapping[str, Sequence[Row]], name: str, scale: float) -> None:
    for schedule, runs in grouped.items():
        found, x = spread(runs, name), figure(runs[0], "kv_per_token")
        if found is None:
            continue
        control = schedule == "window only"
        colour = ORANGE if control else BLUE
        axis.plot([x, x], [scale * found.low, scale * found.high], color=colour, linewidth=2.2, alpha=0.45)
        axis.plot(
            [x], [scale * found.median], marker="s" if control else "o", markersize=7, color=colour,
            markerfacecolor="white" if control else colour, markeredgewidth=1.6, linestyle="none",
        )
        axis.annotate(
            schedule, (x, scale * found.high), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8.5,
            color=colour,
        )
