"""Attention over rows picked per query, one latent as key and value, one softmax over all sources (model.md §2.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsflash_jax.ops.rows import read_rows
from dsflash_jax.numerics.formats import KVFormat
from dsflash_jax.ops.linear import einsum_f32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSource:
    """Packed rows picked per query from one arena. page_TxK, offset_TxK: int32; page -1 = no row."""

    arena: jax.Array  # uint8[P, page_bytes]
    page_TxK: jax.Array
    offset_TxK: jax.Array
    format: KVFormat = dataclasses.field(metadata=dict(static=True))
    width: int = dataclasses.field(metadata=dict(static=True))

    def gather(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(keys float32[t, K, D], valid bool[t, K]) for the query rows listed in `rows` [t]."""
        page = self.page_TxK[rows]
        return read_rows(self.arena, page, self.offset_TxK[rows], self.format, self.width), page >= 0

    @property
    def picks(self) -> int:
        """Keys per query, static."""
        return self.page_TxK.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableSource:
    """Rows already unpacked into one table, picked per query: worth it when rows are read more than once."""

    table_NxD: jax.Array
    index_TxK: jax.Array  # int32, -1 = no row

    def gather(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `RowSource.gather`."""
        index = self.index_TxK[rows]
        valid = index >= 0
        return jnp.where(valid[..., None], self.table_NxD[jnp.maximum(index, 0)], 0.0), valid

    @property
    def picks(self) -> int:
        """Keys per query, static."""
        return self.index_TxK.shape[1]


def attend(
    q: jax.Array, gathered: Sequence[tuple[jax.Array, jax.Array]], sink: jax.Array, scale: float
) -> jax.Array:
    """Softmax attention with sink over gathered keys of several sources: q [t, H, D] -> [t, H, D], q's dtype.

    `gathered` holds (keys [t, K, D], valid [t, K]) per source; one softmax spans them all. The sink [H] adds exp(sink)
    to the denominator only. A query without a valid key returns exactly zero. In bfloat16 the probabilities are
    rounded before they meet the values; the denominator is not.
    """
    keys = [k.astype(q.dtype) for k, _ in gathered]
    logits = jnp.concatenate([einsum_f32("thd,tkd->thk", q, k) for k in keys], axis=-1) * scale
    valid = jnp.concatenate([v for _, v in gathered], axis=-1)[:, None, :]
    weights, denominator = sink_softmax(logits, valid, sink[:, None])
    bounds = np.cumsum([k.shape[1] for k in keys])[:-1]
    parts = jnp.split(weights.astype(q.dtype), bounds, axis=-1)
    out = sum(einsum_f32("thk,tkd->thd", w, k) for w, k in zip(parts, keys, strict=True))
    return (out / denominator).astype(q.dtype)


def sink_softmax(logits: jax.Array, valid: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unnormalised weights exp(l - m) over the last axis (0 where invalid) and their denominator including the sink.

    The running maximum is over valid logits, floored at -1e30. The floor alone would give a fully masked row the mean
    of its masked values, so weights are masked too; such a row's denominator is 1 and its output 0.
    """
    top = jnp.maximum(jnp.max(jnp.where(valid, logits, -jnp.inf), axis=-1, keepdims=True), -1e30)
    top = lax.stop_gradient(top)
    weights = jnp.where(valid, jnp.exp(jnp.where(valid, logits - top, 0.0)), 0.0)
    any_valid = jnp.any(valid, axis=-1, keepdims=True)
    # For a row without keys exp(sink - top) would overflow; it is not used there.
    extra = jnp.exp(jnp.where(any_valid, sink - top, 0.0))
    return weights, jnp.sum(weights, axis=-1, keepdims=True) + extra


def sparse_attention(
    q_TxHxD: jax.Array,
    sources: Sequence[RowSource | TableSource],
    sink_H: jax.Array,
    *,
    scale: float,
    scratch_bytes: int,
) -> jax.Array:
    """Attention of many heads over the rows of all sources: [T, H, D].

    Query rows are taken in tiles so that gathered keys and logits of one tile stay under `scratch_bytes`.
    """
    rows, heads, width = q_TxHxD.shape
    picks = sum(source.picks for source in sources)
    tile = max(1, min(rows, scratch_bytes // (4 * picks * (width + 2 * heads))))

    def one(index: jax.Array) -> jax.Array:
        return attend(q_TxHxD[index], [source.gather(index) for source in sources], sink_H, scale)

    if tile >= rows:
        return one(jnp.arange(rows))
    tiles = -(-rows // tile)
    index = jnp.minimum(jnp.arange(tiles * tile).reshape(tiles, tile), rows - 1)
    return lax.map(one, index).reshape(tiles * tile, heads, width)[:rows]
