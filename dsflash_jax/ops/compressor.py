"""Gated pooling of m raw tokens into one latent (report §2.3; contract.md, Compressor and entries)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pool(values: jax.Array, gate: jax.Array) -> jax.Array:
    """Per-channel softmax of `gate` over the group axis, weighting `values`: [..., m, D] twice -> [..., D], float32."""
    return jnp.sum(jax.nn.softmax(gate.astype(jnp.float32), axis=-2) * values.astype(jnp.float32), axis=-2)


def visible_entries(positions: jax.Array, ratio: int) -> jax.Array:
    """Entries a query at `positions` may see: floor((p + 1) / m); 0 for padding (position -1)."""
    return (positions + 1) // ratio
