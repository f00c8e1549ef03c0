"""One transformer layer on the ragged step: reads and writes the caches, hands its selection down as a value."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsflash_jax.cache.addressing import paged_rows, row_layout
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.modules.attention import Attention, Rope
from dsflash_jax.modules.selection import select
from dsflash_jax.modules.step_index import Tiles, completing_rows
from dsflash_jax.modules.window import seen_positions, window_rows
from dsflash_jax.roles import LayerRole
from dsflash_jax.types import GLOBAL_GROUP, Published, StepInfo
from pallas_kernels.compress_pool.api import compress_pool
from pallas_kernels.compress_pool.rows import StepRows
from pallas_kernels.kv_insert.api import kv_insert
from pallas_kernels.kv_insert.insert import Insert
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.row_set import RowSet


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepContext:
    """A step with what all its layers share. `ropes` holds (cos, sin) tables by name; `in_ring` as `window_rows`."""

    step: StepInfo
    tiles: Tiles
    ropes: dict[str, Rope]
    in_ring: bool = dataclasses.field(metadata=dict(static=True))

    def rope(self, name: str, positions: jax.Array) -> Rope:
        """Table rows at `positions` (negative positions read row 0; such rows are never used)."""
        cos, sin = self.ropes[name]
        index = jnp.maximum(positions, 0)
        return cos[index], sin[index]


def attention_step(
    attn: Attention,
    x: jax.Array,
    context: StepContext,
    cache: ModelCache,
    published: Published,
    capture: dict | None = None,
    role: LayerRole | None = None,
    entries: bool = True,
) -> tuple[jax.Array, ModelCache, Published]:
    """Attention of one layer for the rows x [T, d] (after attn_norm). `role` replaces the layer's own.

    entries: whether a KV owner writes entries; False where they were written before from the same states.

    New rows are packed before anything reads them, so a row reads the same in the call that wrote it and later.
    """
    role, cfg, step = role or attn.role, attn.cfg, context.step
    rope = context.rope(role.rope, step.positions)
    q, qr = attn.query(x, rope)
    window, cache = window_rows(attn.window_latent(x), rope, step, cache, attn.role.layer, cfg, context.in_ring)
    row_sets = [window]
    if role.owns_kv and entries:
        cache = insert_entries(attn, x, context, cache)
    if role.indexes:
        index_query = attn.indexer.query(x, qr, rope)
        published = select(index_query, published, step, context.tiles, cache.pages, role, cfg, capture)
    if role.ratio:
        member = cache_layout(cfg).member(role.kv_source, "main")
        rows = paged_rows(member, cache.pages, step.block_tables[GLOBAL_GROUP], step.row_to_seq)
        row_sets.append(RowSet(rows, published.selection_TxK, published.selected_TxE))
    tiles = (context.tiles.rows, context.tiles.seq, context.tiles.place)
    out = sparse_mla(
        q, row_sets, attn.attn_sink[...], scale=attn.scale, tiles=tiles, scratch_bytes=cfg.scratch_bytes,
        **cfg.kernels.options,
    )  # fmt: skip
    if capture is not None:
        capture |= {"selection": published.selection_TxK, "candidates": published.candidates_TxC}
        capture["window_positions"] = seen_positions(step, cfg.sliding_window)
    return attn.output(out, rope), cache, published


def insert_entries(attn: Attention, x: jax.Array, context: StepContext, cache: ModelCache) -> ModelCache:
    """Pools the groups that this step completes and writes their main and index rows; keeps the open group's rows."""
    role, cfg, step = attn.role, attn.cfg, context.step
    done = completing_rows(step, role.ratio)
    row = jnp.maximum(done, 0)
    position = jnp.where(done >= 0, step.positions[row], -1)
    if role.ratio == 1:
        latent = attn.compressor.norm(attn.compressor.wkv(x))
    else:
        latent, cache = _pool_groups(attn, x, done, context, cache)
    rope = context.rope(role.rope, position - (role.ratio - 1))  # the group's first token (contract.md, Positions)
    seq, tables = step.row_to_seq[row], step.block_tables[GLOBAL_GROUP]
    entry = jnp.where((position >= 0) & (position >= step.write_floor[seq]), position // role.ratio, -1)
    rows = {"main": latent, "index": attn.indexer.key(latent)}
    layouts = {kind: row_layout(cache_layout(cfg).member(role.layer, kind)) for kind in rows}
    inserts = [Insert(values, *rope, entry, seq, tables, layouts[kind]) for kind, values in rows.items()]
    (pages,) = kv_insert((cache.pages,), inserts, **cfg.kernels.options)
    return dataclasses.replace(cache, pages=pages)


def _pool_groups(
    attn: Attention, x: jax.Array, done: jax.Array, context: StepContext, cache: ModelCache
) -> tuple[jax.Array, ModelCache]:
    """(latents [G, D] in x's dtype, cache with this step's un-pooled rows stored), for ratio > 1."""
    role, cfg, step = attn.role, attn.cfg, context.step
    owner = cache_layout(cfg).state_owners.index(role.layer)
    rows = StepRows(step.positions, step.row_to_seq, step.first_row, step.start, step.length, step.slot)
    latent, state = compress_pool(
        attn.compressor.rows(x), cache.state, done, rows, ratio=role.ratio, owner=owner, **cfg.kernels.options
    )
    return attn.compressor.norm(latent.astype(x.dtype)), dataclasses.replace(cache, state=state)
