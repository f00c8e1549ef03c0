"""The training loop: a generator that yields metrics and leaves checkpoints; drawing them is the caller's business."""

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
import jax.numpy as jnp
from jax.sharding import Mesh

from dsflash_jax.config import ModelConfig
from dsflash_jax.training import checkpoints
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import TaskMix, make_batch
from dsflash_jax.training.devices import data_mesh, replicated, split_rows
from dsflash_jax.training.metrics import MetricsFile, StepMetrics
from dsflash_jax.training.model import Model, package_model
from dsflash_jax.training.settings import TrainSettings
from dsflash_jax.training.train_step import StepOutput, TrainRows, TrainState, build_train_step, init_state

_RATE_STEPS = 20  # steps that tokens/s and time left look back on


class TrainResult(NamedTuple):
    """What a finished run returns.

    params: trained parameters and buffers, numpy. switch_step: first step with top-k selection, None if it stayed
    dense. compile_seconds and seconds (optimiser steps only): of this session, 0 where nothing was left to do.
    """

    params: dict[str, Any]
    switch_step: int | None
    compile_seconds: float
    seconds: float
    facts: dict[str, Any]


TrainSteps = Generator[StepMetrics, None, TrainResult]


def train(
    cfg: ModelConfig, settings: TrainSettings, corpus: Corpus, out: Path | None = None, *,
    devices: int | None = None, checkpoint_every: int = 200, model: Model | None = None,
) -> TrainSteps:
    """Trains a model; iterate over the result, or hand it to `run_to_end`.

    With `out`, metrics go to out/metrics.jsonl and checkpoints to out/checkpoints, every checkpoint_every steps and at
    the end; a run found there continues after its last checkpoint, bit-identical to one that was never interrupted.

    Raises, before any work: ValueError for settings that do not fit the model or the devices, for a folder that
    cannot be written, and for a checkpoint of another run, naming the fields. While training: FloatingPointError when
    the loss is not finite.
    """
    model = model or package_model()
    mix, mesh = settings.mix(cfg), data_mesh(settings.rows, devices)
    if cfg.engram_layer_ids:
        rule = "must be empty in training: n-gram tables are packed codes, which have no gradient"
        raise ValueError(f"engram_layer_ids={list(cfg.engram_layer_ids)} {rule}.")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1.")
    facts = run_facts(cfg, settings, corpus, mesh.size)
    folder = None if out is None else checkpoints.check_writable(out / "checkpoints")
    state, buffers = init_state(cfg, settings, model)
    if folder is not None and checkpoints.saved_steps(folder):
        state = checkpoints.load(folder, state, facts).tree
    run = _Run(cfg, settings, model, mesh, mix, corpus, facts, folder, checkpoint_every)
    return run.steps(state, buffers)


def run_to_end(steps: TrainSteps, report: Callable[[StepMetrics], None] | None = None) -> TrainResult:
    """Drives a run; calls `report` after every step."""
    while True:
        try:
            metrics = next(steps)
        except StopIteration as stop:
            return stop.value
        if report is not None:
            report(metrics)


def run_facts(cfg: ModelConfig, settings: TrainSettings, corpus: Corpus, devices: int) -> dict[str, Any]:
    """What must be equal for a run to continue: model, settings, corpus and device count (it orders the sums)."""
    return {
        "config": cfg.to_dict(), "config_sha256": cfg.sha256(), "settings": settings.to_dict(),
        "corpus": corpus.summary(), "devices": devices,
    }


