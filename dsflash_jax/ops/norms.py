"""RMS normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32, rounded once to x's dtype.

    A row of zeros gives zeros. A row whose squares overflow float32 gives NaN, not zeros, so that it is noticed.
    Source: reference numerics; eps 1e-20 is the released `rms_norm_eps`.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    scale = jnp.where(jnp.isinf(mean), jnp.nan, lax.rsqrt(mean + eps))
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)
