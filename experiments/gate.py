"""Whether the rows of a compress-ratio run may be read as a result: a pure function of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.rows import bucket_recall, label, main_rows

LEARNED, NOT_LEARNED, NOT_A_RESULT = "learned", "not learned", "not a result"
NEAR_AT_LEAST = 0.95
# A model that sees no far pair can still guess among the eight values of its row: 1 in 8, and some for rows in which a
# chain of renewals carried the value on.
FAR_BELOW = 0.20
GAIN_AT_LEAST = 0.20


class Check(NamedTuple):
    """One condition of the gate: whether it holds, and a sentence with the numbers."""

    passed: bool
    sentence: str


class Gate(NamedTuple):
    """The verdict (LEARNED, NOT_LEARNED or NOT_A_RESULT) and the checks behind it."""

    status: str
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, "checks": [check._asdict() for check in self.checks]}


def judge(rows: Sequence[Mapping[str, Any]], seeds: Iterable[int], *, is_check: bool = False) -> Gate:
    """Applies the gate to the rows of the main group.

    Window only must solve near recall and fail far recall in every seed, and one schedule must beat it far by 20 points
    in every seed; a missing or diverged run fails. is_check: the run was never meant as a result, whatever it shows.
    """
    by_schedule: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in main_rows(rows):
        by_schedule.setdefault(label(row), {})[row["seed"]] = row
    seeds = sorted(seeds)
    control = by_schedule.pop("window only", {})
    checks = (
        _every_seed(control, seeds, "near", lambda value: value >= NEAR_AT_LEAST, f"at least {NEAR_AT_LEAST:.0%}"),
        _every_seed(control, seeds, "far", lambda value: value < FAR_BELOW, f"below {FAR_BELOW:.0%}"),
        _beats(by_schedule, control, seeds),
    )
    if is_check:
        return Gate(NOT_A_RESULT, checks)
    return Gate(LEARNED if all(check.passed for check in checks) else NOT_LEARNED, checks)


def control_learned(rows: Iterable[Mapping[str, Any]]) -> Check:
    """Whether window only solves near recall among `rows` of one group: its own gate, where a group is beside the main
    one. A model that has not learned what lies in its window tells nothing about what lies beyond.
    """
    control = {row["seed"]: row for row in rows if label(row) == "window only"}
    rule = f"at least {NEAR_AT_LEAST:.0%}"
    return _every_seed(control, sorted(control), "near", lambda value: value >= NEAR_AT_LEAST, rule)


def _every_seed(control: Mapping[int, Any], seeds: Sequence[int], bucket: str, holds, rule: str) -> Check:
    values = [bucket_recall(control.get(seed), bucket) for seed in seeds]
    passed = bool(seeds) and all(value is not None and holds(value) for value in values)
    verb = {"near": "solves near recall", "far": "fails far recall"}[bucket]
    return Check(passed, f"Window only {verb}: {_list(values)}, must be {rule} in every seed.")


def _beats(by_schedule: Mapping[str, Mapping[int, Any]], control: Mapping[int, Any], seeds: Sequence[int]) -> Check:
    """The schedule whose worst gain over window only of the same seed is best."""
    worst: dict[str, float] = {}
    for name, runs in by_schedule.items():
        pairs = [(bucket_recall(runs.get(seed), "far"), bucket_recall(control.get(seed), "far")) for seed in seeds]
        if pairs and all(value is not None for pair in pairs for value in pair):
            worst[name] = min(far - without for far, without in pairs)
    rule = f"at least {100 * GAIN_AT_LEAST:.0f} points in every seed"
    if not worst:
        return Check(False, f"No schedule has far recall in every seed beside window only, must beat it by {rule}.")
    best = max(worst, key=worst.__getitem__)
    beaten = [name for name, gain in worst.items() if gain >= GAIN_AT_LEAST]
    sentence = (
        f"{len(beaten)} of {len(by_schedule)} schedules beat window only in far recall by {rule}; "
        f"the best, {best}, by {100 * worst[best]:.1f} points in its worst seed."
    )
    return Check(bool(beaten), sentence)


def _list(values: Sequence[float | None]) -> str:
    return ", ".join("missing" if value is None else f"{value:.1%}" for value in values) or "no seed"
