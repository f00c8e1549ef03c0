"""`indexer_scores` as a kernel: keys decoded once per program, matrix products with all query rows, fused block maxima.

`load_keys`, `load_queries` and `score` are also what `candidate_scores` is made of.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.codes import DECODERS, decode_bf16, decode_e2m1, decode_e4m3, decode_f32
from pallas_kernels.common.formats import CODE_BITS, PagedRows, RowLayout, arena_reasons
from pallas_kernels.common.tiles import next_power_of_two, power_of_two, shared_memory_reasons
from pallas_kernels.indexer_scores.config import IndexerConfig

_MINUS_INFINITY = float("-inf")


def unsupported(
    q: jax.Array, keys: PagedRows, block_size: int, score_dtype: str, config: IndexerConfig, interpret: bool
) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    tiles, batch, *_ = q.shape
    queries = math.gcd(config.queries, batch)
    reasons = common_reasons(q, keys, score_dtype, config.entries, queries, config.num_stages, interpret)
    if block_size and (not power_of_two(block_size) or block_size > config.entries):
        reasons.append(f"block_size={block_size} must be a power of two up to entries={config.entries} of the config")
    return tuple(reasons + common.grid_reasons("tiles", tiles))


def common_reasons(
    q: jax.Array, keys: PagedRows, score_dtype: str, entries: int, queries: int, stages: int, interpret: bool
) -> list[str]:
    """Reasons against products of `entries` keys with `queries` query rows at a time."""
    heads, width = next_power_of_two(q.shape[-2]), q.shape[-1]
    inner = width // len(_columns(keys.layout))
    reasons = common.small_sides(interpret, **{"entries": entries, "heads * queries": heads * queries, "width": inner})
    if not power_of_two(width):
        reasons.append(f"width={width} of a query must be a power of two")
    if score_dtype != "float32":
        reasons.append(f"score_dtype={score_dtype!r} is for the plain path, which can round as the released code does")
    itemsize = q.dtype.itemsize
    needed = itemsize * width * (entries + stages * heads * queries)
    reasons += shared_memory_reasons(f"a tile of {entries} keys and {stages} x {queries} query rows", needed)
    reasons += arena_reasons(keys.arena)
    return reasons


@functools.partial(jax.jit, static_argnames=("block_size", "blocks_only", "config", "interpret"))
def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    visible: jax.Array,
    *,
    block_size: int,
    blocks_only: bool,
    config: IndexerConfig,
    interpret: bool,
):
    """As `reference.indexer_scores`, of float32 scores."""
    tiles, batch, *_ = q.shape
    entries, total = keys.rows_per_seq, tiles * batch
    blocks = -(-entries // block_size) if block_size else 0
    flat, flat_weights, heads = prepare_queries(q.reshape(total, *q.shape[2:]), weights.reshape(total, -1), keys.layout)
    widths = [] if blocks_only else [entries]
    widths += [blocks] if block_size else []
    kernel = functools.partial(
        _kernel, layout=keys.layout, unit=keys.unit, entries=entries, batch=batch, heads=heads,
        tile=config.entries, queries=math.gcd(config.queries, batch), block_size=block_size, blocks_only=blocks_only,
    )  # fmt: skip
    results = common.call(
        kernel, flat, flat_weights, visible.reshape(total), keys.arena, keys.table, keys.seq,
        name="indexer_scores", grid=(pl.cdiv(entries, config.entries), tiles),
        out_shape=[jax.ShapeDtypeStruct((total, width), jnp.float32) for width in widths],
        config=config, interpret=interpret,
    )  # fmt: skip
    results = [r.reshape(tiles, batch, -1) for r in results]
    return tuple(results) if len(results) > 1 else results[0]


def _kernel(
    q_ref, weight_ref, visible_ref, arena_ref, table_ref, seq_ref, *out_refs,
    layout, unit, entries, batch, heads, tile, queries, block_size, blocks_only,
):  # fmt: skip
    part, number = pl.program_id(0), pl.program_id(1)
    entry = part * tile + jnp.arange(tile, dtype=jnp.int32)
    row = jnp.arange(next_power_of_two(batch), dtype=jnp.int32)
    at = jnp.where(row < batch, number * batch + row, 0)
    newest = jnp.max(pltriton.load(visible_ref.at[at], mask=row < batch, other=0))

    def write(i: jax.Array, value: jax.Array) -> None:
        """Stores value [tile, queries], the masked scores of query rows i on."""
        value = value.T
        if not blocks_only:
            _store(out_refs[0], i, part * tile, value, entries)
        if block_size:
            ranked = jnp.where(value != value, _MINUS_INFINITY, value)
            best = jnp.max(ranked.reshape(queries, tile // block_size, block_size), axis=2)
            _store(out_refs[-1], i, part * (tile // block_size), best, -(-entries // block_size))

    @pl.when(part * tile >= newest)
    def _():
        unseen = jnp.full((tile, queries), _MINUS_INFINITY, jnp.float32)
        _for_tiles(batch // queries, lambda i: write(number * batch + i * queries, unseen))

    @pl.when(part * tile < newest)
    def _():
        keys = load_keys(
            arena_ref, table_ref, seq_ref[number], jnp.where(entry < newest, entry, -1), layout, unit, q_ref.dtype
        )

        def one(i: jax.Array) -> None:
            first = number * batch + i * queries
            value = score(keys, load_queries(q_ref, first, queries, heads, layout), weight_ref, first, queries, heads)
            seen = keys.valid[:, None] & (entry[:, None] < visible_ref[pl.ds(first, queries)][None, :])
            write(first, jnp.where(seen, value, _MINUS_INFINITY))

        _for_tiles(batch // queries, one)


def _for_tiles(count: int, body) -> None:
    if count == 1:
        body(0)
    else:
        lax.fori_loop(0, count, lambda i, carry: (body(i), carry)[1], 0)


def _store(ref: Any, row: jax.Array, column: jax.Array, value: jax.Array, width: int) -> None:
    """ref[row.., column..] = value [R, C], as far as columns are below `width`."""
    at = ref.at[pl.ds(row, value.shape[0]), pl.ds(column, value.shape[1])]
    if width % value.shape[1] == 0:
        pltriton.store(at, value)
    else:
        inside = column + jnp.arange(value.shape[1], dtype=jnp.int32) < width
        pltriton.store(at, value, mask=jnp.broadcast_to(inside[None, :], value.shape))


class Keys(NamedTuple):
    """Decoded keys. parts: their columns as `_columns` splits them, [N, W] each. scale: of whole rows, [N]."""

    parts: tuple[jax.Array, ...]
    scale: jax.Array | None
    valid: jax.Array  # [N]: whether the row exists; the values of the others are finite and mean nothing


def _columns(layout: RowLayout) -> tuple[slice, ...]:
    """How the columns of a row are split: 4-bit codes into even and odd ones, as they share bytes."""
    return (slice(0, None, 2), slice(1, None, 2)) if CODE_BITS[layout.fmt.element] == 4 else (slice(None),)


def prepare_queries(q: jax.Array, weights: jax.Array, layout: RowLayout) -> tuple[jax.Array, jax.Array, int]:
    """q [T, H, D] as [T * heads, D] with its columns in the order of `_columns`, weights [T * heads], heads.

    heads: H rounded up to a power of two by heads of weight zero.
    """
    rows, count, width = q.shape
    heads = next_power_of_two(count)
    if heads != count:
        q = jnp.pad(q, ((0, 0), (0, heads - count), (0, 0)))
        weights = jnp.pad(weights, ((0, 0), (0, heads - count)))
    columns = _columns(layout)
    if len(columns) > 1:
        q = jnp.concatenate([q[..., c] for c in columns], axis=-1)
    return q.reshape(rows * heads, width), weights.reshape(rows * heads), heads


def load_queries(q_ref: Any, first: jax.Array, rows: int, heads: int, layout: RowLayout) -> tuple[jax.Array, ...]:
    """The prepared query rows from `first` on: [rows * heads, W] for each part of `Keys`."""
    parts = len(_columns(layout))
    width = q_ref.shape[1] // parts
    return tuple(q_ref[pl.ds(first * heads, rows * heads), pl.ds(p * width, width)] for p in range(parts))


def load_keys(
    arena_ref: Any, table_ref: Any, seq: jax.Array, index: jax.Array, layout: RowLayout, unit: int, dtype: Any
) -> Keys:
    """Keys `index` [N] of sequence `seq` in the dtype of products; not valid: below 0, behind the table, no page."""
    page, column, valid = common.row_address(layout, unit, table_ref, seq, index)
    fmt, width = layout.fmt, layout.width
    load = functools.partial(common.load_columns, arena_ref, page, mask=valid)
    if unit > 1:
        return Keys((load(column, width).astype(dtype),), None, valid)
    if fmt.scale is None:
        decode = decode_bf16 if fmt.element == "bfloat16" else decode_f32
        return Keys((decode(_words(load, column, width, CODE_BITS[fmt.element] // 8)).astype(dtype),), None, valid)
    codes = load(column, fmt.code_bytes(width)).astype(jnp.int32)
    behind = column + fmt.code_bytes(width)
    if fmt.group is None:
        scale = decode_f32(_words(load, behind, 1, 4))
        return Keys((decode_e4m3(codes).astype(dtype),), jnp.sum(scale, axis=1), valid)
    scales = DECODERS[fmt.scale](load(behind, fmt.num_scales(width)).astype(jnp.int32))
    scales = common.per_group(scales, codes.shape[1])
    if fmt.element == "e4m3":
        values = (decode_e4m3(codes),)
    else:
        values = decode_e2m1(codes & 15), decode_e2m1(codes >> 4)
    return Keys(tuple((v * scales).astype(dtype) for v in values), None, valid)


def _words(load: Any, column: jax.Array, width: int, size: int) -> jax.Array:
    """int32 [N, width] of little-endian words of `size` bytes."""
    words = load(column, width * size).astype(jnp.int32)
    for bits in (8, 16)[: size.bit_length() - 1]:
        low, high = common.deinterleave(words)
        words = low | (high << bits)
    return words


def score(keys: Keys, q: tuple[jax.Array, ...], weight_ref: Any, first: jax.Array, rows: int, heads: int) -> jax.Array:
    """sum_h weights[h] * relu(q[h] . k): float32 [N, rows] for query rows `first` on, not masked."""
    dots = sum(common.dot(k, part, transpose_b=True) for k, part in zip(keys.parts, q, strict=True))
    weighted = jnp.maximum(dots, 0.0) * weight_ref[pl.ds(first * heads, rows * heads)][None, :]
    total = jnp.sum(weighted.reshape(dots.shape[0], rows, heads), axis=2)
    return total if keys.scale is None else total * keys.scale[:, None]
