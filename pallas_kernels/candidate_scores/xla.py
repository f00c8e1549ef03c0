"""`candidate_scores` in plain XLA: a few queries or, of one query, a few blocks at a time."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.formats import PagedRows
from pallas_kernels.indexer_scores.xla import read_keys, scores_of


def candidate_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    blocks: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    score_dtype: str,
    scratch_bytes: int,
) -> jax.Array:
    """As `reference.candidate_scores`; scratch_bytes bounds the unpacked keys and the scores of single heads."""
    queries, heads, width = q.shape
    count = blocks.shape[1]
    fits = max(1, scratch_bytes // (4 * block_size * (heads + 1 + 2 * width)))  # blocks of any query
    one = functools.partial(_score, keys, block_size=block_size, score_dtype=score_dtype)
    if fits < count:
        one = functools.partial(_in_parts, one, fits)
    return _by_queries(one, max(1, fits // count), (q, weights, keys.seq, blocks, visible))


def _by_queries(one, chunk: int, queries: tuple[jax.Array, ...]) -> jax.Array:
    """one(queries), `chunk` of them at a time."""
    total = queries[0].shape[0]
    if chunk >= total:
        return one(queries)
    parts = -(-total // chunk)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, parts * chunk - total), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(parts, chunk, *x.shape[1:])

    scores = lax.map(one, tuple(map(split, queries)))
    return scores.reshape(parts * chunk, -1)[:total]


def _in_parts(one, chunk: int, queries: tuple[jax.Array, ...]) -> jax.Array:
    """one(queries) for `chunk` blocks of each query at a time."""
    q, weights, seq, blocks, visible = queries
    rows, count = blocks.shape
    parts = -(-count // chunk)
    padded = jnp.pad(blocks, ((0, 0), (0, parts * chunk - count)), constant_values=-1)
    split = jnp.moveaxis(padded.reshape(rows, parts, chunk), 1, 0)
    scores = jnp.moveaxis(lax.map(lambda part: one((q, weights, seq, part, visible)), split), 0, 1)
    size = scores.shape[-1] // chunk
    return scores.reshape(rows, -1)[:, : count * size]


def _score(keys: PagedRows, queries: tuple[jax.Array, ...], *, block_size: int, score_dtype: str) -> jax.Array:
    q, weights, seq, blocks, visible = queries
    # Rows that surely share a page are read together: a block of 8 keys is one piece of memory.
    span = math.gcd(block_size, keys.layout.rows_per_page)
    first = blocks[..., None] * block_size + jnp.arange(0, block_size, span)
    page, column = keys.address(first.reshape(blocks.shape[0], -1), seq[:, None])
    rows = read_keys(keys, page.reshape(-1), column.reshape(-1), span)
    entry = (blocks[..., None] * block_size + jnp.arange(block_size)).reshape(blocks.shape[0], -1)
    shown = (entry >= 0) & (entry < visible[:, None]) & jnp.repeat(page >= 0, span, axis=1)
    # Rows that are not shown may hold NaN, which must not meet the products of the others.
    rows = jnp.where(shown[..., None], rows.reshape(*entry.shape, -1), 0).astype(q.dtype)
    return jnp.where(shown, scores_of(q, weights, rows, score_dtype), -jnp.inf)
