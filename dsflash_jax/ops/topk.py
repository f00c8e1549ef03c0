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


def topk_mask(scores: jax.Array, k: int) -> jax.Array:
    """bool mask of what `select_topk` selects, by k maximum passes: faster than sorting for small k, and dense."""
    width = scores.shape[-1]
    index = jnp.arange(width)

    def one(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, mask = state
        best = jnp.max(left, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(left == best, index, width), axis=-1, keepdims=True)
        hit = (index == first) & (best > -jnp.inf)
        return jnp.where(hit, -jnp.inf, left), mask | hit

    start = (canonical(scores), jnp.zeros(scores.shape, bool))
    return lax.fori_loop(0, min(k, width), one, start)[1]
