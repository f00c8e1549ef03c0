"""`sparse_mla` as one kernel: rows gathered by address, decoded in registers, online softmax over all lists.

A program serves `block_heads` heads of one query and one of `splits` parts of its lists. Programs of one query are
neighbours in the grid, so that the rows that they share come from the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.formats import RowLayout, arena_reasons
from pallas_kernels.common.tiles import shared_memory_reasons
from pallas_kernels.sparse_mla.config import SparseMlaConfig, blocks, has_nibbles
from pallas_kernels.sparse_mla.decode import Chunks, load_chunks
from pallas_kernels.sparse_mla.row_set import RowSet

_LOWEST = -1e30
_LOG2_E = math.log2(math.e)


def unsupported(
    q: jax.Array, row_sets: Sequence[RowSet], config: SparseMlaConfig, interpret: bool = False
) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    layouts = [s.rows.layout for s in row_sets]
    chunks = _chunks(layouts, config)
    reasons = [reason for layout in layouts for reason in chunks.problems(layout)]
    reasons += common.small_sides(
        interpret, block_heads=config.block_heads, block_rows=config.block_rows, chunk=chunks.size
    )
    total = blocks([s.picks for s in row_sets], config)
    if config.splits > total:
        reasons.append(f"splits={config.splits} is more than the {total} blocks of rows")
    for i, row_set in enumerate(row_sets):
        reasons += arena_reasons(row_set.rows.arena, f"row_sets[{i}].rows.arena")
    reasons += shared_memory_reasons(
        f"block_heads={config.block_heads} with block_rows={config.block_rows}", _shared_bytes(q, config)
    )
    return tuple(dict.fromkeys(reasons))


def _shared_bytes(q: jax.Array, config: SparseMlaConfig) -> int:
    """Operands of the products: queries and one block of rows, and the weights."""
    size = q.dtype.itemsize
    width = q.shape[2]
    return size * (config.block_heads * (width + config.block_rows) + config.block_rows * width)


def _chunks(layouts: Sequence[RowLayout], config: SparseMlaConfig) -> Chunks:
    return Chunks(layouts[0].width, config.chunks, has_nibbles(layouts))


@functools.partial(jax.jit, static_argnames=("scale", "config", "interpret"))
def sparse_mla(
    q: jax.Array,
    row_sets: Sequence[RowSet],
    sink: jax.Array,
    *,
    scale: float,
    config: SparseMlaConfig,
    interpret: bool,
) -> jax.Array:
    """As `api.sparse_mla`."""
    queries, heads, width = q.shape
    head_blocks = pl.cdiv(heads, config.block_heads)
    padded = head_blocks * config.block_heads  # of the results: masked lanes have a place of their own
    layouts = tuple(s.rows.layout for s in row_sets)
    kernel = functools.partial(
        _kernel, layouts=layouts, chunks=_chunks(layouts, config), scale=scale * _LOG2_E, config=config
    )
    shape = (queries, padded, width)
    out = [jax.ShapeDtypeStruct(shape, q.dtype)]
    if config.splits > 1:
        parts = (config.splits, queries)
        out = [jax.ShapeDtypeStruct((*parts, padded, width), jnp.float32)]
        out += [jax.ShapeDtypeStruct((*parts, padded), jnp.float32)] * 2
    operands = [a for s in row_sets for a in (s.rows.arena, s.rows.table, s.rows.seq, s.index)]
    results = common.call(
        kernel, q, sink, *operands, name="sparse_mla", grid=(head_blocks, config.splits, queries), out_shape=out,
        config=config, interpret=interpret,
    )  # fmt: skip
    if config.splits == 1:
        return results[0][:, :heads]
    return _merge(*(r[..., :heads, :] if r.ndim == 4 else r[..., :heads] for r in results), sink).astype(q.dtype)


def _merge(out: jax.Array, top: jax.Array, total: jax.Array, sink: jax.Array) -> jax.Array:
    """Unnormalised parts [splits, T, H, D] with maxima and sums [splits, T, H] -> [T, H, D]."""
    best = jnp.max(top, axis=0)
    weight = jnp.exp2(top - best)
    total = jnp.sum(weight * total, axis=0)
    return jnp.sum(out * weight[..., None], axis=0) / _denominator(best, total, sink)[..., None]


def _denominator(top: jax.Array, total: jax.Array, sink: jax.Array) -> jax.Array:
    """The sum with the sink's share; 1 where there was no row. `top` is in units of log2."""
    return jnp.where(total > 0, total + jnp.exp2(jnp.where(total > 0, sink * _LOG2_E - top, 0.0)), 1.0)


