"""The contract of `packed_linear` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.codes import decode_e8m0
from pallas_kernels.packed_linear.weights import BLOCK, Kind, rounded, scale_per_output, values


def packed_linear(x: jax.Array, codes: jax.Array, scale: jax.Array, *expert: jax.Array, kind: Kind) -> jax.Array:
    """x [T, in] times a packed weight [out, in]: float32[T, out]. With `expert`: every group times its own.

    x is rounded to E4M3 per 32 values. Products of a block of 32 inputs are summed in float32, scaled and added.
    """
    if expert:
        weights = codes[expert[0]], scale[expert[0]]  # of -1 the last one, whose product does not count
        products = jax.vmap(lambda *group: packed_linear(*group, kind=kind))(x, *weights)
        return jnp.where(expert[0][:, None, None] < 0, 0.0, products)
    blocks = lambda a: a.reshape(a.shape[0], -1, BLOCK)  # noqa: E731
    sums = jnp.einsum("tkb,okb->tok", blocks(rounded(x)), blocks(values(codes, kind)), precision="highest")
    return jnp.sum(sums * decode_e8m0(scale_per_output(scale, codes.shape[0], kind).astype(jnp.int32)), axis=-1)
