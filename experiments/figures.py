"""Figures of the compress-ratio study: recall by distance, and quality against bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsflash_jax.analysis.recall import Interval, wilson
from experiments.drawing import BLACK, BLUE, GREY, ORANGE, SKY, save_figure, style
from experiments.gate import LEARNED, Gate
from experiments.rows import (
    BASE,
    DAGGER,
    LARGE,
    MAIN,
    Row,
    by_schedule,
    compared,
    differences,
    figure,
    informed_guess,
    marked_label,
    measured,
    never_switched,
    pooled,
    sequence_bytes,
)

MIN_ASKED = 10  # answers in a bin of distance: a share of fewer would be drawn as if it were known
TOP = 116  # of a recall axis: room for the names of the distances
SEED_GAP = 1.3  # tokens, or bytes, by which the dots of seeds stand beside their pooled point


def write_figures(folder: Path, rows: Sequence[Row], gate: Gate, chance: float) -> dict[str, str]:
    """Writes the figures that the rows allow. Returns file name -> what it shows; diverged rows are left out."""
    found = [row for row in rows if measured(row)]
    main, large = ([row for row in found if row["group"] == group] for group in (MAIN, LARGE))
    written = {}
    for name, caption, group, draw in (
        ("recall_by_distance.png", "Recall by distance", main, draw_recall),
        ("quality_vs_bytes.png", "Quality against bytes", main, draw_quality),
        ("recall_by_distance_large.png", "Recall by distance, larger configuration", large, draw_recall),
    ):
        if group:
            _save(folder / name, draw, group, gate, chance)
            written[name] = caption
    return written


def _save(path: Path, draw: Callable[..., Figure], rows: Sequence[Row], gate: Gate, chance: float) -> None:
    with style():
        save_figure(path, draw(rows, chance), None if gate.status == LEARNED else gate.status)


def draw_recall(rows: Sequence[Row], chance: float) -> Figure:
    """One panel per schedule: recall against lag for aligned and split pairs, and with the global branch off."""
    grouped = by_schedule(rows)
    columns = next((n for n in (3, 2) if len(grouped) % n == 0), min(3, len(grouped)))
    lines = -(-len(grouped) // columns)
    drawn = Figure(figsize=(3.3 * columns + 0.5, 2.55 * lines + 1.05), layout="constrained")
    axes = drawn.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(grouped) :]:
        axis.set_visible(False)
    handles: dict[str, object] = {}
    for axis, runs in zip(axes.flat, grouped.values(), strict=False):
        handles |= _recall_panel(axis, runs, chance)
    notes = [note for runs in grouped.values() if (note := _mark_note(runs))]
    drawn.supxlabel("\n".join(["distance back to the pair's last occurrence (tokens)", *notes]), fontsize=9)
    drawn.supylabel("recall (% of answers)", fontsize=9)
    seeds = len(next(iter(grouped.values())))
    bars = "bars: 95 % interval" + (" of all seeds; dots: each seed" if seeds > 1 else ", one seed")
    drawn.legend(
        handles.values(), handles, loc="outside upper left", ncols=len(handles), fontsize=8, frameon=False,
        handlelength=2.2, columnspacing=1.4, title=bars, title_fontsize=8, alignment="left",
    )
    return drawn


def _recall_panel(axis: Axes, runs: Sequence[Row], chance: float) -> dict[str, object]:
    """One schedule; returns label -> what is drawn so."""
    encoder, decoder, per_token = runs[0]["encoder"], runs[0]["decoder"], figure(runs[0], "kv_per_token")
    mark = f" {DAGGER}" if never_switched(runs) else ""
    axis.set_title(
        "window only" if encoder is None else f"encoder {encoder}, decoder {decoder}: {per_token:g} B/token{mark}"
    )
    _name_distances(axis, runs[0])
    handles = {}
    for name, level, dashes in _floors(runs, chance):
        handles[name] = axis.axhline(100 * level, color=BLACK, linewidth=0.9, linestyle=(0, dashes))
    curves = [
        ("pair in one group of two", "aligned", BLUE, "-", "o", [row["recall_by_lag"] for row in runs]),
        ("pair split across two", "split", ORANGE, "--", "s", [row["recall_by_lag"] for row in runs]),
    ]
    if all(row.get("global_off") for row in runs):
        off = [row["global_off"]["recall_by_lag"] for row in runs]
        curves.append(("global branch off, all pairs", "all", GREY, "-.", "", off))
    for (text, side, colour, dash, marker, found), beside in zip(curves, (-1, 1, 0), strict=False):
        lags, shares, each = _curve([curve[side] for curve in found])
        if not lags:
            continue
        gap = beside * SEED_GAP * lags[-1] / 120  # equal curves stay visible side by side; the same at any context
        handles[text] = axis.errorbar(
            [lag + gap / 2 for lag in lags], [100 * share.value for share in shares],
            yerr=_bars(shares, 100) if marker else None, color=colour, linestyle=dash, linewidth=1.5,
            marker=marker or None, markersize=3, elinewidth=1.1, label=text,
        )
        if len(found) > 1 and marker:
            for values in each:
                axis.plot(
                    [lag + 2 * gap for lag in lags], values, ".", color=colour, markersize=4, alpha=0.6,
                    markeredgewidth=0,
                )
    axis.set_ylim(-3, TOP)
    axis.set_xlim(0, runs[0]["recall_by_lag"]["all"]["lag_to"][-1])
    axis.set_yticks(range(0, 101, 25))
    return handles


def _mark_note(runs: Sequence[Row]) -> str:
    """What the dagger of a schedule means, with its far recall when all entries are attended; empty without one."""
    seeds = never_switched(runs)
    if not seeds:
        return ""
    apart = [row for row in runs if row["seed"] in seeds]
    under, every = pooled(apart, "far"), pooled(apart, "all_far")
    told = "" if every is None else f": far {under.value:.0%}, and {every.value:.0%} with all entries attended"
    return f"{marked_label(runs)} seed {', '.join(map(str, seeds))}: never trained under top-k{told}"


def _floors(rows: Sequence[Row], chance: float) -> list[tuple[str, float, tuple[int, int]]]:
    """(label, level, dashes) of what guessing reaches."""
    floors = [(f"guess among all values, {chance:.1%}", chance, (1, 2))]
    informed = informed_guess(rows, "far")
    if informed is not None:
        floors.append((f"guess among the row's values, {informed:.1%}", informed, (4, 3)))
    return floors


def _name_distances(axis: Axes, row: Row) -> None:
    """Vertical lines where near, mid and relay end, from the largest lag of each class, and the four names."""
    edges = row["lag_classes"]
    last = row["recall_by_lag"]["all"]["lag_to"][-1] - 1
    start = 0
    for name, end in [*edges.items(), ("far", last)]:
        if end <= start:
            continue  # no lag is of this class
        if end < last:
            axis.axvline(end + 0.5, color="#BBBBBB", linewidth=0.9)
        axis.text((start + end) / 2 + 0.5, TOP - 1, name, ha="center", va="top", fontsize=7.5, color="#555555")
        start = end


def _curve(curves: Sequence[Mapping[str, list[int]]]) -> tuple[list[float], list[Interval], list[list[float]]]:
    """(lag, share over all seeds, percent of each seed), at the middle of every bin with enough answers."""
    lags, shares, each = [], [], [[] for _ in curves]
    for number, (low, high) in enumerate(zip(curves[0]["lag_from"], curves[0]["lag_to"], strict=True)):
        asked, correct = ([curve[name][number] for curve in curves] for name in ("asked", "correct"))
        if min(asked) >= MIN_ASKED:
            lags.append((low + high - 1) / 2)
            shares.append(wilson(sum(correct), sum(asked)))
            for values, right, count in zip(each, correct, asked, strict=True):
                values.append(100 * right / count)
    return lags, shares, each


def _bars(shares: Sequence[Interval], scale: float) -> list[list[float]]:
    """Lengths below and above the values, as matplotlib wants them."""
    below = [scale * (share.value - share.low) for share in shares]
    return [below, [scale * (share.high - share.value) for share in shares]]


def draw_quality(rows: Sequence[Row], chance: float) -> Figure:
    """Far recall and bits per byte against measured KV bytes per token, and the bytes of whole sequences."""
    drawn = Figure(figsize=(12.4, 4.1), layout="constrained")
    axes = drawn.subplots(1, 3)
    grouped = by_schedule(rows)
    _far_panel(axes[0], grouped, rows, chance)
    _bits_panel(axes[1], grouped)
    _bytes_panel(axes[2], grouped)
    for axis in axes[:2]:
        axis.set_xlabel("global KV bytes per token, measured")
        axis.margins(x=0.12)
    return drawn


def _far_panel(axis: Axes, grouped: Mapping[str, Sequence[Row]], rows: Sequence[Row], chance: float) -> None:
    axis.set_title("Far recall: higher is better")
    axis.set_ylabel("recall of far pairs (% of answers)")
    for name, level, dashes in _floors(rows, chance):
        axis.axhline(100 * level, color=BLACK, linewidth=0.9, linestyle=(0, dashes))
        axis.annotate(
            name, (1, 100 * level), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
            ha="right", va="bottom", fontsize=7.5,
        )
    for runs in grouped.values():
        found = pooled(runs, "far")
        if found is None:
            continue
        seeds = [100 * figure(row, "far") for row in runs]
        _point(axis, runs, Interval(*(100 * part for part in found)), seeds)
        every = pooled(runs, "all_far") if never_switched(runs) else None
        if every is not None:
            axis.plot(
                [figure(runs[0], "kv_per_token")], [100 * every.value], "x", color=BLACK, markersize=6, zorder=4,
                label=f"{DAGGER} with all entries attended",
            )
    axis.set_ylim(-4, TOP)
    axis.set_yticks(range(0, 101, 25))
    seeds = len(next(iter(grouped.values())))
    bars = "bars: 95 % interval" + (", all seeds\ndots: each seed" if seeds > 1 else "\none seed")
    axis.text(0.55, 0.47, bars, transform=axis.transAxes, va="bottom", fontsize=7.5)
    marks = {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}  # each once
    if marks:
        axis.legend(
            marks.values(), marks.keys(),
            loc="upper left", bbox_to_anchor=(0.525, 0.475), fontsize=7.5, frameon=False, handlelength=1,
            handletextpad=0.4,
        )


def _bits_panel(axis: Axes, grouped: Mapping[str, Sequence[Row]]) -> None:
    """Differences, since they are a few percent of the figure itself: on an axis from zero none could be seen."""
    axis.set_title(f"Text, against {BASE}: lower is better")
    axis.axhline(0, color=BLACK, linewidth=0.9)
    base = grouped.get(BASE)
    if base is None:
        return
    level = sum(figure(row, "bits_per_byte") for row in base) / len(base)
    axis.set_ylabel(f"held-out bits per byte, minus the {level:.3f} of {BASE}")
    for runs in grouped.values():
        each = differences(runs, base, "bits_per_byte")
        if not each:
            continue
        mean = sum(each) / len(each)
        found = compared(runs, base, "bits_per_byte") or Interval(mean, mean, mean)
        _point(axis, runs, found, each)
    axis.margins(y=0.2)


def _point(axis: Axes, runs: Sequence[Row], found: Interval, seeds: Sequence[float]) -> None:
    """One schedule: its value with the interval, a dot per seed beside it, and its name above all of them."""
    control = runs[0]["encoder"] is None
    colour, x = ORANGE if control else BLUE, figure(runs[0], "kv_per_token")
    axis.errorbar(
        [x], [found.value], yerr=_bars([found], 1), color=colour, marker="s" if control else "o", markersize=6,
        markerfacecolor="white" if control else colour, markeredgewidth=1.5, elinewidth=1.6, capsize=3,
        linestyle="none",
    )
    if len(seeds) > 1:
        axis.plot([x + SEED_GAP] * len(seeds), seeds, ".", color=colour, markersize=5, alpha=0.6, markeredgewidth=0)
    axis.annotate(
        _narrow(marked_label(runs)), (x, max(found.high, *seeds)), xytext=(0, 6), textcoords="offset points",
        ha="center", fontsize=8.5, color=colour, linespacing=0.95,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
    )


def _narrow(name: str) -> str:
    """A name of at most seven characters a line: schedules may stand nine bytes apart."""
    return name.replace(" only", "\nonly")


def _bytes_panel(axis: Axes, grouped: Mapping[str, Sequence[Row]]) -> None:
    """Bytes of one sequence at the two lengths measured, the fixed part apart."""
    names = [marked_label(runs) for runs in grouped.values()]
    lengths = [tokens for tokens, _ in sequence_bytes(next(iter(grouped.values()))[0])]
    axis.set_title("Bytes of one whole sequence")
    axis.set_ylabel("KV cache, KiB, measured")
    for number, (tokens, colour) in enumerate(zip(lengths, (SKY, BLUE), strict=True)):
        places = [place + (number - 0.5) * 0.4 for place in range(len(names))]
        fixed = [figure(runs[0], "kv_fixed") / 1024 for runs in grouped.values()]
        whole = [sequence_bytes(runs[0])[number][1] / 1024 for runs in grouped.values()]
        axis.bar(places, fixed, 0.38, color=GREY, label="" if number else "fixed part (windows, state)")
        growing = [all_of - part for all_of, part in zip(whole, fixed, strict=True)]
        axis.bar(places, growing, 0.38, bottom=fixed, color=colour, label=f"global entries, {tokens} tokens")
        for place, height in zip(places, whole, strict=True):
            axis.text(place, height, f"{height:.1f}", ha="center", va="bottom", fontsize=7, color="#444444")
    axis.set_xticks(range(len(names)), [_narrow(name) for name in names], fontsize=8)
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.22)
    axis.legend(loc="upper right", fontsize=7.5, frameon=False)
