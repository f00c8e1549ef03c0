"""`packed_linear` one block of 32 inputs after the other: no more of the weight is ever unpacked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.codes import decode_e8m0
from pallas_kernels.packed_linear.weights import BLOCK, Kind, in_width, rounded, scale_per_output, values


def packed_linear(x: jax.Array, codes: jax.Array, scale: jax.Array, *expert: jax.Array, kind: Kind) -> jax.Array:
    """As `reference.packed_linear`, the blocks added in their order; groups one after the other."""
    if expert:
        return _grouped(x, codes, scale, *expert, kind=kind)
    out, blocks = codes.shape[0], in_width(codes, kind) // BLOCK
    inputs = rounded(x)
    scales = decode_e8m0(scale_per_output(scale, out, kind).astype(jnp.int32))
    step = codes.shape[1] // blocks

    def add_block(k: jax.Array, total: jax.Array) -> jax.Array:
        weight = values(lax.dynamic_slice_in_dim(codes, k * step, step, axis=1), kind)
        part = lax.dynamic_slice_in_dim(inputs, k * BLOCK, BLOCK, axis=1)
        sums = lax.dot_general(
            part, weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return total + sums * scales[:, k]

    return lax.fori_loop(0, blocks, add_block, jnp.zeros((x.shape[0], out), jnp.float32))


def _grouped(x: jax.Array, codes: jax.Array, scale: jax.Array, expert: jax.Array, *, kind: Kind) -> jax.Array:
    def none(rows: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.zeros((rows.shape[0], codes.shape[1]), jnp.float32)

    def one(rows: jax.Array, number: jax.Array) -> jax.Array:
        weight = (lax.dynamic_index_in_dim(a, number, keepdims=False) for a in (codes, scale))
        return packed_linear(rows, *weight, kind=kind)

    return lax.map(lambda group: lax.cond(group[1] < 0, none, one, *group), (x, expert))