@dataclasses.dataclass(frozen=True)
class _Run:
    """The fixed parts of one run."""

    cfg: ModelConfig
    settings: TrainSettings
    model: Model
    mesh: Mesh
    mix: TaskMix
    corpus: Corpus
    facts: dict[str, Any]
    folder: Path | None
    checkpoint_every: int

    def steps(self, state: TrainState, buffers: dict[str, Any]) -> TrainSteps:
        """Runs the steps that are left."""
        first, last = int(state.step), self.settings.steps
        if first >= last:
            return self._result(state, buffers, 0.0, 0.0)
        state, buffers = jax.device_put((state, buffers), replicated(self.mesh))
        rows = self._rows(first)
        use_global = jax.device_put(jnp.bool_(True), replicated(self.mesh))
        step, compile_seconds = self._compile(state, buffers, rows, use_global)
        pace, seconds = _Pace(self.settings.rows * self.settings.context), 0.0
        with self._metrics_file() as metrics_file:
            metrics_file.write({"event": "start", "step": first, "compile_seconds": round(compile_seconds, 3)})
            for done in range(first + 1, last + 1):
                begin = time.perf_counter()
                state, output = step(state, buffers, rows, use_global)
                if done < last:
                    rows = self._rows(done)  # made while the devices work on the step before
                output, average, switch_step = jax.device_get((output, state.answer_average, state.switch_step))
                pace.add(time.perf_counter() - begin)
                seconds += pace.last
                metrics = _metrics(done, last, output, float(average), int(switch_step), pace)
                _refuse_non_finite(metrics)
                metrics_file.write(dataclasses.asdict(metrics))
                if self.folder is not None and (done % self.checkpoint_every == 0 or done == last):
                    checkpoints.save(self.folder, done, state, self.facts)
                yield metrics
        return self._result(state, buffers, compile_seconds, seconds)

    def _rows(self, step: int) -> TrainRows:
        batch = make_batch(self.mix, self.corpus.train, self.settings.seed, step)
        return jax.device_put(TrainRows.of(batch), split_rows(self.mesh))

    def _compile(self, *arguments: Any) -> tuple[Callable, float]:
        begin = time.perf_counter()
        step = build_train_step(self.cfg, self.settings, self.model, self.mesh)
        return step.lower(*arguments).compile(), time.perf_counter() - begin

    def _metrics_file(self) -> Any:
        if self.folder is None:
            return contextlib.nullcontext(_NoFile())
        return MetricsFile(self.folder.parent / "metrics.jsonl")

    def _result(self, state: TrainState, buffers: Any, compile_seconds: float, seconds: float) -> TrainResult:
        state, buffers = jax.device_get((state, buffers))
        return TrainResult(
            {**state.params, **buffers}, int(state.switch_step) or None, compile_seconds, seconds, self.facts,
        )


class _NoFile:
    """Stands for metrics.jsonl in a run without a folder."""

    def write(self, record: dict[str, Any]) -> None:
        """Forgets the record."""


class _Pace:
    """Tokens per second over the last steps."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._recent: collections.deque[float] = collections.deque(maxlen=_RATE_STEPS)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def last(self) -> float:
        return self._recent[-1]

    @property
    def step_seconds(self) -> float:
        return sum(self._recent) / len(self._recent)

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self.step_seconds


def _metrics(done: int, last: int, output: StepOutput, average: float, switch_step: int, pace: _Pace) -> StepMetrics:
    return StepMetrics(
        step=done, steps=last, loss=float(output.loss.total), answer_loss=float(output.loss.answer),
        text_loss=float(output.loss.text), indexer_kl=float(output.loss.indexer_kl), answer_average=average,
        dense=bool(output.dense), switch_step=switch_step or None, grad_norm=float(output.grad_norm),
        learning_rate=float(output.learning_rate), coverage=tuple(float(share) for share in output.coverage),
        step_seconds=pace.last, tokens_per_second=pace.tokens_per_second,
        seconds_left=(last - done) * pace.step_seconds,
    )


def _refuse_non_finite(metrics: StepMetrics) -> None:
    if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
        raise FloatingPointError(
            f"loss={metrics.loss} with grad_norm={metrics.grad_norm} at step {metrics.step} is not finite: "
            "lower learning_rate; metrics.jsonl ends with the last finite step."
        )
