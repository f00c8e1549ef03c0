"""The write of n-gram memory into the residual streams: a gate per stream, one value for all (report §2.4.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST_SQUARE = 1e-6  # under the root of the gate, which has no slope at 0 otherwise


def signed_sqrt(x: jax.Array) -> jax.Array:
    """sqrt(max(|x|, 1e-6)) with the sign of x, -0 included; the gradient is finite everywhere."""
    root = jnp.sqrt(jnp.maximum(jnp.abs(x), SMALLEST_SQUARE))
    return jnp.where(jnp.signbit(x), -root, root)


def gates(streams: jax.Array, keys: jax.Array, q_weight: jax.Array, k_weight: jax.Array, *, eps: float) -> jax.Array:
    """Float32 gates [..., hc] from streams and keys [..., hc, d], and weights [hc, d].

    Both sides are RMS-normalised with `eps` and weighted; sigmoid of the signed root of their scaled product.
    """
    stream, key = streams.astype(jnp.float32), keys.astype(jnp.float32)
    weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    product = jnp.sum(stream * weight * key, axis=-1)
    for side in (stream, key):
        product = product * lax.rsqrt(jnp.mean(side * side, axis=-1) + eps)
    return jax.nn.sigmoid(signed_sqrt(product * streams.shape[-1] ** -0.5))


def write_memory(streams: jax.Array, gate: jax.Array, value: jax.Array) -> jax.Array:
    """Streams [..., hc, d] plus gate [..., hc] times value [..., d]; float32, rounded to the streams' dtype."""
    added = gate[..., None] * value.astype(jnp.float32)[..., None, :]
    return (streams.astype(jnp.float32) + added).astype(streams.dtype)
