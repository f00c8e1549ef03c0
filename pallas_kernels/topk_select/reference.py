"""The contract of `topk_select` in plain jnp, by a full sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def topk_select(scores: jax.Array, k: int) -> jax.Array:
    """Positions of the k largest scores of each row, ascending: [T, N] -> int32[T, k], -1 padding.

    Of equal scores the lowest position wins; +0 equals -0; NaN and -inf are never selected.
    """
    width = scores.shape[-1]
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, scores + 0.0)  # -0 + 0 is +0
    order = jnp.argsort(-ranked, axis=-1, stable=True)[:, :k]
    picked = jnp.take_along_axis(ranked, order, axis=-1) > -jnp.inf
    index = jnp.sort(jnp.where(picked, order, width), axis=-1)
    index = jnp.where(index < width, index, -1).astype(jnp.int32)
    return jnp.pad(index, ((0, 0), (0, k - index.shape[1])), constant_values=-1)
