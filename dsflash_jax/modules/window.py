"""Window rows of a layer: written to its ring, and listed for the query rows of a ragged step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsflash_jax.cache.addressing import paged_rows, row_layout
from dsflash_jax.cache.layout import Member, cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.attention import Rope
from dsflash_jax.modules.step_index import history_index, history_table
from dsflash_jax.types import StepInfo
from pallas_kernels.common.formats import PagedRows
from pallas_kernels.common.gather import slices
from pallas_kernels.kv_insert.api import kv_insert
from pallas_kernels.kv_insert.insert import Insert
from pallas_kernels.sparse_mla.row_set import RowSet


def ring_insert(values: jax.Array, rope: Rope, step: StepInfo, member: Member) -> Insert:
    """The step's window rows [T, D], not rotated, on their way to the ring.

    Only the last `rows_per_page` rows of a sequence are written: earlier ones would share their addresses.
    """
    kept = step.positions >= step.length[step.row_to_seq] - member.rows_per_page
    index = jnp.where((step.positions >= 0) & kept, member.ring_row(step.positions), -1)
    return Insert(values, *rope, index, step.row_to_seq, step.slot[:, None], row_layout(member))


def seen_positions(step: StepInfo, window: int) -> jax.Array:
    """int32[T, window]: the positions whose window rows each row sees, ascending; -1 = none."""
    position = step.positions[:, None] + jnp.arange(window) - window + 1
    lowest = jnp.maximum(step.replay_start[step.row_to_seq], 0)[:, None]
    return jnp.where((step.positions[:, None] >= 0) & (position >= lowest), position, -1)


def window_rows(
    values: jax.Array, rope: Rope, step: StepInfo, cache: ModelCache, layer: int, cfg: ModelConfig, in_ring: bool
) -> tuple[RowSet, ModelCache]:
    """The rows that each query row sees, and the cache with the step's rows values [T, D] (not rotated) in the ring.

    in_ring: no sequence has more rows than the ring has to spare. All rows then lie in the ring once it is written.
    Otherwise a chunk may overwrite rows that its first tokens see, so they are copied first, to lie in one piece with
    the new ones.
    """
    member = cache_layout(cfg).ring[layer]
    new, position = ring_insert(values, rope, step, member), seen_positions(step, cfg.sliding_window)
    if in_ring:
        (ring,) = kv_insert((cache.ring,), [new], **cfg.kernels.options)
        rows = paged_rows(member, ring, step.slot[:, None], step.row_to_seq)
        seen = RowSet(rows, jnp.where(position >= 0, member.ring_row(position), -1))
        return seen, dataclasses.replace(cache, ring=ring)
    history, one_page = cfg.sliding_window - 1, jnp.zeros((1, 1), jnp.int32)
    chunk = history_table(step, _old_rows(step, cache.ring, member, history)).reshape(1, -1)
    own = history_index(step, step.row_to_seq, step.positions, history)
    layout = dataclasses.replace(row_layout(member), offset=0, rows_per_page=chunk.shape[1] // member.row_bytes)
    there = dataclasses.replace(new, index=own, seq=jnp.zeros_like(own), table=one_page, layout=layout)
    (chunk,) = kv_insert((chunk,), [there], **cfg.kernels.options)
    # Always true, but the write of the ring now depends on the read of the old rows: otherwise XLA may order the read
    # last and keep a copy of the whole ring for it. (A barrier is gone before copies are decided.)
    read = jnp.max(chunk[0, : member.row_bytes].astype(jnp.int32)) >= 0
    after = dataclasses.replace(new, index=jnp.where(read, new.index, -1))
    (ring,) = kv_insert((cache.ring,), [after], **cfg.kernels.options)
    back = step.positions[:, None] - position
    index = jnp.where(position >= 0, own[:, None] - back, -1)
    seen = RowSet(PagedRows(chunk, one_page, there.seq, layout), index, run=True)
    return seen, dataclasses.replace(cache, ring=ring)


def _old_rows(step: StepInfo, ring: jax.Array, member: Member, history: int) -> jax.Array:
    """Each sequence's packed window rows before `start`, oldest first: uint8[S, history, row_bytes]."""
    position = step.start[:, None] - history + jnp.arange(history)
    slot = jnp.broadcast_to(step.slot[:, None], position.shape)
    return slices(ring, slot, member.row_offset(jnp.maximum(position, 0)), member.row_bytes)
