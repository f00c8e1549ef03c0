"""Tables of the compress-ratio report: columns are functions of a schedule's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dsflash_jax.analysis.recall import Interval
from experiments.rows import Row, by_schedule, marked_label, measured, pooled, sequence_bytes, spread

Column = Callable[[Sequence[Row]], str]
NOTHING = "-"  # a run lacks the figure


def median_of(rows: Sequence[Row], name: str, factor: float = 1, digits: int = 0) -> str:
    """The median over seeds, or a dash."""
    found = spread(rows, name)
    return NOTHING if found is None else f"{factor * found.median:,.{digits}f}"


def median(name: str, factor: float = 1, digits: int = 0) -> Column:
    """A column of medians."""
    return lambda rows: median_of(rows, name, factor, digits)


def share(name: str, *, with_interval: bool = False) -> Column:
    """A column of shares in percent over the answers of all seeds, with or without the interval."""
    def text(rows: Sequence[Row]) -> str:
        found = pooled(rows, name)
        return interval(found) if with_interval or found is None else points(100 * found.value)

    return text


def points(value: float) -> str:
    """A number with one decimal."""
    return f"{value:.1f}"


def interval(found: Interval | None) -> str:
    """A share and its interval in percent, 98.5 (97.9 to 99.0), or a dash where nothing was asked."""
    if found is None:
        return NOTHING
    value, low, high = (points(100 * part) for part in found)
    return f"{value} ({low} to {high})"


def _switches(rows: Sequence[Row]) -> str:
    """The step of each seed from which training selected; a dash for models without anything to select."""
    if any(not measured(row) or row["encoder"] is None for row in rows):
        return NOTHING
    ordered = sorted(rows, key=lambda row: row["seed"])
    return ", ".join("never" if row["switch_step"] is None else str(row["switch_step"]) for row in ordered)


def _decode(rows: Sequence[Row]) -> str:
    """Median over seeds, and from the least 10th to the greatest 90th percentile."""
    middle, low, high = (spread(rows, f"decode_{name}ms") for name in ("", "p10_", "p90_"))
    return NOTHING if middle is None else f"{middle.median:.2f} ({low.low:.2f} to {high.high:.2f})"


RECALL: Mapping[str, Column] = {
    "near %": share("near"),
    "mid %": share("mid"),
    "relay %": share("relay"),
    "far %": share("far", with_interval=True),
    "all entries: far %": share("all_far", with_interval=True),
    "far, aligned %": share("aligned"),
    "far, split %": share("split"),
    "bits/byte": median("bits_per_byte", 1, 3),
}
COURSE: Mapping[str, Column] = {
    "top-k from step": _switches,
    "solved at step": median("solved_at_step"),
    "solved after s": median("solved_after_seconds"),
    "training s": median("train_seconds"),
    "tokens/s": median("tokens_per_second"),
    "parameters": median("parameters"),
}
INSIDE: Mapping[str, Column] = {
    "coverage mean %": median("coverage_mean", 100, 1),
    "coverage max %": median("coverage_max", 100, 1),
    "global off: near %": share("off_near"),
    "global off: far %": share("off_far"),
    "global off: bits/byte": median("off_bits", 1, 3),
    "unrounded: far %": share("unrounded_far"),
    "unrounded: bits/byte": median("unrounded_bits", 1, 3),
}


def cost_columns(rows: Sequence[Row]) -> dict[str, Column]:
    """Columns of bytes and time; the lengths of the two whole sequences are those that were measured."""
    lengths = next((sequence_bytes(row) for row in rows if measured(row)), [])
    contexts = next((row["decode_seconds"] for row in rows if measured(row)), [])
    sizes = {
        f"B of {tokens} tokens": median(name)
        for (tokens, _), name in zip(lengths, ("kv_short", "kv_long"), strict=False)
    }
    times = {
        f"decode ms after {timing['context']:,}": column
        for timing, column in zip(contexts, (_decode, median("decode_long_ms", 1, 2)), strict=False)
    }
    return {"KV B/token": median("kv_per_token", 1, 2), "fixed KV B": median("kv_fixed"), **sizes, **times}


def table(rows: Sequence[Row], columns: Mapping[str, Column], names: Mapping[str, str] | None = None) -> str:
    """A line per schedule; a dash where a run lacks the figure; columns without any figure are left out.

    names: other names of schedules. A dagger marks those of which a seed never trained under top-k.
    """
    grouped = by_schedule(rows)
    cells = {title: [column(runs) for runs in grouped.values()] for title, column in columns.items()}
    shown = {title: texts for title, texts in cells.items() if any(text != NOTHING for text in texts)}
    lines = []
    for number, (name, runs) in enumerate(grouped.items()):
        marked = marked_label(runs).replace(name, (names or {}).get(name, name), 1)
        lines.append([marked, *(texts[number] for texts in shown.values())])
    return markdown(["encoder,decoder", *shown], lines)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    return "\n".join([line(head), line(["---", *["---:"] * (len(head) - 1)]), *map(line, lines)])


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"
