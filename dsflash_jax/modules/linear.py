"""Parameter holders shared by all modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsflash_jax.ops.linear import linear, linear_f32
from dsflash_jax.ops.norms import rms_norm


class Linear(nnx.Module):
    """y = x W^T with W [out, in], as released; no bias."""

    def __init__(self, in_width: int, out_width: int, *, rngs: nnx.Rngs, gain: float = 1.0, dtype=jnp.float32):
        std = gain * in_width**-0.5
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (out_width, in_width), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out] in x's dtype."""
        return linear(x, self.weight[...])

    def f32(self, x: jax.Array) -> jax.Array:
        """The product in float32: operand and weight are upcast first."""
        return linear_f32(x.astype(jnp.float32), self.weight[...].astype(jnp.float32))


class RMSNorm(nnx.Module):
    """RMS norm with weight [width]; eps is the config's."""

    def __init__(self, width: int, eps: float):
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis; result in x's dtype."""
        return rms_norm(x, self.weight[...], self.eps)


class Buffer(nnx.Variable):
    """A constant array that is not trained (RoPE tables)."""
