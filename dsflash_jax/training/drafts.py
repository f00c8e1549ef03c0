"""Training of the draft layers: the backbone is frozen, only parameters under "mtp" have gradients and moments."""

from __future__ import annotations

import functools
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
from dsflash_jax.training import checkpoints
from dsflash_jax.training.continuations import continued
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import DRAW_STREAM, POOL_STREAM, TaskMix, make_batch
from dsflash_jax.training.devices import data_mesh
from dsflash_jax.training.draft_loss import DraftLoss, draft_loss
from dsflash_jax.training.drive import Driven, Job, Pace, drive, newest, prepare
from dsflash_jax.training.loop import run_facts
from dsflash_jax.training.metrics import DraftMetrics
from dsflash_jax.training.optimizer import learning_rate, make_optimizer
from dsflash_jax.training.settings import DraftSettings

MODEL_FOLDER = "model"  # below the run's folder: the whole model, as `dsflash generate` reads it
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


def pool_mix(cfg: ModelConfig, settings: DraftSettings) -> TaskMix:
    """The prompts of the pool. Raises ValueError where the model cannot hold its rows, or a prompt is too short."""
    settings.run.mix(cfg)
    prompt = settings.run.context + 1 - settings.continued
    return settings.run.replace(rows=settings.pool, context=prompt).mix(cfg)


def draft_pool(params: Params, cfg: ModelConfig, settings: DraftSettings, corpus: Corpus) -> np.ndarray:
    """int32[pool, context + 1]: prompts of all kinds of rows, and what the backbone says behind them."""
    tokens = make_batch(pool_mix(cfg, settings), corpus.train, settings.run.seed, 0, POOL_STREAM).tokens
    # Rows of a kind stand together in a batch; even rows are continued in another way than odd ones.
    return continued(params, cfg, tokens, settings.continued, settings.run.seed)


def draft_rows(pool: np.ndarray, rows: int, block: int, anchors: int, seed: int, step: int) -> DraftRows:
    """`rows` different rows of a pool int32[N, T + 1], each with `anchors` different positions, ascending, behind which
    a whole block has targets. A function of (seed, step).
    """
    draws = np.random.default_rng([seed, DRAW_STREAM, step])
    chosen = pool[draws.permutation(len(pool))[:rows]]
    every = np.tile(np.arange(1, chosen.shape[1] - block, dtype=np.int32), (rows, 1))
    drawn = draws.permuted(every, axis=1)[:, :anchors]
    return DraftRows(chosen[:, :-1], chosen[:, 1:], np.sort(drawn, axis=1))


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
    """Trains params["mtp"] on rows that the backbone continued; drive it with `loop.run_to_end`.

    The backbone is returned as it was given. Below `out`, MODEL_FOLDER gets a checkpoint of the whole model. Files,
    continuation and errors as in `loop.train`; a checkpoint also belongs to its backbone, by the hash of its values.
    Raises ValueError for a configuration without draft layers, with packed weights or Engram layers, a pool smaller
    than a batch, prompts too short for what the rows ask, and more anchors than a row has places.
    """
    run, block = settings.run, cfg.dspark_block_size
    if not cfg.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers=0 must be at least 1: there are no draft layers to train.")
    if cfg.engram_layer_ids:
        rule = "must be empty in draft training: its rows come without n-grams"
        raise ValueError(f"engram_layer_ids={list(cfg.engram_layer_ids)} {rule}.")
    steps.check_differentiable(cfg)
    if settings.pool < run.rows:
        raise ValueError(f"pool={settings.pool} must be at least rows={run.rows}, the rows of a batch.")
    if settings.anchors > run.context - block:
        places = f"the {run.context - block} positions of a row with a block behind them"
        raise ValueError(f"anchors={settings.anchors} exceeds {places}.")
    pool_mix(cfg, settings)  # refuses what the pool cannot be made of
    mesh = data_mesh(run.rows, devices)
    folder = prepare(out, checkpoint_every)
    frozen = {name: part for name, part in params.items() if name != "mtp"}
    # Work: not before a step.
    pool = functools.cache(lambda: draft_pool(frozen, cfg.without_drafts(), settings, corpus))
    facts = run_facts(cfg, settings, corpus, mesh.size) | {"backbone_sha256": parameters_sha256(frozen)}
    drafts = jax.tree.map(jnp.array, params["mtp"])  # copies: steps donate their state, the caller's must survive
    state = DraftState(drafts, make_optimizer(run).init(drafts), jnp.int32(0))
    job = Job(
        state=newest(folder, state, facts), fixed=(frozen,), build=lambda: _build(cfg, settings, mesh),
        rows=lambda done: draft_rows(pool(), run.rows, block, settings.anchors, run.seed, done),
        record=lambda *step: _metrics(run.steps, *step), steps=run.steps, tokens=run.rows * run.context, mesh=mesh,
        folder=folder, facts=facts, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    return _run(job, frozen)


def _run(job: Job, frozen: Params) -> Generator[DraftMetrics, None, DraftResult]:
    driven: Driven = yield from drive(job)
    params = {**jax.device_get(frozen), "mtp": driven.state.params}
    if job.folder is not None:
        stored = {"params": {name: part for name, part in params.items() if name != "freqs"}, "step": driven.state.step}
        checkpoints.save(job.folder.parent / MODEL_FOLDER, job.steps, stored, job.facts)
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
