"""`indexer_scores` in plain XLA: keys unpacked a few pages at a time, one sequence after the other."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.formats import PagedRows
from pallas_kernels.common.unpack import unpack_rows


def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    visible: jax.Array,
    *,
    block_size: int,
    blocks_only: bool,
    score_dtype: str,
    scratch_bytes: int,
):
    """As `reference.indexer_scores`; scratch_bytes bounds the unpacked keys and the scores of single heads."""
    one = functools.partial(
        _tile,
        keys,
        block_size=block_size,
        blocks_only=blocks_only,
        score_dtype=score_dtype,
        scratch_bytes=scratch_bytes,
    )
    tiles = (q, weights, keys.seq, visible)
    if q.shape[0] == 1:
        results = jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], tiles)))
    else:
        results = lax.map(one, tiles)
    return results if len(results) > 1 else results[0]


def _tile(keys: PagedRows, tile, *, block_size: int, blocks_only: bool, score_dtype: str, scratch_bytes: int):
    """Scores and maxima, those that are asked for, of the rows of one sequence: a tuple of [B, E] and [B, blocks]."""
    q, weights, seq, visible = tile
    table = keys.table[seq]
    pages, rows = table.shape[0], keys.layout.rows_per_page
    chunk = _chunk_pages(q, keys, block_size, scratch_bytes)

    def score(chunk_table: jax.Array, first: jax.Array | int):
        scores = scores_of(q, weights, _page_keys(keys, chunk_table).astype(q.dtype), score_dtype)
        shown = first + jnp.arange(scores.shape[1]) < visible[:, None]
        scores = jnp.where(shown & jnp.repeat(chunk_table >= 0, rows), scores, -jnp.inf)
        return _wanted(scores, block_size, blocks_only)

    if chunk >= pages:
        return score(table, 0)
    count = -(-pages // chunk)
    tables = jnp.pad(table, (0, count * chunk - pages), constant_values=-1).reshape(count, chunk)
    first = chunk * rows * jnp.arange(count)
    newest = jnp.max(visible)

    def chunk_scores(args):
        shapes = jax.eval_shape(score, *args)
        unseen = lambda *_: jax.tree.map(lambda s: jnp.full(s.shape, -jnp.inf, s.dtype), shapes)  # noqa: E731
        return lax.cond(args[1] < newest, score, unseen, *args)

    results = lax.map(chunk_scores, (tables, first))
    entries = pages * rows
    lengths = (
        [-(-entries // block_size)] if blocks_only else [entries, *([-(-entries // block_size)] if block_size else [])]
    )
    return tuple(jnp.moveaxis(r, 0, 1).reshape(q.shape[0], -1)[:, :n] for r, n in zip(results, lengths, strict=True))


def _chunk_pages(q: jax.Array, keys: PagedRows, block_size: int, scratch_bytes: int) -> int:
    """Pages whose unpacked keys and single heads' scores fit the scratch; whole candidate blocks."""
    batch, heads, width = q.shape
    rows = keys.layout.rows_per_page
    per_page = 4 * rows * (batch * (heads + 1) + 2 * width)
    unit = block_size // math.gcd(rows, block_size) if block_size else 1
    return max(1, scratch_bytes // per_page // unit) * unit


def _page_keys(keys: PagedRows, pages: jax.Array) -> jax.Array:
    """float32[P * rows_per_page, D]: all rows of each page, in order; any where the page is -1."""
    layout = keys.layout
    return read_keys(keys, pages, jnp.full_like(pages, layout.offset // keys.unit), layout.rows_per_page)


def read_keys(keys: PagedRows, page: jax.Array, column: jax.Array, count: int) -> jax.Array:
    """[N * count, D]: `count` adjacent rows from each (page, column) [N] on; any values where the page is -1."""
    layout = keys.layout
    size = count * layout.row_bytes // keys.unit
    index = jnp.stack([jnp.maximum(page, 0), column], axis=-1)
    dims = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    rows = lax.gather(keys.arena, index, dims, slice_sizes=(1, size), mode=lax.GatherScatterMode.CLIP)
    rows = rows.reshape(-1, layout.row_bytes // keys.unit)
    return rows if keys.unit > 1 else unpack_rows(rows, layout.fmt, layout.width)


def _wanted(scores: jax.Array, block_size: int, blocks_only: bool) -> tuple[jax.Array, ...]:
    if not block_size:
        return (scores,)
    best = block_maxima(scores, block_size)
    return (best,) if blocks_only else (scores, best)


def block_maxima(scores: jax.Array, block_size: int) -> jax.Array:
    """Maxima of masked scores [B, E] over aligned blocks, NaN counting as -inf: float32[B, ceil(E / block_size)]."""
    padded = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % block_size)), constant_values=-jnp.inf)
    ranked = jnp.where(jnp.isnan(padded), -jnp.inf, padded)
    return jnp.max(ranked.reshape(scores.shape[0], -1, block_size), axis=-1)


def scores_of(q: jax.Array, weights: jax.Array, keys: jax.Array, score_dtype: str) -> jax.Array:
    """sum_h weights[h] * relu(q[h] . k): float32[B, E].

    q: [B, H, D]. weights: [B, H]. keys: [E, D] shared, or [B, E, D] per query.
    score_dtype: "bfloat16" rounds the dot, the product and the head sum as the released code does.
    """
    batch, heads, width = q.shape
    if batch == 1 and score_dtype == "float32":
        # Decode: one matrix product per factor, entries leading; five times faster on CPU than the general form.
        dots = _einsum("ed,hd->eh", keys.reshape(-1, width), q[0])
        return _einsum("eh,h->e", jnp.maximum(dots, 0), weights[0])[None]
    if keys.ndim == 2:
        dots = _einsum("nd,ed->ne", q.reshape(-1, width), keys).reshape(batch, heads, -1)
    else:
        dots = _einsum("bhd,bed->bhe", q, keys)
    # Without the barrier XLA CPU fuses the product into the head sum and loses its fast matrix kernel.
    dots = lax.optimization_barrier(dots)
    if score_dtype == "bfloat16":
        product = jnp.maximum(_round_bf16(dots), 0) * weights[..., None]
        return _round_bf16(jnp.sum(_round_bf16(product), axis=1))
    # Written out over the heads: element-wise code fuses into one pass, a reduction over a middle axis does not.
    return sum(jnp.maximum(dots[:, h], 0) * weights[:, h, None] for h in range(heads))


def _einsum(spec: str, *operands: jax.Array) -> jax.Array:
    """Summed in float32; the highest precision by name, as a GPU would otherwise use TF32 for float32 operands."""
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _round_bf16(x: jax.Array) -> jax.Array:
    # reduce_precision, not a pair of casts, which XLA may cancel.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
