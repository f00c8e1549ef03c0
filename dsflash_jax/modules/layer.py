"""One transformer layer on the ragged step: reads and writes the caches, hands its selection down as a value."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsflash_jax.cache.addressing import entry_address, member_address, unpack_member
from dsflash_jax.cache.layout import Member, cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.attention import Attention, Rope
from dsflash_jax.modules.selection import reading, select, selection_list, table_entries
from dsflash_jax.modules.step_index import Tiles, completing_rows, history_index, interleave_history
from dsflash_jax.ops.compressor import pool
from dsflash_jax.ops.rope import apply_rope
from dsflash_jax.ops.rows import read_bytes, write_bytes
from dsflash_jax.ops.sparse_attention import (
    BandSource,
    MaskedTableSource,
    RowSource,
    Source,
    TableSource,
    sparse_attention,
)
from dsflash_jax.roles import LayerRole
from dsflash_jax.types import GLOBAL_GROUP, Published, StepInfo


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepContext:
    """A step with what all its layers share. `ropes` holds (cos, sin) tables by name."""

    step: StepInfo
    tiles: Tiles
    ropes: dict[str, Rope]

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
    window, cache = _window(attn, x, rope, context, cache)
    sources: list[Source] = [window]
    if role.owns_kv and entries:
        cache = insert_entries(attn, x, context, cache)
    if role.indexes:
        index_query = attn.indexer.query(x, qr, rope)
        published = select(index_query, published, step, context.tiles, cache.pages, role, cfg, capture)
    if role.ratio:
        sources.append(_main_source(published, context, cache.pages, role.kv_source, cfg))
    tiles = (context.tiles.rows, context.tiles.seq, context.tiles.place)
    out = sparse_attention(q, sources, attn.attn_sink[...], tiles, scale=attn.scale, scratch_bytes=cfg.scratch_bytes)
    if capture is not None:
        capture |= {"selection": published.selection_TxK, "candidates": published.candidates_TxC}
        back = jnp.arange(cfg.sliding_window) - cfg.sliding_window + 1
        seen = window.last_T[:, None] + back >= window.first_T[:, None]
        capture["window_positions"] = jnp.where(seen, step.positions[:, None] + back, -1)
    return attn.output(out, rope), cache, published


def _window(attn: Attention, x: jax.Array, rope: Rope, context: StepContext, cache: ModelCache):
    """Window rows as a table of old ring rows and this step's rows, and the ring with the new rows written.

    The old rows are read before the ring is written: a chunk longer than the ring would overwrite them.
    """
    cfg, step = attn.cfg, context.step
    member = cache_layout(cfg).ring[attn.role.layer]
    history = cfg.sliding_window - 1
    fresh = member.format.pack(attn.window_latent(x, rope))
    old_position = step.start[:, None] - history + jnp.arange(history)
    slot = jnp.broadcast_to(step.slot[:, None], old_position.shape)
    old = read_bytes(cache.ring, *member.ring_address(slot, old_position), member.row_bytes)
    packed = interleave_history(step, old, fresh)
    seq = step.row_to_seq
    own = history_index(step, seq, step.positions, history)
    oldest = jnp.maximum(jnp.maximum(step.replay_start[seq], step.positions - history), 0)
    first = own - (step.positions - oldest)
    last = jnp.where(step.positions >= 0, own, -1)
    window = BandSource(member.format.unpack(packed, member.width), first, last, cfg.sliding_window)
    # Only the last `rows_per_page` rows of a sequence are written: earlier ones would share their addresses.
    keep = (step.positions >= 0) & (step.positions >= step.length[seq] - member.rows_per_page)
    page, offset = member.ring_address(jnp.where(keep, step.slot[seq], -1), jnp.maximum(step.positions, 0))
    # Taken from the table, so that the write depends on the read of the old rows: otherwise XLA may order the read
    # last and keep a copy of the whole ring for it.
    rows = packed[jnp.maximum(own, 0)]
    return window, dataclasses.replace(cache, ring=write_bytes(cache.ring, page, offset, rows))


def insert_entries(attn: Attention, x: jax.Array, context: StepContext, cache: ModelCache) -> ModelCache:
    """Pools the groups that this step completes and writes their main and index rows; keeps the open group's rows."""
    role, cfg, step = attn.role, attn.cfg, context.step
    done = completing_rows(step, role.ratio)
    row = jnp.maximum(done, 0)
    position = jnp.where(done >= 0, step.positions[row], -1)
    if role.ratio == 1:
        latent = attn.compressor.norm(attn.compressor.wkv(x))
    else:
        latent, cache = _pool_groups(attn, x, row, position, context, cache)
    rope = context.rope(role.rope, position - (role.ratio - 1))  # the group's first token (contract.md, Positions)
    rows = {"main": apply_rope(latent, *rope), "index": attn.indexer.key(latent, rope)}
    seq = step.row_to_seq[row]
    entry = jnp.where(position >= step.write_floor[seq], position // role.ratio, -1)
    pages = cache.pages
    for kind, values in rows.items():
        member = cache_layout(cfg).member(role.layer, kind)
        page, offset = entry_address(member, step.block_tables[GLOBAL_GROUP], seq, entry)
        pages = write_bytes(pages, page, offset, member.format.pack(values))
    return dataclasses.replace(cache, pages=pages)


def _pool_groups(
    attn: Attention, x: jax.Array, row: jax.Array, position: jax.Array, context: StepContext, cache: ModelCache
) -> tuple[jax.Array, ModelCache]:
    """(latents [G, D] in x's dtype, cache with this step's un-pooled rows stored), for ratio > 1."""
    role, cfg, step = attn.role, attn.cfg, context.step
    layout = cache_layout(cfg)
    owner, history = layout.state_owners.index(role.layer), role.ratio - 1
    fresh = attn.compressor.rows(x)
    old_position = step.start[:, None] - history + jnp.arange(history)
    old = cache.state[jnp.maximum(step.slot, 0)[:, None], owner, layout.state_row(old_position)]
    table = interleave_history(step, old, fresh)
    members = position[:, None] - history + jnp.arange(role.ratio)
    index = history_index(step, step.row_to_seq[row][:, None], members, history)
    values, gate = jnp.split(table[jnp.maximum(index, 0)], 2, axis=-1)
    latent = attn.compressor.norm(pool(values, gate).astype(x.dtype))
    keep = (step.positions >= 0) & (step.positions >= step.length[step.row_to_seq] - layout.state_rows)
    slot = jnp.where(keep, step.slot[step.row_to_seq], cache.state.shape[0])
    # From the table, as in `_window`: the write must follow the read of the old rows.
    own = history_index(step, step.row_to_seq, step.positions, history)
    rows = table[jnp.maximum(own, 0)]
    place = layout.state_row(jnp.maximum(step.positions, 0))
    state = cache.state.at[slot, owner, place].set(rows, mode="drop")
    return latent, dataclasses.replace(cache, state=state)


def _main_source(published: Published, context: StepContext, pages: jax.Array, kv_source: int, cfg: ModelConfig):
    """The selected main rows, read as `selection.reading` decides."""
    step = context.step
    member = cache_layout(cfg).member(kv_source, "main")
    tables = step.block_tables[GLOBAL_GROUP]
    how = reading(step, context.tiles, kv_source, cfg)
    if not how.table:
        page, offset = entry_address(member, tables, step.row_to_seq[:, None], selection_list(published, cfg))
        return RowSource(pages, page, offset, member.format, member.width)
    entries = table_entries(step, member)
    table = _unpack_tables(tables, pages, member).reshape(step.num_seqs, entries, member.width)
    if how.dense and published.selected_TxE is not None:
        return MaskedTableSource(table, published.selected_TxE, entries)
    return TableSource(table, selection_list(published, cfg))


def _unpack_tables(tables: jax.Array, pages: jax.Array, member: Member) -> jax.Array:
    """All rows of `member` reachable through block tables [S, P]: float32[S * P * rows_per_page, D]."""
    return unpack_member(member, read_bytes(pages, *member_address(member, tables)))
