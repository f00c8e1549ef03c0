"""Parameter holders shared by all modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsflash_jax.config import BEST_KERNELS, Kernels
from dsflash_jax.ops.linear import Weight, linear, linear_f32
from dsflash_jax.ops.norms import rms_norm
from dsflash_jax.ops.packed import PackedWeight, pack_weight


class Linear(nnx.Module):
    """y = x W^T with W [out, in], as released; no bias.

    `packed`: "" keeps W as floats, "fp8" and "fp4" as the codes and scales of `ops/packed.py`, whose products call what
    `kernels` says.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        dtype=jnp.float32,
        packed: str = "",
        kernels: Kernels = BEST_KERNELS,
    ):
        std = gain * in_width**-0.5
        self.packed, self.kernels = packed, kernels
        hold(self, std * jax.random.normal(rngs.params(), (out_width, in_width), dtype), packed)

    def matrix(self) -> Weight:
        """W as floats or as codes, for the functions of `ops/`."""
        return held(self, self.packed, self.kernels)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out] in x's dtype."""
        return linear(x, self.matrix())

    def f32(self, x: jax.Array) -> jax.Array:
        """The product in float32: operand and weight are upcast first."""
        return linear_f32(x.astype(jnp.float32), self.weight[...].astype(jnp.float32))


def hold(module: nnx.Module, weight: jax.Array, packed: str) -> None:
    """Keeps a float weight [..., out, in] as `module.weight`, packed with its scales as `module.scale`."""
    if not packed:
        module.weight = nnx.Param(weight)
        return
    codes = pack_weight(weight.astype(jnp.float32), packed)
    module.weight, module.scale = nnx.Param(codes.codes), nnx.Param(codes.scale)


def held(module: nnx.Module, packed: str, kernels: Kernels) -> Weight:
    """What `hold` kept. kernels: what products with it call."""
    return PackedWeight(module.weight[...], module.scale[...], packed, kernels) if packed else module.weight[...]


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
