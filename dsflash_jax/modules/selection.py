"""Selecting global entries for the query rows of a ragged step, reading packed index keys from the pages."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.cache.addressing import entry_address, member_address, unpack_member
from dsflash_jax.cache.layout import Member, cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.step_index import Tiles
from dsflash_jax.ops.compressor import visible_entries
from dsflash_jax.ops.indexer import block_entries, block_mask, block_ranks, index_scores, mask_invisible
from dsflash_jax.ops.prefixes import prefix_sizes, run_prefix
from dsflash_jax.ops.rows import read_bytes, read_rows
from dsflash_jax.ops.topk import listed, select_topk, topk_mask
from dsflash_jax.roles import LayerRole, kv_owners
from dsflash_jax.types import GLOBAL_GROUP, Published, StepInfo


class Query(NamedTuple):
    """Indexer queries of a layer: q [T, H, D] (rounded like the keys) and signed weights [T, H], float32."""

    q: jax.Array
    weights: jax.Array


def table_entries(step: StepInfo, member: Member) -> int:
    """Entries a block table of this step can address, static."""
    return step.block_tables[GLOBAL_GROUP].shape[1] * member.rows_per_page


MAX_TILE_ROWS = 128  # more rows make the products no faster and read more keys that only some of the rows see
_SCORE_ARRAYS = 4  # float32 [rows, entries] alive at once: summed, masked, made canonical, ranked


def tile_rows(step: StepInfo, cfg: ModelConfig) -> int:
    """Query rows per tile: the mean rows per sequence, bounded so that one tile's scores fit the scratch budget.

    The scores of single heads do not count: `_table_scores` makes them for a few pages at a time.
    """
    entries = max((table_entries(step, m) for m in cache_layout(cfg).members), default=1)
    share = max(1, step.num_rows // step.num_seqs)
    budget = max(1, cfg.scratch_bytes // (4 * _SCORE_ARRAYS * entries))
    return min(1 << (share - 1).bit_length(), 1 << (budget.bit_length() - 1), MAX_TILE_ROWS)


# Measured on two CPU cores: in a dense product over a whole table a key costs about 1/8 of a picked key, once a tile
# has rows enough to share it.
DENSE_TILE_ROWS, DENSE_KEYS_PER_PICK = 16, 8


class Reading(NamedTuple):
    """How the layers of a KV owner read its main rows in this step, static.

    table: unpacked once per sequence, not per query. dense: that table whole, under masks.
    """

    table: bool
    dense: bool


def reading(step: StepInfo, tiles: Tiles, kv_source: int, cfg: ModelConfig) -> Reading:
    """Whichever is less work: rows unpacked per query, once for all queries, or once and multiplied whole."""
    member = cache_layout(cfg).member(kv_source, "main")
    entries = table_entries(step, member)
    table_bytes = 4 * step.num_seqs * entries * member.width
    table = step.num_rows * cfg.index_topk >= step.num_seqs * entries and table_bytes <= cfg.scratch_bytes
    shared = tiles.rows.shape[1] >= DENSE_TILE_ROWS and entries <= DENSE_KEYS_PER_PICK * cfg.index_topk
    return Reading(table, table and shared)


class _Forms(NamedTuple):
    """What a selection is wanted as, static. lists, masks: of the selection; pool lists of the candidate blocks."""

    lists: bool
    masks: bool
    reads_pool: bool  # keys of the candidate blocks alone are scored
    scores: bool  # captured


def _forms(step: StepInfo, tiles: Tiles, role: LayerRole, cfg: ModelConfig, capture: bool) -> _Forms:
    dense = reading(step, tiles, role.kv_source, cfg).dense
    width = table_entries(step, cache_layout(cfg).member(role.kv_source, "index"))
    pool = tiles.rows.shape[1] * cfg.candidate_topk_blocks * cfg.candidate_block_size
    return _Forms(capture or not dense, dense, 0 < pool < width and not capture and not cfg.stale_index_keys, capture)


def select(
    query: Query,
    published: Published,
    step: StepInfo,
    tiles: Tiles,
    pages: jax.Array,
    role: LayerRole,
    cfg: ModelConfig,
    capture: dict | None = None,
) -> Published:
    """Fresh top-k of an index source, with the candidate pool built or read as the layer's role says."""
    forms = _forms(step, tiles, role, cfg, capture is not None)
    one = functools.partial(_select_tile, query, published, step, pages, role, cfg, forms)
    if tiles.seq.shape[0] == 1:
        results = jax.tree.map(lambda x: x[None], one((tiles.rows[0], tiles.seq[0])))
    else:
        results = lax.map(one, (tiles.rows, tiles.seq))
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[tiles.place], results)
    live = (step.positions >= 0)[:, None]
    picked, scores = jax.tree.map(lambda x: jnp.where(live, x, False if x.dtype == bool else -1), flat)
    if capture is not None:
        capture["index_score"] = scores
    if role.builds_candidates:
        return picked
    return picked._replace(candidates_TxC=published.candidates_TxC, pool_TxB=published.pool_TxB)


