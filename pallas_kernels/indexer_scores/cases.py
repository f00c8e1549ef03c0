"""Shapes of `indexer_scores`: 32 heads of 128, decoding over 16K to 1M entries and a prefill chunk over 128K."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.cases import Budget, Case, Cost
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.expected import sequence_rows
from pallas_kernels.common.formats import FORMATS, OFFSET_LIMIT, WIDE_OFFSETS, PagedRows, RowLayout
from pallas_kernels.indexer_scores.api import indexer_scores
from pallas_kernels.indexer_scores.config import IndexerConfig, bucket

HEADS, WIDTH = 32, 128
LEAST = {"mxfp4": 1100, "fp8_fp32": 1150, "bf16": 520}  # instructions: half of what compilers make of them
TOLERANCE = 1e-4  # exact operands, sums in float32
_MAIN_BYTES = 288  # of a main row of the released model, FP4-E4M3 of width 512
_ARENA_BYTES = 8 << 30  # of the largest arena; sequences share pages where theirs do not fit
_PART = 1 << 14  # entries at a time in float64


def key_pages(fmt: str) -> tuple[RowLayout, int]:
    """(keys of the ratio-1 source, bytes of a page) of the released page: 128 tokens, sources of ratio 2, 2, 2, 1.

    A source's keys lie behind its main rows. With keys in MXFP4 the page has 113,920 B, as released.
    """
    key_bytes = FORMATS[fmt].row_bytes(WIDTH)
    before = 3 * 64 * (_MAIN_BYTES + key_bytes)
    return RowLayout(fmt, WIDTH, before + 128 * _MAIN_BYTES, 128), before + 128 * (_MAIN_BYTES + key_bytes)


def draw_keys(draw: Draw, fmt: str, sequences: int, entries: int, queries: Any) -> PagedRows:
    """Keys of that many sequences; queries: `seq`. Each has its own pages where they fit in 8 GiB."""
    layout, page_bytes = key_pages(fmt)
    width = entries // layout.rows_per_page
    pages, shared = arena_pages(fmt, sequences, entries)
    table = draw.integers(0, pages, (sequences, width)) if shared else draw.pages(sequences, width, pages)
    return PagedRows(draw.arena(pages, page_bytes, layout), table, queries, layout)


def arena_pages(fmt: str, sequences: int, entries: int) -> tuple[int, bool]:
    """(pages of the arena, whether sequences share them); never a size between 32-bit and 64-bit offsets."""
    layout, page_bytes = key_pages(fmt)
    wanted, most = sequences * entries // layout.rows_per_page, _ARENA_BYTES // page_bytes
    pages = min(wanted, most)
    if OFFSET_LIMIT < pages * page_bytes <= WIDE_OFFSETS:
        pages = WIDE_OFFSETS // page_bytes + 1
    return pages, wanted > most


def want_scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """float64[B, E] of q [B, H, D], weights [B, H], keys [E, D]."""
    q, weights = q.astype(np.float64), weights.astype(np.float64)
    parts = [keys[i : i + _PART] for i in range(0, len(keys), _PART)]
    return np.concatenate([np.einsum("bhe,bh->be", np.maximum(q @ part.T, 0), weights) for part in parts], axis=1)


def _want(q, weights, keys: PagedRows, visible, *, block_size: int, blocks_only: bool) -> Any:
    tiles = []
    for tile, seq in enumerate(keys.seq):
        scores = want_scores(q[tile], weights[tile], sequence_rows(keys, seq))
        unseen = np.arange(scores.shape[1]) >= visible[tile][:, None]
        tiles.append(np.where(unseen | np.repeat(keys.table[seq] < 0, keys.layout.rows_per_page), -np.inf, scores))
    scores = np.stack(tiles)
    if not block_size:
        return scores
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -scores.shape[2] % block_size)), constant_values=-np.inf)
    best = padded.reshape(*scores.shape[:2], -1, block_size).max(axis=-1)
    return best if blocks_only else (scores, best)


def _sweep(rows: int) -> tuple[IndexerConfig, ...]:
    tiles = ((64, 4), (128, 4), (128, 8), (256, 8))
    if rows == 1:
        return tuple(IndexerConfig(entries=e, queries=1, num_warps=w, num_stages=1) for e, w in tiles)
    return tuple(
        IndexerConfig(entries=e, queries=n, num_warps=w, num_stages=s)
        for e, w in tiles
        for n in (1, 2, 4)
        for s in (2, 3)
    )


def _case(
    fmt: str, tiles: int, rows: int, entries: int, block_size: int = 0, blocks_only: bool = False, short: bool = False
) -> Case:
    sequences = tiles if rows == 1 else 1

    def args(draw: Draw, small: bool) -> tuple:
        n, b, e = (2, min(rows, 4), 512) if small else (tiles, rows, entries)
        lines = min(sequences, n)
        seq = draw.integers(0, lines, (n,)) if small or lines == 1 else _arange(draw, n)
        keys = draw_keys(draw, fmt, lines, e, seq)
        visible = draw.integers(0, e + 1, (n, b)) if small else draw.full((n, b), e)
        return draw.normal((n, b, HEADS, WIDTH), jnp.bfloat16), draw.normal((n, b, HEADS)), keys, visible

    wanted = {"block_size": block_size, "blocks_only": blocks_only}
    total, row_bytes = tiles * rows, FORMATS[fmt].row_bytes(WIDTH)
    out = total * ((0 if blocks_only else entries) + (entries // block_size if block_size else 0))
    nbytes = sequences * entries * row_bytes + total * HEADS * (2 * WIDTH + 4) + 4 * out
    pages, shared = arena_pages(fmt, sequences, entries)
    return Case(
        op="indexer_scores",
        name=f"{fmt}_n{entries}_t{total}" + ("_blocks" if blocks_only else ""),
        args=args,
        call=functools.partial(indexer_scores, **wanted),
        want=functools.partial(_want, **wanted),
        cost=Cost(nbytes=nbytes, flops=2 * HEADS * WIDTH * total * entries),
        budget=Budget(matrix=True, instructions=LEAST[fmt]),
        tolerance=TOLERANCE,
        short=short,
        configs=_sweep(rows),
        bucket=bucket(fmt, rows),
        shape={
            "tiles": tiles, "rows": rows, "heads": HEADS, "width": WIDTH, "entries": entries, "block_size": block_size,
            "writes": "maxima" if blocks_only else "scores", "format": fmt, "dtype": "bfloat16", "pages": pages,
            "sharing": "pages shared between sequences" if shared else "own pages",
        },
    )  # fmt: skip


def _arange(draw: Draw, count: int) -> Any:
    zeros = draw.full((count,), 0)
    return zeros if draw.abstract else zeros + jnp.arange(count, dtype=jnp.int32)


_K16, _K128, _M1 = 1 << 14, 1 << 17, 1 << 20
CASES = (
    *(_case("mxfp4", n, 1, e, short=(n, e) == (32, _K128)) for e in (_K16, _K128, _M1) for n in (1, 32, 128)),
    *(_case("mxfp4", n, 1, e, 8, True) for n, e in ((32, _K128), (1, _M1), (32, _M1), (128, _M1))),
    *(_case(fmt, 32, 1, _K128, short=True) for fmt in ("fp8_fp32", "bf16")),
    *(_case(fmt, n, 1, e, 8, True) for fmt in ("fp8_fp32", "bf16") for n, e in ((32, _K128), (1, _M1))),
    *(_case(fmt, 32, 128, _K128) for fmt in ("mxfp4", "fp8_fp32", "bf16")),
    *(_case(fmt, 32, 128, _K128, 8, True) for fmt in ("mxfp4", "fp8_fp32", "bf16")),
)
