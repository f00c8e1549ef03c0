"""The contract of `indexer_scores` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.formats import PagedRows
from pallas_kernels.common.unpack import unpack_rows


def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    visible: jax.Array,
    *,
    block_size: int = 0,
    blocks_only: bool = False,
    score_dtype: str = "float32",
):
    """sum_h weights[h] * relu(q[h] . k) of every entry, -inf where it is not visible or has no page, and block maxima.

    q [N, B, H, D], weights [N, B, H], visible [N, B], keys.seq [N] -> scores [N, B, E], maxima [N, B, ceil(E / size)].
    """
    entry = jnp.broadcast_to(jnp.arange(keys.rows_per_seq), (q.shape[0], keys.rows_per_seq))
    page, column = keys.address(entry)
    scores = scores_of(q, weights, key_rows(keys, page, column)[:, None].astype(q.dtype), score_dtype)
    shown = (entry[:, None] < visible[..., None]) & (page >= 0)[:, None]
    scores = jnp.where(shown, scores, -jnp.inf)
    if not block_size:
        return scores
    padding = -scores.shape[-1] % block_size
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)
    ranked = jnp.where(jnp.isnan(padded), -jnp.inf, padded)
    best = jnp.max(ranked.reshape(*scores.shape[:2], -1, block_size), axis=-1)
    return best if blocks_only else (scores, best)


def key_rows(keys: PagedRows, page: jax.Array, column: jax.Array) -> jax.Array:
    """float32[..., D]: the rows that begin at (page, column); any bytes where page is -1."""
    layout = keys.layout
    elements = jnp.arange(layout.row_bytes // keys.unit)
    rows = keys.arena[jnp.maximum(page, 0)[..., None], column[..., None] + elements]
    return rows.astype(jnp.float32) if keys.unit > 1 else unpack_rows(rows, layout.fmt, layout.width)


def scores_of(q: jax.Array, weights: jax.Array, keys: jax.Array, score_dtype: str) -> jax.Array:
    """float32[..., E] of q [..., H, D], weights [..., H] and keys [..., E, D]; leading axes broadcast."""
    dots = jnp.einsum("...hd,...ed->...he", q, keys, precision="highest", preferred_element_type=jnp.float32)
    if score_dtype == "float32":
        return jnp.einsum("...he,...h->...e", jnp.maximum(dots, 0), weights, precision="highest")
    return bf16(jnp.sum(bf16(jnp.maximum(bf16(dots), 0) * weights[..., None]), axis=-2))


def bf16(x: jax.Array) -> jax.Array:
    """float32 rounded to bfloat16 values; not a pair of casts, which XLA may cancel."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
