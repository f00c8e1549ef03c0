"""Selecting with the GPU kernels: scores, block maxima and lists of all rows at once, or of groups under the budget.

Where a candidate source is long enough no matrix of its scores exists: its top-k entries lie in the best blocks, so
maxima choose the blocks, and only the entries of those are scored for the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.cache.addressing import paged_rows
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.select_forms import Forms, Query
from dsflash_jax.modules.step_index import Tiles
from dsflash_jax.ops.compressor import visible_entries
from dsflash_jax.ops.indexer import block_entries, block_mask, pool_entries
from dsflash_jax.roles import LayerRole
from dsflash_jax.types import GLOBAL_GROUP, Published, StepInfo
from pallas_kernels.candidate_scores.api import candidate_scores
from pallas_kernels.candidate_select.api import candidate_select
from pallas_kernels.common.formats import PagedRows
from pallas_kernels.indexer_scores.api import indexer_scores
from pallas_kernels.topk_select.api import topk_select


def select_kernels(
    query: Query,
    published: Published,
    step: StepInfo,
    tiles: Tiles,
    pages: jax.Array,
    *,
    role: LayerRole,
    cfg: ModelConfig,
    forms: Forms,
) -> tuple[Published, jax.Array | None]:
    """As `select_plain`."""
    member = cache_layout(cfg).member(role.kv_source, "index")
    keys = paged_rows(member, pages, step.block_tables[GLOBAL_GROUP], step.row_to_seq)
    visible = visible_entries(step.positions, role.ratio)
    if role.reads_candidates:
        picked, scores = _reindex(query, published.candidates_TxC, keys, visible, cfg, forms)
    else:
        picked, scores = _fresh(query, tiles, keys, visible, role, cfg, forms)
    live = (step.positions >= 0)[:, None]  # padding rows lie in no tile: what stands at their place is another row's
    picked = jax.tree.map(lambda lists: jnp.where(live, lists, -1), picked)
    if forms.masks:
        picked = picked._replace(selected_TxE=block_mask(picked.selection_TxK, keys.rows_per_seq, 1))
    if role.builds_candidates and not forms.reads_pool:
        blocks = -(-keys.rows_per_seq // cfg.candidate_block_size)
        picked = picked._replace(pool_TxB=block_mask(picked.candidates_TxC, blocks, 1))
    return picked, scores


def _reindex(query: Query, blocks, keys: PagedRows, visible, cfg: ModelConfig, forms: Forms):
    """The list of a Reindex layer, from the entries of its rows' candidate blocks."""
    blocks = blocks[:, : -(-keys.rows_per_seq // cfg.candidate_block_size)]  # ascending: behind these there is none

    def some(q, weights, seq, blocks, visible):
        return _in_blocks(q, weights, _of(keys, seq), blocks, visible, cfg, forms)

    group = cfg.scratch_bytes // (4 * blocks.shape[1] * cfg.candidate_block_size)
    lists, scores = _in_groups(some, group, (*query, keys.seq, blocks, visible))
    return Published(lists), scores


def _in_blocks(q, weights, keys: PagedRows, blocks, visible, cfg: ModelConfig, forms: Forms):
    """(top-k among the entries of the blocks, scores of the whole table with -inf elsewhere where captured)."""
    size, options = cfg.candidate_block_size, cfg.kernels.options
    scores = candidate_scores(
        q, weights, keys, blocks, visible, block_size=size, scratch_bytes=cfg.scratch_bytes, **options
    )
    lists = pool_entries(topk_select(scores, cfg.index_topk, **options), blocks, size)
    if not forms.scores:
        return lists, None
    entry = block_entries(blocks, size)
    entry = jnp.where(entry < 0, keys.rows_per_seq, entry)
    table = jnp.full((q.shape[0], keys.rows_per_seq), -jnp.inf)
    return lists, table.at[jnp.arange(q.shape[0])[:, None], entry].set(scores, mode="drop")


def _fresh(query: Query, tiles: Tiles, keys: PagedRows, visible, role: LayerRole, cfg: ModelConfig, forms: Forms):
    """Lists from all entries, and the candidate blocks of their source."""

    def some(rows, seq):
        row = jnp.maximum(rows, 0)
        seen = jnp.where(rows >= 0, visible[row], 0)
        return _score_tiles(query.q[row], query.weights[row], _of(keys, seq), seen, role, cfg, forms)

    group = cfg.scratch_bytes // (4 * tiles.rows.shape[1] * keys.rows_per_seq)
    results = _in_groups(some, group, (tiles.rows, tiles.seq))
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[tiles.place], results)


def _score_tiles(q, weights, keys: PagedRows, visible, role: LayerRole, cfg: ModelConfig, forms: Forms):
    """Lists and blocks of tiles q [N, B, H, D]: (`Published` of [N, B, ...], scores [N, B, E] where captured)."""
    size, options = cfg.candidate_block_size, cfg.kernels.options
    tiles, rows = visible.shape
    score = functools.partial(indexer_scores, q, weights, keys, visible, scratch_bytes=cfg.scratch_bytes, **options)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(tiles * rows, *x.shape[2:])

    def select_blocks(maxima: jax.Array) -> jax.Array:
        return candidate_select(
            flat(maxima), flat(visible), block_size=size, topk_blocks=cfg.candidate_topk_blocks, **options
        )

    # A block that is ranked before that of a top-k entry holds a better one itself, or is the pinned newest.
    if role.builds_candidates and not forms.scores and cfg.candidate_topk_blocks > cfg.index_topk:
        blocks = select_blocks(score(block_size=size, blocks_only=True))
        near = blocks[:, : -(-keys.rows_per_seq // size)]
        each = _of(keys, jnp.repeat(keys.seq, rows))
        lists, _ = _in_blocks(flat(q), flat(weights), each, near, flat(visible), cfg, forms)
        picked, scores = Published(lists, blocks), None
    elif role.builds_candidates:
        scores, maxima = score(block_size=size)
        picked = Published(topk_select(flat(scores), cfg.index_topk, **options), select_blocks(maxima))
    else:
        scores = score()
        picked = Published(topk_select(flat(scores), cfg.index_topk, **options))
    picked = jax.tree.map(lambda x: x.reshape(tiles, rows, -1), picked)
    return picked, scores if forms.scores else None


def _of(keys: PagedRows, seq: jax.Array) -> PagedRows:
    """The same rows for queries (or tiles) of the sequences `seq`."""
    return PagedRows(keys.arena, keys.table, seq, keys.layout)


def _in_groups(run: Callable, size: int, arrays: tuple[jax.Array, ...]):
    """run(*arrays), at most `size` of the leading axis at a time."""
    total, size = arrays[0].shape[0], max(1, size)
    if size >= total:
        return run(*arrays)
    groups = -(-total // size)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, groups * size - total), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(groups, size, *x.shape[1:])

    results = lax.map(lambda part: run(*part), tuple(map(split, arrays)))
    return jax.tree.map(lambda x: x.reshape(groups * size, *x.shape[2:])[:total], results)