def _select_tile(query, published, step, pages, role, cfg, forms: _Forms, tile) -> tuple[Published, jax.Array | None]:
    """(the tile's part of what is published, masked scores where they are captured)."""
    rows, seq = tile
    row = jnp.maximum(rows, 0)
    positions = jnp.where(rows >= 0, step.positions[row], -1)
    visible = visible_entries(positions, role.ratio)
    q, weights = query.q[row], query.weights[row]
    table_row = step.block_tables[GLOBAL_GROUP][seq]
    member = cache_layout(cfg).member(role.kv_source, "index")
    width = table_entries(step, member)
    if role.reads_candidates and forms.reads_pool:
        blocks = pool_list(published, cfg)[row]
        return Published(_select_in_pool(q, weights, blocks, visible, pages, table_row, member, cfg)), None

    def run(entries: int) -> tuple[Published, jax.Array | None]:
        scores = _table_scores(q, weights, pages, table_row[: entries // member.rows_per_page], member, cfg)
        if cfg.stale_index_keys:
            scores = _stale_scores(scores, q, weights, positions, step.start[seq], pages, table_row, role, cfg)
        scores = mask_invisible(scores, visible)
        if role.reads_candidates:
            scores = jnp.where(_in_pool(published, row, entries, cfg), scores, -jnp.inf)
        return _pick(scores, visible, width, role, cfg, forms), scores if forms.scores else None

    sizes = [width] if forms.scores else prefix_sizes(width, member.rows_per_page)
    return run_prefix(jnp.max(visible), sizes, run)


def _pick(scores: jax.Array, visible: jax.Array, width: int, role: LayerRole, cfg: ModelConfig, forms: _Forms):
    """`Published` of masked scores [B, entries], its masks as wide as a table of `width` entries."""
    picked = Published(
        selection_TxK=select_topk(scores, cfg.index_topk) if forms.lists else None,
        selected_TxE=_widen(topk_mask(scores, cfg.index_topk), width) if forms.masks else None,
    )
    if not role.builds_candidates:
        return picked
    ranks, blocks = block_ranks(scores, visible, cfg.candidate_block_size), -(-width // cfg.candidate_block_size)
    if forms.reads_pool:
        return picked._replace(candidates_TxC=select_topk(ranks, cfg.candidate_topk_blocks))
    listed = select_topk(ranks, cfg.candidate_topk_blocks) if forms.scores else None
    return picked._replace(candidates_TxC=listed, pool_TxB=_widen(topk_mask(ranks, cfg.candidate_topk_blocks), blocks))


def selection_list(published: Published, cfg: ModelConfig) -> jax.Array:
    """The selection as a list: int32[T, index_topk]. Made from the mask where more rows of the step read densely."""
    given = published.selection_TxK
    return listed(published.selected_TxE, cfg.index_topk) if given is None else given


def pool_list(published: Published, cfg: ModelConfig) -> jax.Array:
    """The candidate blocks as a list: int32[T, candidate_topk_blocks]; see `selection_list`."""
    given = published.candidates_TxC
    return listed(published.pool_TxB, cfg.candidate_topk_blocks) if given is None else given


def _in_pool(published: Published, row: jax.Array, entries: int, cfg: ModelConfig) -> jax.Array:
    """bool[B, entries]: whether an entry lies in one of its query's candidate blocks."""
    if published.pool_TxB is None:  # given as a list from outside the step
        return block_mask(published.candidates_TxC[row], entries, cfg.candidate_block_size)
    return jnp.repeat(published.pool_TxB[row], cfg.candidate_block_size, axis=1)[:, :entries]


def _widen(mask: jax.Array, width: int) -> jax.Array:
    return jnp.pad(mask, ((0, 0), (0, width - mask.shape[1])))


def _table_scores(q, weights, pages, table_row, member: Member, cfg: ModelConfig) -> jax.Array:
    """Scores of every entry of one block table: float32[B, P * rows_per_page], keys unpacked chunk by chunk."""
    per_page = 4 * member.rows_per_page * (q.shape[0] * (cfg.index_n_heads + 1) + 2 * member.width)
    num_pages = table_row.shape[0]
    chunk = max(1, min(num_pages, cfg.scratch_bytes // per_page))

    def one(chunk_pages: jax.Array) -> jax.Array:
        keys = unpack_member(member, read_bytes(pages, *member_address(member, chunk_pages)))
        return index_scores(q, weights, keys.astype(q.dtype), cfg.score_dtype)

    if chunk == num_pages:
        return one(table_row)
    chunks = -(-num_pages // chunk)
    padded = jnp.pad(table_row, (0, chunks * chunk - num_pages), constant_values=-1).reshape(chunks, chunk)
    scores = jnp.moveaxis(lax.map(one, padded), 0, 1)
    return scores.reshape(q.shape[0], -1)[:, : num_pages * member.rows_per_page]


def _select_in_pool(q, weights, blocks, visible, pages, table_row, member: Member, cfg: ModelConfig) -> jax.Array:
    """Top-k among the entries of the candidate blocks only; reads just those keys."""
    entries = block_entries(blocks, cfg.candidate_block_size)
    entries = jnp.where(entries < visible[:, None], entries, -1)
    page, offset = entry_address(member, table_row[None], 0, entries)
    keys = read_rows(pages, page, offset, member.format, member.width)
    scores = index_scores(q, weights, keys.astype(q.dtype), cfg.score_dtype)
    picked = select_topk(jnp.where(entries >= 0, scores, -jnp.inf), cfg.index_topk)
    return jnp.where(picked >= 0, jnp.take_along_axis(entries, jnp.maximum(picked, 0), axis=-1), -1)


def _stale_scores(scores, q, weights, positions, start, pages, table_row, role: LayerRole, cfg: ModelConfig):
    """Replaces the scores of decode rows with an open group by those against the last published foreign keys.

    The released code refreshes one shared key slot only when a group completes (see decisions.md).
    """
    width = scores.shape[1]
    undecided = (start > 0) & ((positions + 1) % role.ratio != 0)
    for owner, condition in _publishers(role, positions, cfg):
        member = cache_layout(cfg).member(owner, "index")
        foreign = _table_scores(q, weights, pages, table_row, member, cfg)[:, :width]
        foreign = jnp.pad(foreign, ((0, 0), (0, width - foreign.shape[1])), constant_values=-jnp.inf)
        take = undecided & condition
        scores = jnp.where(take[:, None], foreign, scores)
        undecided = undecided & ~condition
    return scores


def _publishers(role: LayerRole, positions: jax.Array, cfg: ModelConfig):
    """(owner layer, whether it published) from the most recent publisher backwards: this token, then earlier ones."""
    owners = kv_owners(cfg)
    for owner in reversed([o for o in owners if o.layer < role.kv_source]):
        yield owner.layer, (positions + 1) % owner.ratio == 0
    for back in range(1, max(o.ratio for o in owners) + 1):
        for owner in reversed(owners):
            yield owner.layer, (positions + 1 - back) % owner.ratio == 0
