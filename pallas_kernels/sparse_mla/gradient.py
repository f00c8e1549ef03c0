"""Gradient of `sparse_mla` in plain XLA: a tile is computed again and its keys' gradients are added to the arena."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sparse_mla.attention import attend
from pallas_kernels.sparse_mla.row_set import RowSet
from pallas_kernels.sparse_mla.sources import Keys
from pallas_kernels.sparse_mla.xla import Tiles, make_plan, tile_queries

_COPIES = 4  # of keys, logits and weights that are alive at once in a tile's gradient, against one going forward


def backward(
    q: jax.Array,
    row_sets: Sequence[RowSet],
    sink: jax.Array,
    tiles: Tiles | None,
    grad: jax.Array,
    *,
    scale: float,
    scratch_bytes: int,
) -> tuple[jax.Array, list[jax.Array | None], jax.Array]:
    """(q's, the arenas' and the sink's gradient) of sum(grad * sparse_mla(...)).

    Arenas of bytes have none. Sums over queries are in float32.
    """
    plan = make_plan(q, row_sets, tiles, scratch_bytes // _COPIES)
    learns = [jnp.issubdtype(s.rows.arena.dtype, jnp.floating) for s in row_sets]
    parts = jnp.zeros((plan.rows.size, *q.shape[1:]), jnp.float32).at[plan.place].add(grad.astype(jnp.float32))
    parts = parts.astype(q.dtype).reshape(*plan.rows.shape, *q.shape[1:])

    def one(total, tile):
        dq, darenas, dsink = total
        queries, part = tile_queries(tile[0]), tile[1]
        found = [source.gather(queries) for source in plan.sources]
        run = functools.partial(_attend, counts=[k.count for k in found], scale=scale)
        _, pull = jax.vjp(run, q[queries], [k.keys for k in found], sink)
        more_q, more_keys, more_sink = pull(part)
        darenas = [_add(a, k, more) if learn else a for a, k, more, learn in zip(darenas, found, more_keys, learns,
                   strict=True)]  # fmt: skip
        return (dq.at[queries].add(more_q), darenas, dsink + more_sink), None

    blank = [jnp.zeros(s.rows.arena.shape if learn else (), jnp.float32) for s, learn in zip(row_sets, learns,
             strict=True)]  # fmt: skip
    start = (jnp.zeros_like(q), blank, jnp.zeros_like(sink))
    (dq, darenas, dsink), _ = lax.scan(one, start, (plan.rows, parts))
    cast = [a.astype(s.rows.arena.dtype) if n else None for a, s, n in zip(darenas, row_sets, learns, strict=True)]
    return dq, cast, dsink


def _attend(q, keys, sink, counts, scale):
    return attend(q, list(zip(keys, counts, strict=True)), sink, scale)


def _add(arena: jax.Array, found: Keys, more: jax.Array) -> jax.Array:
    """arena float32[P, page] plus the gradients of the keys at their addresses; keys without a page are dropped."""
    page = jnp.where(found.page < 0, arena.shape[0], found.page)
    index = jnp.stack([page, found.column], axis=-1).reshape(-1, 2)
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    rows = more.reshape(-1, more.shape[-1])
    return lax.scatter_add(arena, index, rows, dims, mode=lax.GatherScatterMode.FILL_OR_DROP)
