"""Attention of many heads over rows that each query lists: what a layer reads from its window and its global cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.common.formats import check_rows
from pallas_kernels.sparse_mla import gradient, pallas_triton, xla
from pallas_kernels.sparse_mla.config import SparseMlaConfig, default_config
from pallas_kernels.sparse_mla.row_set import RowSet
from pallas_kernels.sparse_mla.xla import Tiles

OP = "sparse_mla"
MOST_SETS = 2
SCRATCH_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static part of a call."""

    scale: float
    scratch_bytes: int
    implementation: Implementation | None
    interpret: bool
    config: SparseMlaConfig


def sparse_mla(
    q: jax.Array,
    row_sets: Sequence[RowSet],
    sink: jax.Array,
    *,
    scale: float,
    tiles: Tiles | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: SparseMlaConfig | None = None,
) -> jax.Array:
    """Attention of q [T, H, D] (bfloat16 or float32) over one or two sets of listed rows: [T, H, D] in q's dtype.

    A row is key and value; one softmax spans all sets. exp(sink[h]) (float32[H]) joins the denominator only. A query
    that lists no row gives exactly 0. Sums and softmax statistics are float32, products are of q's dtype.

    tiles: (rows int32[NT, B], -1 = padding; seq int32[NT]; place int32[T]): how query rows group by sequence, and where
    row t lies among the NT * B. Only the XLA path reads it, and of it rows and place: every set names the sequence of
    each query itself. scratch_bytes: bound of the XLA path's temporary arrays, down to one query at a time.
    implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernel, None = the tuned ones.

    Differentiable in q, sink and arenas of float32 or bfloat16 rows (reverse mode). There is no backward kernel: the
    gradient takes the XLA path, whatever the implementation.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.3 (sparse attention over window and selected entries, attention sink).
    """
    row_sets = tuple(row_sets)
    _check(q, row_sets, sink, tiles, scratch_bytes)
    layouts = [s.rows.layout for s in row_sets]
    config = config or default_config(*q.shape[:2], [s.picks for s in row_sets], layouts)
    return _run(_Options(scale, scratch_bytes, implementation, interpret, config), q, row_sets, sink, tiles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: _Options, q, row_sets, sink, tiles):
    reasons = pallas_triton.unsupported(q, row_sets, options.config, options.interpret)
    kernel = functools.partial(
        pallas_triton.sparse_mla, scale=options.scale, config=options.config, interpret=options.interpret
    )
    plain = functools.partial(xla.sparse_mla, scale=options.scale, scratch_bytes=options.scratch_bytes)
    kernels = {"pallas_triton": Kernel(lambda q, row_sets, sink, tiles: kernel(q, row_sets, sink), reasons)}
    return dispatch(OP, options.implementation, plain, kernels, q, row_sets, sink, tiles, interpret=options.interpret)


def _forward(options: _Options, *args):
    return _run(options, *args), args


def _backward(options: _Options, saved, grad):
    q, row_sets, sink, tiles = saved
    dq, darenas, dsink = gradient.backward(
        q, row_sets, sink, tiles, grad, scale=options.scale, scratch_bytes=options.scratch_bytes
    )
    dsets = tuple(
        dataclasses.replace(
            s, rows=dataclasses.replace(s.rows, arena=d, table=None, seq=None), index=None, selected=None
        )
        for s, d in zip(row_sets, darenas, strict=True)
    )
    return dq, dsets, dsink, None


_run.defvjp(_forward, _backward)


def _check(q, row_sets: tuple[RowSet, ...], sink, tiles: Tiles | None, scratch_bytes: int) -> None:
    """ValueError, one sentence, for what no implementation takes."""
    if q.dtype not in (jnp.float32, jnp.bfloat16) or q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{OP}: q must be float32 or bfloat16[T, H, D], none 0, got {q.dtype}{list(q.shape)}.")
    queries, heads, width = q.shape
    if sink.dtype != jnp.float32 or sink.shape != (heads,):
        raise ValueError(f"{OP}: sink must be float32[{heads}], got {sink.dtype}{list(sink.shape)}.")
    if not 1 <= len(row_sets) <= MOST_SETS:
        raise ValueError(f"{OP}: row_sets holds {len(row_sets)} sets; 1 to {MOST_SETS} share a softmax.")
    for i, row_set in enumerate(row_sets):
        name, index = f"row_sets[{i}]", row_set.index
        check_rows(OP, f"{name}.rows", row_set.rows, queries)
        if row_set.rows.layout.width != width:
            raise ValueError(f"{OP}: {name} holds rows of width {row_set.rows.layout.width}, q is of width {width}.")
        if index.dtype != jnp.int32 or index.ndim != 2 or index.shape[0] != queries or index.shape[1] < 1:
            got = f"{index.dtype}{list(index.shape)}"
            raise ValueError(f"{OP}: {name}.index must be int32[{queries}, K] with K >= 1, got {got}.")
        mask, wanted = row_set.selected, (queries, row_set.rows.rows_per_seq)
        if mask is not None and (mask.dtype != jnp.bool_ or mask.shape != wanted):
            got = f"{mask.dtype}{list(mask.shape)}"
            raise ValueError(f"{OP}: {name}.selected must be bool{list(wanted)}, got {got}.")
    if tiles is not None and (tiles[0].ndim != 2 or tiles[2].shape != (queries,)):
        shapes = f"{list(tiles[0].shape)} and {list(tiles[2].shape)}"
        raise ValueError(
            f"{OP}: tiles must be rows [NT, B], seq [NT] and place [{queries}], got {shapes} for the first and last."
        )
    if scratch_bytes < 1:
        raise ValueError(f"{OP}: scratch_bytes={scratch_bytes} must be positive.")
