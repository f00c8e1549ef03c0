"""Drives optimiser steps: compiles, times, writes metrics, leaves checkpoints. What is trained is the caller's job."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from dsflash_jax.training import checkpoints
from dsflash_jax.training.devices import replicated, split_rows
from dsflash_jax.training.metrics import MetricsFile

_RATE_STEPS = 20  # steps that tokens/s and time left look back on


class Job(NamedTuple):
    """What is driven.

    state: what a step changes and a checkpoint holds, with a scalar `step`. fixed: arrays that steps read only.
    build() -> step(state, rows, *fixed) -> (state, output), jitted. rows(done): the batch behind `done` steps, arrays
    [B, ...] on the host. record(done, state, output, pace): the metrics of a step, a dataclass with loss and grad_norm.
    folder: of checkpoints, metrics.jsonl beside it; None leaves nothing. facts: what must be equal to continue there.
    """

    state: Any
    fixed: tuple[Any, ...]
    build: Callable[[], Callable]
    rows: Callable[[int], Any]
    record: Callable[[int, Any, Any, Pace], Any]
    steps: int
    tokens: int  # of a batch
    mesh: Mesh
    folder: Path | None
    facts: dict[str, Any]
    checkpoint_every: int


class Driven(NamedTuple):
    """The state after the last step, on the host, and what this session spent (0 where nothing was left to do)."""

    state: Any
    compile_seconds: float
    seconds: float


def prepare(folder: Path | None, checkpoint_every: int) -> Path | None:
    """The folder of checkpoints below a run's folder, writable. Raises ValueError, before any work."""
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1.")
    return None if folder is None else checkpoints.check_writable(folder / "checkpoints")


def newest(folder: Path | None, state: Any, facts: dict[str, Any]) -> Any:
    """The state of the newest checkpoint, or `state` where there is none. Raises ValueError for another run's."""
    if folder is None or not checkpoints.saved_steps(folder):
        return state
    return checkpoints.load(folder, state, facts).tree


def drive(job: Job) -> Generator[Any, None, Driven]:
    """Runs the steps that are left, yields the metrics of each, and returns the final state.

    Raises FloatingPointError when loss or gradient are not finite: the checkpoint before is the last one.
    """
    first, last = int(job.state.step), job.steps
    if first >= last:
        return Driven(jax.device_get(job.state), 0.0, 0.0)
    state, fixed = jax.device_put((job.state, job.fixed), replicated(job.mesh))
    rows = _placed(job, first)
    begin = time.perf_counter()
    step = job.build().lower(state, rows, *fixed).compile()
    compile_seconds = time.perf_counter() - begin
    pace, seconds = Pace(job.tokens), 0.0
    with _metrics_file(job.folder) as metrics_file:
        metrics_file.write({"event": "start", "step": first, "compile_seconds": round(compile_seconds, 3)})
        for done in range(first + 1, last + 1):
            begin = time.perf_counter()
            state, output = step(state, rows, *fixed)
            if done < last:
                rows = _placed(job, done)  # made while the devices work on the step before
            output = jax.device_get(output)
            pace.add(time.perf_counter() - begin)
            seconds += pace.last
            metrics = job.record(done, state, output, pace)
            _refuse_non_finite(metrics)
            metrics_file.write(dataclasses.asdict(metrics))
            if job.folder is not None and (done % job.checkpoint_every == 0 or done == last):
                checkpoints.save(job.folder, done, state, job.facts)
            yield metrics
    return Driven(jax.device_get(state), compile_seconds, seconds)


def _placed(job: Job, done: int) -> Any:
    return jax.device_put(job.rows(done), split_rows(job.mesh))


def _metrics_file(folder: Path | None) -> Any:
    if folder is None:
        return contextlib.nullcontext(_NoFile())
    return MetricsFile(folder.parent / "metrics.jsonl")


class _NoFile:
    """Stands for metrics.jsonl in a run without a folder."""

    def write(self, record: dict[str, Any]) -> None:
        """Forgets the record."""


class Pace:
    """Tokens per second over the last steps."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._recent: collections.deque[float] = collections.deque(maxlen=_RATE_STEPS)

    def add(self, seconds: float) -> None:
        """Notes a step."""
        self._recent.append(seconds)

    @property
    def last(self) -> float:
        """Seconds of the latest step."""
        return self._recent[-1]

    @property
    def step_seconds(self) -> float:
        """Mean seconds of the latest steps."""
        return sum(self._recent) / len(self._recent)

    @property
    def tokens_per_second(self) -> float:
        """Over the latest steps."""
        return self._tokens / self.step_seconds


def _refuse_non_finite(metrics: Any) -> None:
    if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
        raise FloatingPointError(
            f"loss={metrics.loss} with grad_norm={metrics.grad_norm} at step {metrics.step} is not finite: "
            "lower learning_rate; metrics.jsonl ends with the last finite step."
        )
