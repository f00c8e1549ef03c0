"""Training of the draft layers: the backbone is frozen, only parameters under "mtp" have gradients and moments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import Batch, make_batch
from dsflash_jax.training.devices import data_mesh
from dsflash_jax.training.draft_loss import DraftLoss, DraftSettings, draft_loss
from dsflash_jax.training.drive import Driven, Job, Pace, drive, newest, prepare
from dsflash_jax.training.loop import run_facts
from dsflash_jax.training.metrics import DraftMetrics
from dsflash_jax.training.optimizer import learning_rate, make_optimizer

_ANCHOR_STREAM = 2  # beside the streams of training and held-out rows: anchors must not repeat their draws
Params = dict[str, Any]


class DraftState(NamedTuple):
    """What a step changes: the draft layers, their moments, and the steps done (int32)."""

    params: Params
    opt_state: Any
    step: jax.Array


class DraftRows(NamedTuple):
    """Of a batch: tokens, targets int32[B, T] (the token behind each), anchors int32[B, A]."""

    tokens: np.ndarray
    targets: np.ndarray
    anchors: np.ndarray


class DraftResult(NamedTuple):
    """The whole model with trained draft layers, numpy; seconds as in TrainResult."""

    params: Params
    compile_seconds: float
    seconds: float
    facts: dict[str, Any]


def with_draft_layers(backbone: Params, cfg: ModelConfig, seed: int = 0) -> Params:
    """A trained backbone with the untrained draft layers of `cfg`, whose backbone is the same."""
    return {**backbone, "mtp": steps.init_params(cfg, seed)["mtp"]}


def draft_rows(batch: Batch, block: int, anchors: int, seed: int, step: int) -> DraftRows:
    """A batch with `anchors` different positions per row, ascending, behind which a whole block has targets.

    Raises ValueError where a row has fewer.
    """
    rows, length = batch.tokens.shape
    if anchors > length - block:
        raise ValueError(f"anchors={anchors} exceeds the {length - block} positions of a row with a block behind them.")
    every = np.tile(np.arange(1, length - block + 1, dtype=np.int32), (rows, 1))
    drawn = np.random.default_rng([seed, _ANCHOR_STREAM, step]).permuted(every, axis=1)[:, :anchors]
    return DraftRows(batch.tokens, batch.targets, np.sort(drawn, axis=1))


def train_drafts(
    params: Params,
    cfg: ModelConfig,
    settings: DraftSettings,
    corpus: Corpus,
    out: Path | None = None,
    *,
    devices: int | None = None,
    checkpoint_every: int = 200,
) -> Generator[DraftMetrics, None, DraftResult]:
    """Trains params["mtp"] on the rows of `settings.run`; drive it with `loop.run_to_end`. The rest is returned as is.

    Files, continuation and errors as in `loop.train`; a checkpoint also belongs to its backbone, by the hash of its
    values. Raises ValueError for a configuration without draft layers and for more anchors than a row has places.
    """
    run, block = settings.run, cfg.dspark_block_size
    if not cfg.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers=0 must be at least 1: there are no draft layers to train.")
    mix, mesh = run.mix(cfg), data_mesh(run.rows, devices)

    def rows(done: int) -> DraftRows:
        return draft_rows(make_batch(mix, corpus.train, run.seed, done), block, settings.anchors, run.seed, done)

    rows(0)  # refuses before the work what the rows cannot hold
    folder = prepare(out, checkpoint_every)
    frozen = {name: part for name, part in params.items() if name != "mtp"}
    facts = run_facts(cfg, settings, corpus, mesh.size) | {"backbone_sha256": parameters_sha256(frozen)}
    state = DraftState(params["mtp"], make_optimizer(run).init(params["mtp"]), jnp.int32(0))
    job = Job(
        state=newest(folder, state, facts), fixed=(frozen,), build=lambda: _build(cfg, settings, mesh), rows=rows,
        record=lambda *step: _metrics(run.steps, *step), steps=run.steps, tokens=run.rows * run.context, mesh=mesh,
        folder=folder, facts=facts, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    return _run(job, frozen)


def _run(job: Job, frozen: Params) -> Generator[DraftMetrics, None, DraftResult]:
    driven: Driven = yield from drive(job)
    params = {**jax.device_get(frozen), "mtp": driven.state.params}
    return DraftResult(params, driven.compile_seconds, driven.seconds, job.facts)


def parameters_sha256(params: Params) -> str:
    """Hex digest over names, shapes, dtypes and bytes of a parameter tree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(params)):
        leaf = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode() + leaf.tobytes())
    return digest.hexdigest()


def _build(cfg: ModelConfig, settings: DraftSettings, mesh: Mesh) -> Callable:
    """step(state, rows, frozen) -> (state, (DraftLoss, gradient norm, learning rate)), jitted, the state donated."""
    optimizer, schedule = make_optimizer(settings.run), learning_rate(settings.run)

    def on_device(trained: Params, rows: DraftRows, frozen: Params) -> tuple[Params, DraftLoss]:
        place = rows.anchors[..., None] + jnp.arange(cfg.dspark_block_size)
        targets = jax.vmap(lambda row, at: row[at])(rows.targets, place)

        def loss(trained: Params) -> tuple[jax.Array, DraftLoss]:
            out = steps.forward_drafts({**frozen, "mtp": trained}, rows.tokens, rows.anchors, cfg)
            # Every device has the same number of blocks, so the mean over all is the mean of their means.
            parts = jax.tree.map(lambda part: part / mesh.size, draft_loss(out, targets, settings))
            return parts.total, parts

        return jax.lax.psum(jax.grad(loss, has_aux=True)(trained), "data")

    whole, by_rows = PartitionSpec(), PartitionSpec("data")
    gradient = jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, by_rows, whole), out_specs=whole, check_vma=False
    )  # fmt: skip

    def step(state: DraftState, rows: DraftRows, frozen: Params):
        grads, parts = gradient(state.params, rows, frozen)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = DraftState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        return new, (parts, optax.global_norm(grads), schedule(state.step))

    return jax.jit(step, donate_argnums=0)


def _metrics(last: int, done: int, state: DraftState, output: tuple, pace: Pace) -> DraftMetrics:
    del state
    loss, grad_norm, rate = output
    return DraftMetrics(
        step=done, steps=last, loss=float(loss.total), cross_entropy=float(loss.cross_entropy),
        distance=float(loss.distance), confidence=float(loss.confidence),
        acceptance=tuple(float(share) for share in loss.acceptance), grad_norm=float(grad_norm),
        learning_rate=float(rate), step_seconds=pace.last, tokens_per_second=pace.tokens_per_second,
        seconds_left=(last - done) * pace.step_seconds,
    )  # fmt: skip
