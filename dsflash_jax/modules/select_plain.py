"""Selecting in plain XLA, as is cheap on a CPU: tile by tile, on the part of the table that a tile sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.cache.addressing import paged_rows
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.select_forms import Forms, Query, table_entries
from dsflash_jax.modules.step_index import Tiles
from dsflash_jax.ops.compressor import visible_entries
from dsflash_jax.ops.indexer import block_mask, pool_entries
from dsflash_jax.ops.topk import listed, topk_mask
from dsflash_jax.roles import LayerRole, kv_owners
from dsflash_jax.types import GLOBAL_GROUP, Published, StepInfo
from pallas_kernels.candidate_scores.api import candidate_scores
from pallas_kernels.candidate_select.xla import block_ranks
from pallas_kernels.common.formats import PagedRows
from pallas_kernels.common.prefixes import prefix_sizes, run_prefix
from pallas_kernels.indexer_scores.api import indexer_scores
from pallas_kernels.indexer_scores.xla import block_maxima
from pallas_kernels.topk_select.api import topk_select

_XLA = {"implementation": "xla"}


def select_plain(
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
    """(what the layer publishes, masked scores float32[T, E] where they are captured)."""
    one = functools.partial(_select_tile, query, published, step, pages, role, cfg, forms)
    if tiles.seq.shape[0] == 1:
        results = jax.tree.map(lambda x: x[None], one((tiles.rows[0], tiles.seq[0])))
    else:
        results = lax.map(one, (tiles.rows, tiles.seq))
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[tiles.place], results)
    live = (step.positions >= 0)[:, None]
    picked, scores = jax.tree.map(lambda x: jnp.where(live, x, False if x.dtype == bool else -1), flat)
    if picked.selection_TxK is None:
        picked = picked._replace(selection_TxK=listed(picked.selected_TxE, cfg.index_topk))
    if role.builds_candidates and picked.candidates_TxC is None:
        picked = picked._replace(candidates_TxC=listed(picked.pool_TxB, cfg.candidate_topk_blocks))
    return picked, scores


def _select_tile(query, published, step, pages, role, cfg, forms: Forms, tile) -> tuple[Published, jax.Array | None]:
    """(the tile's part of what is published, masked scores where they are captured)."""
    rows, seq = tile
    row = jnp.maximum(rows, 0)
    positions = jnp.where(rows >= 0, step.positions[row], -1)
    visible = visible_entries(positions, role.ratio)
    q, weights = query.q[row], query.weights[row]
    member = cache_layout(cfg).member(role.kv_source, "index")
    keys = paged_rows(member, pages, step.block_tables[GLOBAL_GROUP], seq[None])
    if role.reads_candidates and forms.reads_pool:
        return Published(_select_in_pool(q, weights, keys, published.candidates_TxC[row], visible, cfg)), None
    width = table_entries(step, member)

    def run(entries: int) -> tuple[Published, jax.Array | None]:
        scores = _table_scores(q, weights, keys, visible, entries, cfg)
        if cfg.stale_index_keys:
            stale = _stale_scores(scores, q, weights, positions, step.start[seq], keys, role, cfg)
            scores = jnp.where(jnp.arange(entries) < visible[:, None], stale, -jnp.inf)
        if role.reads_candidates:
            scores = jnp.where(_in_pool(published, row, entries, cfg), scores, -jnp.inf)
        return _pick(scores, visible, width, role, cfg, forms), scores if forms.scores else None

    sizes = [width] if forms.scores else prefix_sizes(width, member.rows_per_page)
    return run_prefix(jnp.max(visible), sizes, run)


def _table_scores(q, weights, keys: PagedRows, visible, entries: int, cfg: ModelConfig) -> jax.Array:
    """Scores of the first `entries` entries of one block table, -inf where not visible: float32[B, entries]."""
    table = keys.table[:, : entries // keys.layout.rows_per_page]
    keys = PagedRows(keys.arena, table, keys.seq, keys.layout)
    options = {"score_dtype": cfg.score_dtype, "scratch_bytes": cfg.scratch_bytes, **_XLA}
    return indexer_scores(q[None], weights[None], keys, visible[None], **options)[0]


def _pick(scores: jax.Array, visible: jax.Array, width: int, role: LayerRole, cfg: ModelConfig, forms: Forms):
    """`Published` of masked scores [B, entries], its masks as wide as a table of `width` entries."""
    if forms.masks:
        picked = Published(selected_TxE=_widen(topk_mask(scores, cfg.index_topk), width))
    else:
        picked = Published(topk_select(scores, cfg.index_topk, **_XLA))
    if not role.builds_candidates:
        return picked
    size, count = cfg.candidate_block_size, cfg.candidate_topk_blocks
    ranks = block_ranks(block_maxima(scores, size), visible, size)
    if forms.reads_pool:
        return picked._replace(candidates_TxC=topk_select(ranks, count, **_XLA))
    return picked._replace(pool_TxB=_widen(topk_mask(ranks, count), -(-width // size)))


def _in_pool(published: Published, row: jax.Array, entries: int, cfg: ModelConfig) -> jax.Array:
    """bool[B, entries]: whether an entry lies in one of its query's candidate blocks."""
    if published.pool_TxB is None:  # given as a list from outside the step
        return block_mask(published.candidates_TxC[row], entries, cfg.candidate_block_size)
    return jnp.repeat(published.pool_TxB[row], cfg.candidate_block_size, axis=1)[:, :entries]


def _widen(mask: jax.Array, width: int) -> jax.Array:
    return jnp.pad(mask, ((0, 0), (0, width - mask.shape[1])))


def _select_in_pool(q, weights, keys: PagedRows, blocks, visible, cfg: ModelConfig) -> jax.Array:
    """Top-k among the entries of the candidate blocks only; reads just those keys."""
    keys = PagedRows(keys.arena, keys.table, jnp.broadcast_to(keys.seq, visible.shape), keys.layout)
    size = cfg.candidate_block_size
    options = {"score_dtype": cfg.score_dtype, "scratch_bytes": cfg.scratch_bytes, **_XLA}
    scores = candidate_scores(q, weights, keys, blocks, visible, block_size=size, **options)
    return pool_entries(topk_select(scores, cfg.index_topk, **_XLA), blocks, size)


def _stale_scores(scores, q, weights, positions, start, keys: PagedRows, role: LayerRole, cfg: ModelConfig):
    """Replaces the scores of decode rows with an open group by those against the last published foreign keys.

    The released code refreshes one shared key slot only when a group completes (see decisions.md).
    """
    width = scores.shape[1]
    undecided = (start > 0) & ((positions + 1) % role.ratio != 0)
    for owner, condition in _publishers(role, positions, cfg):
        member = cache_layout(cfg).member(owner, "index")
        theirs = paged_rows(member, keys.arena, keys.table, keys.seq)
        everything = jnp.full(positions.shape, theirs.rows_per_seq, jnp.int32)
        foreign = _table_scores(q, weights, theirs, everything, theirs.rows_per_seq, cfg)[:, :width]
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
