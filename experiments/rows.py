"""Reading the rows of the compress-ratio study: names, single figures, their spread and their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsflash_jax.analysis.recall import Interval, paired_difference, wilson

Row = Mapping[str, Any]
MAIN, EQUAL_SHARE, LARGE = "main", "equal share", "large"
BASE = "(1,1)"  # the schedule that pools nothing: what the others are compared with
DAGGER = "\N{DAGGER}"  # marks a schedule of which a seed never trained under top-k
_SHARES = {  # name of a share -> the way to its {value, correct, asked}
    **{name: ("recall", "by_bucket", name) for name in ("near", "mid", "relay", "far")},
    **{side: ("recall", "by_both", "far", side) for side in ("aligned", "split")},
    "all_far": ("all_entries", "recall", "by_bucket", "far"),
    "off_near": ("global_off", "recall", "by_bucket", "near"),
    "off_far": ("global_off", "recall", "by_bucket", "far"),
    "unrounded_far": ("unrounded", "recall", "by_bucket", "far"),
}


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


def share(row: Row, name: str) -> Mapping[str, Any] | None:
    """One share of a row, {value, correct, asked}, by the name that the tables use; None where it was not measured."""
    found: Any = row
    for key in _SHARES[name]:
        found = (found or {}).get(key)
    return found


def figure(row: Row, name: str) -> float | None:
    """One figure of a row by the name that the tables use; None where it was not measured."""
    if "recall" not in row:
        return None
    if name in _SHARES:
        found = share(row, name)
        return found and found["value"]
    off, unrounded, coverage = row.get("global_off"), row.get("unrounded"), row.get("coverage") or {}
    decode = row["decode_seconds"]
    paths = {
        "bits_per_byte": lambda: row["bits_per_byte"],
        "kv_per_token": lambda: row["kv_bytes"]["per_token"],
        "kv_fixed": lambda: row["kv_bytes"]["fixed"],
        "kv_short": lambda: sequence_bytes(row)[0][1],
        "kv_long": lambda: sequence_bytes(row)[1][1],
        "decode_ms": lambda: 1e3 * decode[0]["median"],
        "decode_p10_ms": lambda: 1e3 * decode[0]["p10"],
        "decode_p90_ms": lambda: 1e3 * decode[0]["p90"],
        "decode_long_ms": lambda: 1e3 * decode[1]["median"] if len(decode) > 1 else None,
        "coverage_mean": lambda: coverage.get("mean"),
        "coverage_max": lambda: coverage.get("max"),
        "off_bits": lambda: off["bits_per_byte"] if off else None,
        "unrounded_bits": lambda: unrounded["bits_per_byte"] if unrounded else None,
        "switch_step": lambda: row["switch_step"],
        "solved_at_step": lambda: row["solved_at_step"],
        "solved_after_seconds": lambda: row["solved_after_seconds"],
        "train_seconds": lambda: row["train_seconds"],
        "tokens_per_second": lambda: row["tokens_per_second"],
        "parameters": lambda: row["parameters"],
    }
    return paths[name]()


def sequence_bytes(row: Row) -> list[tuple[int, float]]:
    """(tokens, bytes of one sequence of that length, fixed part included) for the two lengths measured, ascending."""
    return sorted((int(tokens), size) for tokens, size in row["kv_bytes"]["sequence"].items())


def measured(row: Row) -> bool:
    """Whether the row has measures: a diverged one has none."""
    return "recall" in row


def never_switched(rows: Iterable[Row]) -> list[int]:
    """Seeds of models with a global branch that trained densely to the end: they meet top-k in evaluation only."""
    return [row["seed"] for row in rows if measured(row) and row["encoder"] is not None and row["switch_step"] is None]


def marked_label(rows: Sequence[Row]) -> str:
    """The schedule of some rows as text, with a dagger where a seed never trained under top-k."""
    return label(rows[0]) + (f" {DAGGER}" if never_switched(rows) else "")


def pooled(rows: Sequence[Row], name: str) -> Interval | None:
    """A share over the answers of all seeds with its 95 % interval (Wilson); None unless every row has it."""
    shares = [share(row, name) for row in rows]
    if not shares or any(found is None for found in shares):
        return None
    return wilson(sum(found["correct"] for found in shares), sum(found["asked"] for found in shares))


def compared(rows: Sequence[Row], base: Sequence[Row], name: str) -> Interval | None:
    """A schedule minus another over the same questions and seeds, with its 95 % interval, clustered by row.

    name: "far" (a share) or "bits_per_byte". The seeds of both are added up row of evaluation by row. The interval is
    over questions, with the models as they are: how far trainings differ is for the spread to say. None unless both
    have the same seeds and every row kept its parts.
    """
    key = {"far": "far_by_row", "bits_per_byte": "bits_by_row"}[name]
    ours, theirs = (_of_seeds(found) for found in (rows, base))
    if not ours or list(ours) != list(theirs) or any(key not in row for row in (*ours.values(), *theirs.values())):
        return None
    if name == "bits_per_byte":
        parts = [np.mean([row[key] for row in found.values()], axis=0) for found in (ours, theirs)]
        return paired_difference(*parts, np.ones(len(parts[0])))
    counts = [row[key]["asked"] for row in (*ours.values(), *theirs.values())]
    if any(count != counts[0] for count in counts):
        return None  # not the same questions
    parts = [np.sum([row[key]["correct"] for row in found.values()], axis=0) for found in (ours, theirs)]
    return paired_difference(*parts, len(ours) * np.asarray(counts[0]))


def differences(rows: Sequence[Row], base: Sequence[Row], name: str) -> list[float]:
    """A schedule minus another, seed by seed; only the seeds that both have."""
    ours, theirs = (_of_seeds(found) for found in (rows, base))
    pairs = [(figure(ours[seed], name), figure(theirs[seed], name)) for seed in ours if seed in theirs]
    return [one - other for one, other in pairs if one is not None and other is not None]


def _of_seeds(rows: Iterable[Row]) -> dict[int, Row]:
    return {row["seed"]: row for row in sorted(rows, key=lambda row: row["seed"])}


def informed_guess(rows: Iterable[Row], bucket: str) -> float | None:
    """Recall of a guess among the values that a row has shown; equal for all models, who get the same questions."""
    return next((row["informed_guess"][bucket] for row in rows if row.get("informed_guess")), None)


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
