"""Metrics of a run: one record per step, appended to metrics.jsonl as training goes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One optimiser step. Losses in nats, before the update; step counts from 1 to steps.

    answer_average: moving average of the answer loss; dense: the selection was dense in this step;
    switch_step: the first step with top-k selection, None while dense. coverage: per layer with a global branch
    (1 by construction once top-k is on).
    step_seconds: this step, rows included; tokens_per_second and seconds_left: from the last steps of this session,
    compilation excluded.
    """

    step: int
    steps: int
    loss: float
    answer_loss: float
    text_loss: float
    indexer_kl: float
    answer_average: float
    dense: bool
    switch_step: int | None
    grad_norm: float
    learning_rate: float
    coverage: tuple[float, ...]
    step_seconds: float
    tokens_per_second: float
    seconds_left: float


@dataclasses.dataclass(frozen=True)
class DraftMetrics:
    """One optimiser step of the draft layers, before its update; step counts from 1 to steps.

    cross_entropy, distance (L1, 0 to 2) and confidence are the parts of the loss, unweighted but for the decay.
    acceptance: per position of a block, the mean chance that a drawn draft is accepted where those before it are true.
    Times as in StepMetrics.
    """

    step: int
    steps: int
    loss: float
    cross_entropy: float
    distance: float
    confidence: float
    acceptance: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    step_seconds: float
    tokens_per_second: float
    seconds_left: float


class MetricsFile:
    """Append-only JSON lines, flushed one by one, so that a killed run keeps what it measured."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file = path.open("a", encoding="utf-8")
        if torn:  # a run was killed within a line: the next record must not be glued to it
            self._file.write("\n")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Step records in order of step. Of a step done twice (a run resumed behind its last line) the later one counts;
    a torn line, which a killed run leaves, is skipped.
    """
    records: dict[int, dict[str, Any]] = {}
    for record in _lines(path):
        if "event" not in record:
            records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Records that are no steps: one `start` per session, with the step it began after and its compile time."""
    return [record for record in _lines(path) if "event" in record]


def _lines(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if isinstance(record, dict)]
