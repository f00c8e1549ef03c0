"""The contract of `candidate_scores` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.formats import PagedRows
from pallas_kernels.indexer_scores.reference import key_rows, scores_of


def candidate_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    blocks: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    score_dtype: str = "float32",
) -> jax.Array:
    """Index scores of the entries of the listed blocks; -inf of absent blocks (-1), entries not visible, no page.

    q [T, H, D], weights [T, H], keys.seq [T], blocks [T, C], visible [T] -> float32[T, C * block_size].
    """
    entry = (blocks[..., None] * block_size + jnp.arange(block_size)).reshape(blocks.shape[0], -1)
    page, column = keys.address(entry)
    scores = scores_of(q, weights, key_rows(keys, page, column).astype(q.dtype), score_dtype)
    return jnp.where((entry >= 0) & (entry < visible[:, None]) & (page >= 0), scores, -jnp.inf)
