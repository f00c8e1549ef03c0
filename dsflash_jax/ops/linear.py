"""Matrix products at full precision, with one rounding to the compute dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.ops.packed import PackedWeight, packed_linear

Weight = jax.Array | PackedWeight


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., in] times weight [out, in] -> [..., out] in x's dtype; accumulated in float32, rounded once.

    A packed weight also rounds x on its way in: `packed_linear`.
    """
    return linear_f32(x, weight).astype(x.dtype)


def linear_f32(x: jax.Array, weight: Weight) -> jax.Array:
    """As `linear`, but returns the float32 accumulator.

    The highest precision is asked for by name: a GPU would otherwise use TF32 for float32 operands.
    """
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x, weight.astype(x.dtype), dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def einsum_f32(spec: str, *operands: jax.Array) -> jax.Array:
    """Einsum with float32 accumulation at the highest precision."""
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
