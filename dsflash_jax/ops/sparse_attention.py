"""Attention over rows of several sources, one latent as key and value, one softmax over all.

Source: report §2.3; contract.md, Attention and selection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsflash_jax.numerics.formats import KVFormat
from dsflash_jax.ops.linear import einsum_f32
from dsflash_jax.ops.prefixes import prefix_sizes, run_prefix
from dsflash_jax.ops.rows import read_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSource:
    """Packed rows picked per query from one arena. page_TxK, offset_TxK: int32; page -1 = no row."""

    arena: jax.Array  # uint8[P, page_bytes]
    page_TxK: jax.Array
    offset_TxK: jax.Array
    format: KVFormat = dataclasses.field(metadata=dict(static=True))
    width: int = dataclasses.field(metadata=dict(static=True))

    def gather(self, rows: jax.Array, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(keys float32[B, K, D], valid bool[B, K]) for the query rows [B] of one tile."""
        del seq
        page = self.page_TxK[rows]
        return read_rows(self.arena, page, self.offset_TxK[rows], self.format, self.width), page >= 0

    def keys(self, tile: int) -> tuple[int, bool]:
        """(keys each query meets in a tile of that many rows, whether each query gathers its own), static."""
        return self.page_TxK.shape[1], True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableSource:
    """Rows already unpacked into one table of N rows per sequence, picked per query by index (-1 = no row).

    Worth it when rows are read more often than there are rows.
    """

    table_SxNxD: jax.Array
    index_TxK: jax.Array

    def gather(self, rows: jax.Array, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `RowSource.gather`."""
        index = self.index_TxK[rows]
        valid = index >= 0
        return jnp.where(valid[..., None], self.table_SxNxD[seq, jnp.maximum(index, 0)], 0.0), valid

    def keys(self, tile: int) -> tuple[int, bool]:
        """As `RowSource.keys`."""
        return self.index_TxK.shape[1], True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedTableSource:
    """Rows already unpacked into one table of N rows per sequence, of which a tile reads the first `size` under a mask.

    One dense product serves all queries of the tile: faster than picking while N is a few times the rows picked.
    """

    table_SxNxD: jax.Array
    selected_TxN: jax.Array  # bool
    size: int = dataclasses.field(metadata=dict(static=True))

    def gather(self, rows: jax.Array, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(keys float32[size, D] shared by the tile, valid bool[B, size])."""
        valid = self.selected_TxN[rows, : self.size]
        # Rows that nobody selects may hold any bytes; 0 * NaN would poison the product.
        seen = jnp.any(valid, axis=0)
        return jnp.where(seen[:, None], self.table_SxNxD[seq, : self.size], 0.0), valid

    def keys(self, tile: int) -> tuple[int, bool]:
        """As `RowSource.keys`."""
        return self.size, False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BandSource:
    """A table in which consecutive queries read overlapping runs of rows: the sliding window.

    Query row t sees the `run` table rows that end at last_T[t], oldest first, from first_T[t] on. Rows of a tile are
    consecutive, so their runs lie in one slice of `run + B - 1` rows.
    """

    table_NxD: jax.Array
    first_T: jax.Array  # int32: lowest visible table row
    last_T: jax.Array  # int32: the query's own row, -1 = padding query
    run: int = dataclasses.field(metadata=dict(static=True))

    def gather(self, rows: jax.Array, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(keys float32[run + B - 1, D] shared by the tile, valid bool[B, run + B - 1])."""
        del seq
        last = self.last_T[rows]
        slot = last[0] - self.run + 1 + jnp.arange(self.run + rows.shape[0] - 1)
        valid = (slot > last[:, None] - self.run) & (slot <= last[:, None]) & (slot >= self.first_T[rows][:, None])
        seen = jnp.any(valid, axis=0)
        keys = self.table_NxD[jnp.clip(slot, 0, self.table_NxD.shape[0] - 1)]
        return jnp.where(seen[:, None], keys, 0.0), valid

    def keys(self, tile: int) -> tuple[int, bool]:
        """As `RowSource.keys`."""
        return self.run + tile - 1, False


Source = RowSource | TableSource | MaskedTableSource | BandSource


def attend(q: jax.Array, gathered: Sequence[tuple[jax.Array, jax.Array]], sink: jax.Array, scale: float) -> jax.Array:
    """Softmax attention with sink over gathered keys of several sources: q [t, H, D] -> [t, H, D], q's dtype.

    `gathered` holds per source keys [t, K, D] (or [K, D], shared by all queries) and valid [t, K]; one softmax spans
    them all. The sink [H] adds exp(sink) to the denominator only. A query without a valid key returns exactly zero.
    In bfloat16 the probabilities are rounded before they meet the values; the denominator is not.
    """
    keys = [k.astype(q.dtype) for k, _ in gathered]
    specs = ["thd,tkd->thk" if k.ndim == 3 else "thd,kd->thk" for k in keys]
    logits = [einsum_f32(spec, q, k) for spec, k in zip(specs, keys, strict=True)]
    logits = jnp.concatenate(logits, axis=-1) * scale
    valid = jnp.concatenate([v for _, v in gathered], axis=-1)[:, None, :]
    weights, denominator = sink_softmax(logits, valid, sink[:, None])
    bounds = np.cumsum([k.shape[-2] for k in keys])[:-1]
    parts = jnp.split(weights.astype(q.dtype), bounds, axis=-1)
    specs = ["thk,tkd->thd" if k.ndim == 3 else "thk,kd->thd" for k in keys]
    out = sum(einsum_f32(spec, w, k) for spec, w, k in zip(specs, parts, keys, strict=True))
    return (out / denominator).astype(q.dtype)


def sink_softmax(logits: jax.Array, valid: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unnormalised weights exp(l - m) over the last axis (0 where invalid) and their denominator including the sink.

    The running maximum is over valid logits, floored at -1e30. The floor alone would give a fully masked row the mean
    of its masked values, so weights are masked too; such a row's denominator is 1 and its output 0.
    """
    masked = jnp.where(valid, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), -1e30))
    weights = jnp.exp(masked - top)
    any_valid = jnp.any(valid, axis=-1, keepdims=True)
    # For a row without keys exp(sink - top) would overflow; it is not used there.
    extra = jnp.exp(jnp.where(any_valid, sink - top, 0.0))
    return weights, jnp.sum(weights, axis=-1, keepdims=True) + extra


