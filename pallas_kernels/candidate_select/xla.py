"""`candidate_select` by `lax.top_k` of the scores with the newest block raised to +inf."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.topk_select import xla


def newest_block(visible: jax.Array, block_size: int) -> jax.Array:
    """Block of the newest visible entry, -1 where none is visible: int32 as `visible`."""
    return jnp.where(visible > 0, (visible - 1) // block_size, -1)


def candidate_select(block_scores: jax.Array, visible: jax.Array, *, block_size: int, topk_blocks: int) -> jax.Array:
    """As `reference.candidate_select`."""
    return xla.topk_select(block_ranks(block_scores, visible, block_size), topk_blocks)


def block_ranks(block_scores: jax.Array, visible: jax.Array, block_size: int) -> jax.Array:
    """What blocks are chosen by: their scores [T, NB] with the newest block above all others."""
    # A legal score of +inf ranks behind the pin, whose block would otherwise lose a tie to lower ones.
    best = jnp.minimum(xla.canonical(block_scores), jnp.finfo(jnp.float32).max)
    pinned = jnp.arange(best.shape[1]) == newest_block(visible, block_size)[:, None]
    return jnp.where(pinned, jnp.inf, best)
