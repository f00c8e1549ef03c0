"""The training loop: a generator that yields metrics and leaves checkpoints; drawing them is the caller's business."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsflash_jax.config import ModelConfig
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import make_batch
from dsflash_jax.training.devices import data_mesh
from dsflash_jax.training.drive import Driven, Job, Pace, drive, newest, prepare
from dsflash_jax.training.metrics import StepMetrics
from dsflash_jax.training.model import Model, package_model
from dsflash_jax.training.settings import TrainSettings
from dsflash_jax.training.train_step import StepOutput, TrainRows, TrainState, build_train_step, init_state


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
    facts = run_facts(cfg, settings, corpus, mesh.size)
    folder = prepare(out, checkpoint_every)
    state, buffers = init_state(cfg, settings, model)
    job = Job(
        state=newest(folder, state, facts), fixed=(buffers, jnp.bool_(True)),
        build=lambda: build_train_step(cfg, settings, model, mesh),
        rows=lambda done: TrainRows.of(make_batch(mix, corpus.train, settings.seed, done)),
        record=lambda *step: _metrics(settings.steps, *step), steps=settings.steps,
        tokens=settings.rows * settings.context, mesh=mesh, folder=folder, facts=facts,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    return _run(job, buffers)


def _run(job: Job, buffers: dict[str, Any]) -> TrainSteps:
    driven: Driven = yield from drive(job)
    params = {**driven.state.params, **jax.device_get(buffers)}
    switch_step = int(driven.state.switch_step) or None
    return TrainResult(params, switch_step, driven.compile_seconds, driven.seconds, job.facts)


def run_to_end(steps: Generator, report: Callable[[Any], None] | None = None) -> Any:
    """Drives a run; calls `report` with the metrics of every step. Returns the run's result."""
    while True:
        try:
            metrics = next(steps)
        except StopIteration as stop:
            return stop.value
        if report is not None:
            report(metrics)


def run_facts(cfg: ModelConfig, settings: Any, corpus: Corpus, devices: int) -> dict[str, Any]:
    """What must be equal for a run to continue: model, settings, corpus and device count (it orders the sums)."""
    return {
        "config": cfg.to_dict(), "config_sha256": cfg.sha256(), "settings": settings.to_dict(),
        "corpus": corpus.summary(), "devices": devices,
    }


def _metrics(last: int, done: int, state: TrainState, output: StepOutput, pace: Pace) -> StepMetrics:
    average, switch_step = jax.device_get((state.answer_average, state.switch_step))
    return StepMetrics(
        step=done, steps=last, loss=float(output.loss.total), answer_loss=float(output.loss.answer),
        text_loss=float(output.loss.text), indexer_kl=float(output.loss.indexer_kl), answer_average=float(average),
        dense=bool(output.dense), switch_step=int(switch_step) or None, grad_norm=float(output.grad_norm),
        learning_rate=float(output.learning_rate), coverage=tuple(float(share) for share in output.coverage),
        step_seconds=pace.last, tokens_per_second=pace.tokens_per_second,
        seconds_left=(last - done) * pace.step_seconds,
    )
