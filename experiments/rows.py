"""Reading the rows of the compress-ratio study: names of schedules, single figures, and the spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
MAIN, EQUAL_SHARE, LARGE = "main", "equal share", "large"


class Spread(NamedTuple):
    """Median, least and greatest over the seeds of one schedule; `values` in order of seed."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]


def label(row: Row) -> str:
    """The schedule as text: "window only" or "(encoder,decoder)"."""
    return "window only" if row["encoder"] is None else f"({row['encoder']},{row['decoder']})"


def main_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that differ in nothing but their compress ratios (and seed), at the smaller size."""
    return [row for row in rows if row["group"] == MAIN]


def bucket_recall(row: Row | None, bucket: str) -> float | None:
    """Recall of a distance bucket; None where the row is missing, diverged, or nothing was asked."""
    return None if row is None or "recall" not in row else row["recall"]["by_bucket"][bucket]["value"]


def pair_recall(row: Row, side: str) -> float | None:
    """Far recall of "aligned" or "split" pairs."""
    return row["recall"]["by_both"]["far"][side]["value"] if "recall" in row else None


def figure(row: Row, name: str) -> float | None:
    """One figure of a row by the name that the tables use; None where it was not measured."""
    if "recall" not in row:
        return None
    if name in ("near", "mid", "relay", "far"):
        return bucket_recall(row, name)
    if name in ("aligned", "split"):
        return pair_recall(row, name)
    off, unrounded, coverage = row.get("global_off"), row.get("unrounded"), row.get("coverage") or {}
    paths = {
        "bits_per_byte": lambda: row["bits_per_byte"],
        "kv_per_token": lambda: row["kv_bytes"]["per_token"],
        "kv_fixed": lambda: row["kv_bytes"]["fixed"],
        "decode_ms": lambda: 1e3 * row["decode_seconds"][0]["median"],
        "decode_long_ms": lambda: 1e3 * row["decode_seconds"][1]["median"] if len(row["decode_seconds"]) > 1 else None,
        "coverage_mean": lambda: coverage.get("mean"),
        "coverage_max": lambda: coverage.get("max"),
        "all_far": lambda: bucket_recall(row.get("all_entries"), "far"),
        "off_near": lambda: bucket_recall(off, "near"),
        "off_far": lambda: bucket_recall(off, "far"),
        "off_bits": lambda: off["bits_per_byte"] if off else None,
        "unrounded_far": lambda: bucket_recall(unrounded, "far"),
        "unrounded_bits": lambda: unrounded["bits_per_byte"] if unrounded else None,
        "switch_step": lambda: row["switch_step"],
        "solved_at_step": lambda: row["solved_at_step"],
        "solved_after_seconds": lambda: row["solved_after_seconds"],
        "train_seconds": lambda: row["train_seconds"],
        "tokens_per_second": lambda: row["tokens_per_second"],
        "parameters": lambda: row["parameters"],
    }
    return paths[name]()


def by_schedule(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows grouped by schedule, in order of first appearance."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(label(row), []).append(row)
    return grouped


def spread(rows: Sequence[Row], name: str) -> Spread | None:
    """The spread of a figure over the seeds of one schedule; None unless every row has it."""
    values = [figure(row, name) for row in sorted(rows, key=lambda row: row["seed"])]
    if not values or any(value is None for value in values):
        return None
    return Spread(statistics.median(values), min(values), max(values), tuple(values))
