"""Prefill of a causal encoder-decoder: the encoder on every new token, the decoder on the last ones (report §2.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsflash_jax.cache.model_cache import ModelCache, Tail
from dsflash_jax.modules.layer import insert_entries
from dsflash_jax.modules.transformer import Transformer, keep_tail
from dsflash_jax.ops.hyper_connections import collapse
from dsflash_jax.roles import decoder_start
from dsflash_jax.types import Published, StepInfo


def prefill_asymmetric(
    model: Transformer, step: StepInfo, cache: ModelCache, rows: tuple[int, ...], captures: list[dict] | None = None
) -> tuple[jax.Array, ModelCache]:
    """Runs encoder layers on all rows of the step, then decoder layers on the ends of the prompts that end in it.

    rows: rows per sequence of each decoder layer, as `replay.decoder_rows`, or fewer where all prompts are shorter; ()
    runs no decoder. Returns (float32 logits [S, V], cache); logits of a sequence whose prompt goes on are NaN.
    """
    start = decoder_start(model.cfg)
    context = model.context(step)
    streams, pre = model.embed_step(step)
    state = streams, pre, cache, Published()
    # Target layers of the drafts are decoder layers here: `check_tail` refuses others.
    streams, pre, cache, _ = model.run_layers(slice(0, start), context, state, captures, [])
    cache = keep_tail(cache, step, streams, pre)
    source = model.layers[start]
    cache = insert_entries(source.attn, source.attn_norm(collapse(streams, pre)), context, cache)
    if not rows:
        return jnp.full((step.num_seqs, model.cfg.vocab_size), jnp.nan, jnp.float32), cache
    return _decode_ends(model, step, cache, rows, captures)


def _decode_ends(model: Transformer, step: StepInfo, cache: ModelCache, rows, captures):
    start = decoder_start(model.cfg)
    now = last_rows(step, rows[0])
    streams, pre = read_tail(cache.tail, now)
    published, targets = Published(), []
    for layer, count in enumerate(rows, start):
        after = last_rows(step, count)
        if after.num_rows < now.num_rows:
            streams, pre, published, targets = take_rows((streams, pre, published, targets), _rows_of(now, after))
            now = after
        state = streams, pre, cache, published
        span = slice(layer, layer + 1)
        streams, pre, cache, published = model.run_layers(
            span, model.context(now), state, captures, targets, entries=False
        )
        if captures is not None:
            captures[-1]["positions"] = now.positions
    row = jnp.maximum(now.last_row, 0)
    final: dict | None = None if captures is None else {}
    cache = model.seed_drafts(targets, streams, model.context(now), cache, final)
    logits = model.logits(streams[row], pre[row], final)
    if captures is not None:
        captures.append(final)
    return jnp.where((now.slot >= 0)[:, None], logits, jnp.nan), cache


def take_rows(arrays: Any, rows: jax.Array) -> Any:
    """The given rows of every array of a pytree."""
    return jax.tree.map(lambda array: array[rows], arrays)


def last_rows(step: StepInfo, rows: int) -> StepInfo:
    """The last `rows` tokens of each sequence whose prompt ends in `step`, as a step of S * rows rows.

    Its window keys start with its rows, and it writes no entries. Tokens before `replay_start` were never run here.
    """
    seqs = step.num_seqs
    live = step.last_chunk & (step.slot >= 0)
    length = jnp.where(live, step.length, 0)
    start = jnp.where(live, jnp.maximum(step.replay_start, step.length - rows), 0)
    position = start[:, None] + jnp.arange(rows)
    return dataclasses.replace(
        step,
        tokens=jnp.zeros(seqs * rows, jnp.int32),
        positions=jnp.where(position < length[:, None], position, -1).reshape(-1),
        row_to_seq=jnp.repeat(jnp.arange(seqs, dtype=jnp.int32), rows),
        slot=jnp.where(live, step.slot, -1),
        start=start,
        length=length,
        replay_start=start,
        write_floor=length,
        last_row=jnp.where(live, jnp.arange(seqs) * rows + length - start - 1, -1),
    )


def _rows_of(now: StepInfo, after: StepInfo) -> jax.Array:
    """Rows in `now` of the tokens of `after`, which has fewer of the same sequences: int32[after.num_rows]."""
    rows, wide = after.num_rows // after.num_seqs, now.num_rows // now.num_seqs
    within = (after.start - now.start)[:, None] + jnp.arange(rows)
    return (jnp.arange(now.num_seqs)[:, None] * wide + jnp.minimum(within, wide - 1)).reshape(-1)


def read_tail(tail: Tail, step: StepInfo) -> tuple[jax.Array, jax.Array]:
    """(streams, pre) at the positions of a step; padding rows read some row of their slot's."""
    slot = jnp.maximum(step.slot, 0)[step.row_to_seq]
    row = jnp.maximum(step.positions, 0) % tail.pre.shape[1]
    return tail.streams[slot, row], tail.pre[slot, row]
