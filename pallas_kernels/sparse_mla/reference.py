"""The contract of `sparse_mla` in plain jnp: every listed row gathered, one softmax."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.gather import read_rows
from pallas_kernels.sparse_mla.row_set import RowSet


def sparse_mla(q: jax.Array, row_sets: Sequence[RowSet], sink: jax.Array, *, scale: float) -> jax.Array:
    """q [T, H, D] -> [T, H, D]: softmax over the listed rows of all sets, the rows being keys and values.

    exp(sink[h]) joins the denominator only; a query that lists no row gives exactly 0.
    """
    found = [(s.rows.arena, *s.rows.address(s.index), s.rows.layout) for s in row_sets]
    keys = jnp.concatenate([read_rows(*rows) for rows in found], axis=1).astype(q.dtype)
    valid = jnp.concatenate([page >= 0 for _, page, _, _ in found], axis=1)[:, None, :]
    product = dict(precision="highest", preferred_element_type=jnp.float32)
    logits = jnp.where(valid, jnp.einsum("thd,tkd->thk", q, keys, **product) * scale, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30)
    weights = jnp.exp(logits - top)
    extra = jnp.exp(jnp.where(jnp.any(valid, axis=-1, keepdims=True), sink[:, None] - top, 0.0))
    out = jnp.einsum("thk,tkd->thd", weights.astype(q.dtype), keys, **product)
    return (out / (jnp.sum(weights, axis=-1, keepdims=True) + extra)).astype(q.dtype)
