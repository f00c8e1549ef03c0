"""Shapes of `sparse_mla`: 64 heads of 512, 128 window rows and 512 global rows of a context of 128K tokens."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.cases import Budget, Case, Cost
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.expected import rows_of
from pallas_kernels.common.formats import PagedRows, RowLayout
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.config import SparseMlaConfig, bucket
from pallas_kernels.sparse_mla.row_set import RowSet

_HEADS, _WIDTH, _WINDOW, _PICKS = 64, 512, 128, 512
_RING_ROWS = 134
_PAGES, _ROWS = 1024, 64  # of a context of 128K tokens: pages of 128 tokens, an entry per two
_INDEX_BYTES = 68  # of an index key, one beside each entry
_SOURCES = 5  # rows of a page in units of `_ROWS`: three sources of 64, one of 128
_SCALE = _WIDTH**-0.5
_SPLITS = {1: (2, 5, 10), 32: (1, 2, 5), 128: (1, 2), 4_096: (1,)}  # that a sweep tries, by queries


def _sweep(queries: int) -> tuple[SparseMlaConfig, ...]:
    tiles = ((16, 16, 4), (16, 16, 8), (16, 32, 4), (16, 32, 8))
    return tuple(
        SparseMlaConfig(block_heads=heads, block_rows=rows, chunks=chunks, splits=splits, num_stages=stages)
        for heads, rows, chunks in tiles
        for splits in _SPLITS[queries]
        for stages in (1, 3)
    )


def _want(q, row_sets, sink) -> np.ndarray:
    """float64, one query after the other."""
    q, sink = np.asarray(q, np.float64), np.asarray(sink, np.float64)
    out = np.zeros(q.shape)
    for t, query in enumerate(q):
        keys = np.concatenate([rows_of(s.rows, t, s.index[t]) for s in row_sets])
        if not len(keys):
            continue
        logits = query @ keys.T * _SCALE
        top = np.maximum(logits.max(axis=1), sink)
        weights = np.exp(logits - top[:, None])
        out[t] = weights @ keys / (weights.sum(axis=1) + np.exp(sink - top))[:, None]
    return out


def _args(draw: Draw, small: bool, *, queries: int, prefill: bool, global_format: str) -> tuple:
    heads, width, window, picks, pages, rows = (
        (8, 64, 16, 40, 8, 8) if small else (_HEADS, _WIDTH, _WINDOW, _PICKS, _PAGES, _ROWS)
    )
    queries = min(queries, 3) if small else queries
    seqs = 1 if prefill else queries
    near, far = RowLayout("mxfp8", width, 0, _RING_ROWS), RowLayout(global_format, width, 0, rows)
    if prefill:  # the chunk and what the window held before it, one page
        near = RowLayout("mxfp8", width, 0, queries + window - 1)
    seq = draw.integers(0, seqs, (queries,))
    ring = draw.arena(seqs, near.rows_per_page * near.row_bytes, near)
    arena = draw.arena(pages, _SOURCES * rows * (far.row_bytes + _INDEX_BYTES), far)
    window_set = PagedRows(ring, draw.pages(seqs, 1), seq, near)
    global_set = PagedRows(arena, draw.integers(0, pages, (seqs, pages)), seq, far)
    return (
        draw.normal((queries, heads, width), jnp.bfloat16),
        (
            RowSet(window_set, draw.integers(0, near.rows_per_page, (queries, window))),
            RowSet(global_set, draw.integers(0, pages * rows, (queries, picks))),
        ),
        draw.normal((heads,)),
    )


def _case(queries: int, global_format: str, prefill: bool = False) -> Case:
    near, far = RowLayout("mxfp8", _WIDTH, 0, _RING_ROWS), RowLayout(global_format, _WIDTH, 0, _ROWS)
    rows = _WINDOW * near.row_bytes + _PICKS * far.row_bytes
    lists = 4 * (_WINDOW + _PICKS)
    kind = "prefill" if prefill else "decode"
    return Case(
        op="sparse_mla",
        name=f"{kind}_{global_format}_t{queries}",
        args=functools.partial(_args, queries=queries, prefill=prefill, global_format=global_format),
        call=functools.partial(sparse_mla, scale=_SCALE),
        want=_want,
        cost=Cost(
            nbytes=queries * (rows + lists + 2 * 2 * _HEADS * _WIDTH),
            flops=4 * queries * _HEADS * (_WINDOW + _PICKS) * _WIDTH,
        ),
        budget=Budget(matrix=True, instructions=500),
        tolerance=2e-2,  # bfloat16 probabilities and outputs
        short=queries == 32,
        configs=_sweep(queries),
        bucket=bucket(queries, (near, far)),
        shape={"queries": queries, "heads": _HEADS, "width": _WIDTH, "rows": _WINDOW + _PICKS, "format": global_format},
    )


CASES = tuple(
    _case(queries, name, prefill=queries == 4_096) for name in ("fp4_e4m3", "bf16", "mxfp8") for queries in _SPLITS
)