def sparse_attention(
    q_TxHxD: jax.Array,
    sources: Sequence[Source],
    sink_H: jax.Array,
    tiles: tuple[jax.Array, jax.Array, jax.Array],
    *,
    scale: float,
    scratch_bytes: int,
) -> jax.Array:
    """Attention of many heads over the rows of all sources: [T, H, D].

    `tiles` = (rows int32[NT, B] with -1 padding, seq int32[NT], place int32[T]): each tile's rows are consecutive rows
    of one sequence and `place` finds row t in the flattened result. Tiles run one after the other; a tile is cut
    further where its gathered keys and logits would exceed `scratch_bytes`.
    """
    rows, seq, place = tiles
    width = rows.shape[1]
    part = width
    while part > 1 and _tile_bytes(q_TxHxD, sources, part) > scratch_bytes:
        part //= 2
    rows, seq = rows.reshape(-1, part), jnp.repeat(seq, width // part)

    def one(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        # Padding repeats the tile's first row: another sequence's selection would read unwritten rows of this one.
        index, owner = jnp.maximum(jnp.where(tile[0] < 0, tile[0][0], tile[0]), 0), tile[1]
        table = next((s for s in sources if isinstance(s, MaskedTableSource)), None)

        def run(size: int) -> jax.Array:
            cut = [dataclasses.replace(s, size=size) if s is table else s for s in sources]
            return attend(q_TxHxD[index], [source.gather(index, owner) for source in cut], sink_H, scale)

        if table is None:
            return run(0)
        used = jnp.any(table.selected_TxN[index], axis=0)
        return run_prefix(jnp.max(jnp.where(used, jnp.arange(table.size) + 1, 0)), prefix_sizes(table.size), run)

    out = one((rows[0], seq[0])) if rows.shape[0] == 1 else lax.map(one, (rows, seq))
    return out.reshape(-1, *q_TxHxD.shape[1:])[place]


def _tile_bytes(q: jax.Array, sources: Sequence[Source], tile: int) -> int:
    """Bytes of gathered keys and of logits and weights of one tile, static."""
    keys = [source.keys(tile) for source in sources]
    gathered = sum(count * (tile if per_query else 1) for count, per_query in keys)
    return 4 * (gathered * q.shape[2] + 2 * tile * q.shape[1] * sum(count for count, _ in keys))
