"""Softmax attention with a sink over keys that were gathered already, one latent as key and value."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def attend(q: jax.Array, gathered: Sequence[tuple[jax.Array, jax.Array]], sink: jax.Array, scale: float) -> jax.Array:
    """Attention over the keys of several sets in one softmax: q [t, H, D] -> [t, H, D], q's dtype.

    `gathered` holds per set keys [t, K, D] (or [K, D], shared by all queries) and count [t, K]: bool, or float32 where
    a key may count more than once. The sink [H] adds exp(sink) to the denominator only. A query without a key returns
    exactly zero. In bfloat16 the probabilities are rounded before they meet the values; the denominator is not.
    """
    keys = [k.astype(q.dtype) for k, _ in gathered]
    specs = ["thd,tkd->thk" if k.ndim == 3 else "thd,kd->thk" for k in keys]
    logits = [_einsum_f32(spec, q, k) for spec, k in zip(specs, keys, strict=True)]
    logits = jnp.concatenate(logits, axis=-1) * scale
    count = jnp.concatenate(_one_dtype([c for _, c in gathered]), axis=-1)[:, None, :]
    weights, denominator = sink_softmax(logits, count, sink[:, None])
    bounds = np.cumsum([k.shape[-2] for k in keys])[:-1]
    parts = jnp.split(weights.astype(q.dtype), bounds, axis=-1)
    specs = ["thk,tkd->thd" if k.ndim == 3 else "thk,kd->thd" for k in keys]
    out = sum(_einsum_f32(spec, w, k) for spec, w, k in zip(specs, parts, keys, strict=True))
    return (out / denominator).astype(q.dtype)


def sink_softmax(logits: jax.Array, count: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unnormalised weights count * exp(l - m) over the last axis and their denominator including the sink.

    count: bool (valid or not) or float32. The running maximum is over counted logits, floored at -1e30. The floor alone
    would give a fully masked row the mean of its masked values, so weights are masked too; such a row's denominator is
    1 and its output 0.
    """
    valid = count.astype(bool)
    masked = jnp.where(valid, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), -1e30))
    weights = jnp.exp(masked - top)
    if count.dtype != jnp.bool_:
        weights = weights * count
    any_valid = jnp.any(valid, axis=-1, keepdims=True)
    # For a row without keys exp(sink - top) would overflow; it is not used there.
    extra = jnp.exp(jnp.where(any_valid, sink - top, 0.0))
    return weights, jnp.sum(weights, axis=-1, keepdims=True) + extra


def _one_dtype(counts: list[jax.Array]) -> list[jax.Array]:
    """bool if all are, else float32."""
    if all(c.dtype == jnp.bool_ for c in counts):
        return counts
    return [c.astype(jnp.float32) for c in counts]


def _einsum_f32(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