def _kernel(*refs: Any, layouts: Sequence[RowLayout], chunks: Chunks, scale: float, config: SparseMlaConfig) -> None:
    q_ref, sink_ref, *rest = refs
    sets, out = [rest[4 * i : 4 * i + 4] for i in range(len(layouts))], rest[4 * len(layouts) :]
    split, query = pl.program_id(1), pl.program_id(2)
    head = pl.program_id(0) * config.block_heads + jnp.arange(config.block_heads, dtype=jnp.int32)
    real = head < q_ref.shape[1]
    at = jnp.full(head.shape, query, jnp.int32), jnp.where(real, head, 0)
    qs = [_load_heads(q_ref, at, chunks, c, real) for c in range(chunks.count)]
    carry = _empty(config, chunks)
    # The lists are one sequence of blocks, of which a split takes its share.
    share = pl.cdiv(blocks([refs[3].shape[1] for refs in sets], config), config.splits)
    first = 0
    for layout, set_refs in zip(layouts, sets, strict=True):
        count = pl.cdiv(set_refs[3].shape[1], config.block_rows)
        step = functools.partial(
            _step, set_refs, layout, qs, query=query, chunks=chunks, scale=scale, rows=config.block_rows
        )
        low, high = 0, count
        if config.splits > 1:
            low, high = (jnp.clip(share * s - first, 0, count) for s in (split, split + 1))
        carry = lax.fori_loop(low, high, step, carry)
        first += count
    _write(out, carry, sink_ref, query, split, head, real, chunks, config)


def _write(out, carry, sink_ref, query, split, head, real, chunks: Chunks, config: SparseMlaConfig) -> None:
    """The result, or a split's unnormalised part of it with its maximum and sum."""
    top, total, sums = carry
    at = [jnp.full(head.shape, query, jnp.int32), head]
    if config.splits == 1:
        sink = common.load_at(sink_ref, (jnp.where(real, head, 0),), real, 0.0)
        sums = [value / _denominator(top, total, sink)[:, None] for value in sums]
    else:
        at = [jnp.full(head.shape, split, jnp.int32), *at]
        common.scatter(out[1], at, top, real)
        common.scatter(out[2], at, total, real)
    for c, value in enumerate(sums):
        _store_heads(out[0], at, chunks, c, value, real)


def _empty(config: SparseMlaConfig, chunks: Chunks) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """(running maximum in units of log2, sum, weighted rows by chunk) before the first block."""
    heads = config.block_heads
    zero = jnp.zeros((heads, chunks.size), jnp.float32)
    return jnp.full((heads,), _LOWEST, jnp.float32), jnp.zeros((heads,), jnp.float32), [zero] * chunks.count


def _step(set_refs, layout: RowLayout, qs, block, carry, *, query, chunks: Chunks, scale: float, rows: int):
    """One block of rows of one set joins the online softmax."""
    arena_ref, table_ref, seq_ref, index_ref = set_refs
    top, total, sums = carry
    slot = block * rows + jnp.arange(rows, dtype=jnp.int32)
    at = jnp.full(slot.shape, query, jnp.int32), slot
    index = common.load_at(index_ref, at, slot < index_ref.shape[1], -1)
    unit = arena_ref.dtype.itemsize
    page, column, valid = common.row_address(layout, unit, table_ref, seq_ref[query], index)
    keys = load_chunks(arena_ref, layout, page, column, valid, chunks, qs[0].dtype)
    logits = sum(common.dot(q, k, transpose_b=True) for q, k in zip(qs, keys, strict=True))
    logits = jnp.where(valid[None, :], logits * scale, _LOWEST)
    best = jnp.maximum(top, jnp.max(logits, axis=1))
    keep = jnp.exp2(top - best)
    weights = jnp.where(valid[None, :], jnp.exp2(logits - best[:, None]), 0.0)
    total = total * keep + jnp.sum(weights, axis=1)
    weights = weights.astype(keys[0].dtype)
    sums = [value * keep[:, None] + common.dot(weights, k) for value, k in zip(sums, keys, strict=True)]
    return best, total, sums


def _grid_of(at: Sequence[jax.Array], chunks: Chunks, chunk: int) -> list[jax.Array]:
    """Index arrays [heads, size] of the columns of a chunk at the leading indices `at` [heads]."""
    start, step = chunks.columns(chunk)
    column = start + step * jnp.arange(chunks.size, dtype=jnp.int32)
    shape = (at[0].shape[0], chunks.size)
    return [jnp.broadcast_to(i[:, None], shape) for i in at] + [jnp.broadcast_to(column[None, :], shape)]


def _load_heads(ref: Any, at: Sequence[jax.Array], chunks: Chunks, chunk: int, mask: jax.Array) -> jax.Array:
    index = _grid_of(at, chunks, chunk)
    return common.load_at(ref, index, jnp.broadcast_to(mask[:, None], index[0].shape), 0.0)


def _store_heads(ref: Any, at: Sequence[jax.Array], chunks: Chunks, chunk: int, value, mask: jax.Array) -> None:
    index = _grid_of(at, chunks, chunk)
    common.scatter(ref, index, value.astype(ref.dtype), jnp.broadcast_to(mask[:, None], value.shape))
