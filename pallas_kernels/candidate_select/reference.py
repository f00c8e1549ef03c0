"""The contract of `candidate_select` in plain jnp, by a full sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.topk_select import reference


def candidate_select(block_scores: jax.Array, visible: jax.Array, *, block_size: int, topk_blocks: int) -> jax.Array:
    """Numbers of the best blocks, ascending: [T, NB], visible [T] -> int32[T, topk_blocks], -1 padding.

    The block of the newest visible entry is pinned and counts among the topk_blocks; -inf and NaN are dropped, +inf
    counts as the largest finite score; of equal scores the lowest block wins.
    """
    finite = jnp.minimum(block_scores, jnp.finfo(jnp.float32).max)  # keeps NaN
    newest = jnp.where(visible > 0, (visible - 1) // block_size, -1)
    pinned = jnp.arange(block_scores.shape[1]) == newest[:, None]
    return reference.topk_select(jnp.where(pinned, jnp.inf, finite), topk_blocks)
