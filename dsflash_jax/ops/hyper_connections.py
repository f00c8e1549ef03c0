"""Single-pass hyper-connections: coefficients with Sinkhorn, collapse and expansion (report §2.4.1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.ops.linear import linear_f32


class Mix(NamedTuple):
    """Coefficients of one sub-layer, float32. `comb` is indexed [source stream, destination stream]."""

    pre: jax.Array  # [..., hc]
    post: jax.Array  # [..., hc]
    comb: jax.Array  # [..., hc, hc]


def coefficients(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, *, norm_eps: float, hc_eps: float, iters: int
) -> Mix:
    """Mixing coefficients from streams [..., hc, d]; fn [(2 + hc) * hc, hc * d], base [(2 + hc) * hc], scale [3].

    The RMS factor multiplies after the product with `fn`, over the flattened hc * d vector, all in float32.
    """
    hc = streams.shape[-2]
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    rms = lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
    mixes = linear_f32(flat, fn) * rms
    return split_mixes(mixes, base, scale, hc=hc, eps=hc_eps, iters=iters)


def split_mixes(mixes: jax.Array, base: jax.Array, scale: jax.Array, *, hc: int, eps: float, iters: int) -> Mix:
    """Splits [..., (2 + hc) * hc] into pre | post | comb (row-major) and applies their non-linearities."""
    pre = jax.nn.sigmoid(mixes[..., :hc] * scale[0] + base[:hc]) + eps
    post = 2 * jax.nn.sigmoid(mixes[..., hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = mixes[..., 2 * hc :] * scale[2] + base[2 * hc :]
    return Mix(pre, post, sinkhorn(comb.reshape(*comb.shape[:-1], hc, hc), eps=eps, iters=iters))


def sinkhorn(logits: jax.Array, *, eps: float, iters: int) -> jax.Array:
    """Doubly stochastic matrices from logits [..., n, n]: softmax rows, then alternate column and row normalisation.

    Starts and ends with columns: softmax + eps, columns, then (iters - 1) times rows, columns.
    """
    # Matrix axes lead, so that the sums are element-wise over the (long) token axis; a loop, not 2 * iters kernels.
    comb = jnp.moveaxis(jax.nn.softmax(logits, axis=-1) + eps, (-2, -1), (0, 1))
    comb = comb / (jnp.sum(comb, axis=0, keepdims=True) + eps)

    def body(_: int, comb: jax.Array) -> jax.Array:
        comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)
        return comb / (jnp.sum(comb, axis=0, keepdims=True) + eps)

    return jnp.moveaxis(lax.fori_loop(0, iters - 1, body, comb), (0, 1), (-2, -1))


def collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """Sum over streams weighted by pre: [..., hc, d] and [..., hc] -> [..., d], float32 sum, streams' dtype."""
    wide = streams.astype(jnp.float32)
    return sum(pre[..., i, None] * wide[..., i, :] for i in range(streams.shape[-2])).astype(streams.dtype)


def expand(streams: jax.Array, sub_out: jax.Array, mix: Mix) -> jax.Array:
    """new[j] = post[j] * sub_out + sum_i comb[i, j] * streams[i]; float32, rounded to the streams' dtype."""
    # A reduction, not a written-out sum: XLA CPU would fuse the latter into the next sub-layer's, once per stream.
    residual = jnp.sum(mix.comb[..., :, :, None] * streams.astype(jnp.float32)[..., :, None, :], axis=-3)
    return (mix.post[..., None] * sub_out.astype(jnp.float32)[..., None, :] + residual).astype(streams.dtype)
