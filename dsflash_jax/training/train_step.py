"""One optimiser step over a data-parallel batch, as a pure function of the state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from dsflash_jax.config import ModelConfig
from dsflash_jax.training.data import Batch
from dsflash_jax.training.losses import LossParts, count_targets, loss_parts
from dsflash_jax.training.model import Model
from dsflash_jax.training.optimizer import learning_rate, make_optimizer, split_buffers
from dsflash_jax.training.settings import TrainSettings


class TrainState(NamedTuple):
    """Everything that a step reads and writes; a checkpoint holds exactly this.

    params: trained parameters without buffers. step: steps done, int32. answer_average: float32, NaN before the first
    step. dense: bool, the next step selects densely. switch_step: int32, first step with top-k, 0 while dense.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    answer_average: jax.Array
    dense: jax.Array
    switch_step: jax.Array


class TrainRows(NamedTuple):
    """What a step needs of a batch, [B, T] each."""

    tokens: jax.Array
    targets: jax.Array
    answer_mask: jax.Array
    text_mask: jax.Array

    @classmethod
    def of(cls, batch: Batch) -> TrainRows:
        return cls(batch.tokens, batch.targets, batch.answer_mask, batch.text_mask)


class StepOutput(NamedTuple):
    """Scalars of one step, and coverage per layer with a global branch."""

    loss: LossParts
    coverage: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    dense: jax.Array  # in this step; the state's flag is for the next


def init_state(cfg: ModelConfig, settings: TrainSettings, model: Model) -> tuple[TrainState, dict[str, Any]]:
    """The state before the first step, and the model's buffers."""
    params, buffers = split_buffers(model.init(cfg, settings.seed))
    state = TrainState(
        params=params, opt_state=make_optimizer(settings).init(params), step=jnp.int32(0),
        answer_average=jnp.float32(jnp.nan), dense=jnp.bool_(True), switch_step=jnp.int32(0),
    )
    return state, buffers


def build_train_step(cfg: ModelConfig, settings: TrainSettings, model: Model, mesh: Mesh) -> Callable:
    """step(state, rows, buffers, use_global) -> (state, StepOutput), jitted, the state donated.

    Runs that differ only in their seed share one function, hence one compilation: it outweighs a short run.
    use_global is an argument and not a constant: XLA would fold the masks that depend on it at compile time.
    """
    return _build(cfg, settings.replace(seed=0), model, mesh)


@functools.lru_cache(maxsize=8)
def _build(cfg: ModelConfig, settings: TrainSettings, model: Model, mesh: Mesh) -> Callable:
    gradient = _data_parallel_gradient(cfg, settings, model, mesh)
    optimizer, schedule = make_optimizer(settings), learning_rate(settings)

    def step(state: TrainState, rows: TrainRows, buffers: Any, use_global: jax.Array) -> tuple[TrainState, StepOutput]:
        grads, parts, coverage = gradient(state.params, buffers, rows, state.dense, use_global)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        average, dense = _next_selection(state, parts.answer, settings)
        done = state.step + 1
        switches = state.dense & ~dense & (done < settings.steps)  # after the last step nothing is selected any more
        new = TrainState(
            params=optax.apply_updates(state.params, updates), opt_state=opt_state, step=done, answer_average=average,
            dense=dense, switch_step=jnp.where(switches, done + 1, state.switch_step),
        )
        return new, StepOutput(parts, coverage, optax.global_norm(grads), schedule(state.step), state.dense)

    return jax.jit(step, donate_argnums=0)


def _data_parallel_gradient(cfg: ModelConfig, settings: TrainSettings, model: Model, mesh: Mesh) -> Callable:
    """(grads, loss parts, coverage) of a batch: each device works on its rows alone, sums cross devices once.

    shard_map instead of automatic partitioning: the model sorts and gathers over all rows of its batch (experts,
    selections), which automatic partitioning would exchange between the devices.
    """
    devices = mesh.size

    def on_device(params, buffers, rows: TrainRows, dense, use_global):
        counts = jax.lax.psum(count_targets(rows.answer_mask, rows.text_mask), "data")

        def loss(trained):
            out = model.forward(
                {**trained, **buffers}, rows.tokens, cfg, dense=dense, use_global=use_global,
                indexer_target=settings.indexer_target,
            )
            parts = loss_parts(
                out.logits, out.indexer_kl / devices, rows.targets, rows.answer_mask, rows.text_mask, counts,
                text_weight=settings.text_weight, indexer_weight=settings.indexer_weight,
            )
            return parts.total, (parts, out.coverage / devices)

        grads, (parts, coverage) = jax.grad(loss, has_aux=True)(params)
        return jax.lax.psum((grads, parts, coverage), "data")

    whole, by_rows = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, whole, by_rows, whole, whole), out_specs=whole, check_vma=False,
    )


def _next_selection(state: TrainState, answer: jax.Array, settings: TrainSettings) -> tuple[jax.Array, jax.Array]:
    """The moving average after this step, and whether the next one selects densely: once top-k, always top-k."""
    kept = settings.average_decay * state.answer_average + (1.0 - settings.average_decay) * answer
    average = jnp.where(jnp.isnan(state.answer_average), answer, kept)
    return average, state.dense & ~(average < settings.dense_until)
