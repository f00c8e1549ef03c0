"""Deterministic top-k selection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def canonical(scores: jax.Array) -> jax.Array:
    """+0 for both zeros and -inf for NaN: `lax.top_k` ranks +0 over -0, and NaN by its sign bit."""
    return jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0.0, scores))


def select_topk(scores: jax.Array, k: int) -> jax.Array:
    """Indices of the k best scores of the last axis, ascending, padded with -1: [..., E] -> int32[..., k].

    Equal scores: the lowest index wins. -inf and NaN are never selected. k may exceed E.
    """
    width = scores.shape[-1]
    values, index = lax.top_k(canonical(scores), min(k, width))
    index = jnp.sort(jnp.where(values > -jnp.inf, index, width), axis=-1)
    index = jnp.where(index < width, index, -1)
    if k > width:
        index = jnp.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, k - width)], constant_values=-1)
    return index
