"""`sparse_mla` in plain XLA: tiles of queries one after the other, each under a budget of temporary bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.prefixes import prefix_sizes, run_prefix
from pallas_kernels.sparse_mla.attention import attend
from pallas_kernels.sparse_mla.row_set import RowSet
from pallas_kernels.sparse_mla.sources import MaskedTable, Source, choose

# Where queries gather their own keys nothing is shared but the loop, and what stays in the cache of a core is read
# again at no cost. Two CPU cores, 128 queries of 64 heads over 640 rows: 113 ms under 1 MiB, 87 under 4, 81 under 8 and
# 16, 90 under 32.
CACHED_BYTES = 8 * 2**20
TILE = 128  # queries of a tile where the caller names no tiles
Tiles = tuple[jax.Array, jax.Array, jax.Array]  # (rows, seq, place), see `api.sparse_mla`


class Plan(NamedTuple):
    """How a call is cut: sources of the sets, query rows int32[N, part] of the tiles, and where row t comes out."""

    sources: list[Source]
    rows: jax.Array
    place: jax.Array


def sparse_mla(
    q: jax.Array, row_sets: Sequence[RowSet], sink: jax.Array, tiles: Tiles | None, *, scale: float, scratch_bytes: int
) -> jax.Array:
    """As `api.sparse_mla`."""
    plan = make_plan(q, row_sets, tiles, scratch_bytes)
    table = next((s for s in plan.sources if isinstance(s, MaskedTable)), None)

    def one(tile: jax.Array) -> jax.Array:
        queries = tile_queries(tile)

        def run(size: int) -> jax.Array:
            cut = [dataclasses.replace(s, size=size) if s is table else s for s in plan.sources]
            return attend(q[queries], [source.gather(queries)[:2] for source in cut], sink, scale)

        return run(0) if table is None else run_prefix(table.needed(queries), prefix_sizes(table.size), run)

    out = one(plan.rows[0]) if plan.rows.shape[0] == 1 else lax.map(one, plan.rows)
    return out.reshape(-1, *q.shape[1:])[plan.place]


def make_plan(q: jax.Array, row_sets: Sequence[RowSet], tiles: Tiles | None, scratch_bytes: int) -> Plan:
    """Cuts the tiles further where gathered keys and logits would exceed `scratch_bytes`; at least one query each."""
    shared = tiles is not None or all(s.rows.table.shape[0] == 1 for s in row_sets)
    rows, place = (tiles[0], tiles[2]) if tiles is not None else _whole(q.shape[0], TILE)
    width = rows.shape[1]
    sources = [choose(row_set, width, shared, scratch_bytes) for row_set in row_sets]
    if any(per_query for _, per_query in (source.keys(width) for source in sources)):
        scratch_bytes = min(scratch_bytes, CACHED_BYTES)
    part = next((n for n in range(width, 1, -1) if width % n == 0 and _bytes(q, sources, n) <= scratch_bytes), 1)
    return Plan(sources, rows.reshape(-1, part), place)


def tile_queries(tile: jax.Array) -> jax.Array:
    """Query rows of a tile whose padding repeats its first row: another sequence's list must not be read here."""
    return jnp.maximum(jnp.where(tile < 0, tile[0], tile), 0)


def _whole(queries: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """(rows, place) of tiles of consecutive queries."""
    tile = min(tile, queries)
    order = jnp.arange(-(-queries // tile) * tile, dtype=jnp.int32).reshape(-1, tile)
    return jnp.where(order < queries, order, -1), jnp.arange(queries)


def _bytes(q: jax.Array, sources: Sequence[Source], tile: int) -> int:
    """Bytes of gathered keys and of logits and weights of one tile, static."""
    keys = [source.keys(tile) for source in sources]
    gathered = sum(count * (tile if per_query else 1) for count, per_query in keys)
    return 4 * (gathered * q.shape[2] + 2 * tile * q.shape[1] * sum(count for count, _ in keys))
