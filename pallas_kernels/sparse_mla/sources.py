"""Four ways to get at the keys of a tile of queries in plain XLA, and which of them is the least work."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.gather import read_rows, read_tables
from pallas_kernels.sparse_mla.row_set import RowSet

# Measured on two CPU cores with 8 to 64 heads and 512 picks of 1,024 to 4,096 rows: a key of a dense product costs what
# a picked one does, whose few queries stay in the cache, and a mask must be made of the lists. So without a given mask
# dense only where the list is as long as the table.
DENSE_TILE_ROWS, DENSE_KEYS_PER_PICK = 16, 1


class Keys(NamedTuple):
    """Keys that B queries meet: their own K each, or K shared by all."""

    keys: jax.Array  # float32[B, K, D] or [K, D]
    count: jax.Array  # [B, K]: bool, or float32 where a key may count more than once
    page: jax.Array  # int32[B, K] or [K]: where they lie in the arena, -1 = nowhere
    column: jax.Array


@dataclasses.dataclass(frozen=True)
class Picked:
    """Each query gathers its own rows as bytes."""

    rows: RowSet

    def gather(self, queries: jax.Array) -> Keys:
        """The keys of query rows int32[B] of one tile."""
        paged = self.rows.rows
        page, column = paged.address(self.rows.index[queries], paged.seq[queries][:, None])
        return Keys(read_rows(paged.arena, page, column, paged.layout), page >= 0, page, column)

    def keys(self, tile: int) -> tuple[int, bool]:
        """(keys each query meets in a tile of that many queries, whether each query gathers its own), static."""
        return self.rows.picks, True


@dataclasses.dataclass(frozen=True)
class Table:
    """All rows of a sequence unpacked once, picked per query: worth it when rows are listed more often than exist."""

    rows: RowSet
    table_SxNxD: jax.Array

    def gather(self, queries: jax.Array) -> Keys:
        """As `Picked.gather`."""
        paged, index = self.rows.rows, self.rows.index[queries]
        seq = paged.seq[queries][:, None]
        page, column = paged.address(index, seq)
        valid = page >= 0
        keys = jnp.where(valid[..., None], self.table_SxNxD[seq, jnp.where(valid, index, 0)], 0.0)
        return Keys(keys, valid, page, column)

    def keys(self, tile: int) -> tuple[int, bool]:
        """As `Picked.keys`."""
        return self.rows.picks, True


@dataclasses.dataclass(frozen=True)
class MaskedTable(Table):
    """As `Table`, but a tile of one sequence reads the first `size` rows under a mask.

    One dense product serves all queries of the tile: nothing is gathered, but every row is multiplied.
    """

    size: int

    def gather(self, queries: jax.Array) -> Keys:
        """Keys float32[size, D] shared by the tile, count [B, size]."""
        paged = self.rows.rows
        seq, row = paged.seq[queries[0]], jnp.arange(self.size)
        page, column = paged.address(row, seq)
        count = self._count(queries) & (page >= 0) if self.given else jnp.where(page >= 0, self._count(queries), 0.0)
        # Rows that nobody lists may hold any bytes; 0 * NaN would poison the product.
        seen = jnp.any(count.astype(bool), axis=0)
        return Keys(jnp.where(seen[:, None], self.table_SxNxD[seq, : self.size], 0.0), count, page, column)

    @property
    def given(self) -> bool:
        """Whether the caller gave the mask; else it is made from the lists."""
        return self.rows.selected is not None

    def _count(self, queries: jax.Array) -> jax.Array:
        """[B, size]: bool from the mask, float32 from lists, which may repeat a row."""
        if self.given:
            return self.rows.selected[queries, : self.size]
        index, line = self.rows.index[queries], jnp.arange(queries.shape[0])[:, None]
        # A negative index would wrap to the last row even with mode="drop"; one past the end is dropped.
        target = jnp.where(index < 0, self.size, index)
        return jnp.zeros((queries.shape[0], self.size), jnp.float32).at[line, target].add(1.0, mode="drop")

    def keys(self, tile: int) -> tuple[int, bool]:
        """As `Picked.keys`."""
        return self.size, False

    def needed(self, queries: jax.Array) -> jax.Array:
        """Rows from the start of the table that the tile reads, int32[]."""
        if not self.given:
            return jnp.max(self.rows.index[queries]) + 1
        used = jnp.any(self.rows.selected[queries], axis=0)
        return jnp.max(jnp.where(used, jnp.arange(used.shape[0]) + 1, 0))


@dataclasses.dataclass(frozen=True)
class Band:
    """A `run` of rows (see `RowSet`): a tile of one sequence reads one slice that holds the runs of all its queries."""

    rows: RowSet

    def gather(self, queries: jax.Array) -> Keys:
        """Keys float32[K + B - 1, D] shared by the tile, count bool[B, K + B - 1]."""
        paged, index = self.rows.rows, self.rows.index[queries]
        listed = index >= 0
        last = jnp.max(index, axis=1)
        first = jnp.min(jnp.where(listed, index, paged.rows_per_seq), axis=1)
        row = jnp.min(first) + jnp.arange(self.keys(queries.shape[0])[0])
        count = (row >= first[:, None]) & (row <= last[:, None])
        page, column = paged.address(jnp.where(jnp.any(count, axis=0), row, -1), paged.seq[queries[0]])
        return Keys(read_rows(paged.arena, page, column, paged.layout), count & (page >= 0), page, column)

    def keys(self, tile: int) -> tuple[int, bool]:
        """As `Picked.keys`."""
        return self.rows.picks + tile - 1, False


Source = Picked | Table | MaskedTable | Band


def unpacks_table(picks: int, rows: int, width: int, scratch_bytes: int) -> bool:
    """Whether all `rows` that the tables of a call address are unpacked once, not each of `picks` listed ones."""
    return picks >= rows and 4 * rows * width <= scratch_bytes


def choose(row_set: RowSet, tile: int, shared: bool, scratch_bytes: int) -> Source:
    """The least work for tiles of that many queries; shared: the queries of a tile are of one sequence."""
    if row_set.run and shared:
        return Band(row_set)
    paged, (queries, picks) = row_set.rows, row_set.index.shape
    seqs, entries = paged.table.shape[0], paged.rows_per_seq
    if not unpacks_table(queries * picks, seqs * entries, paged.layout.width, scratch_bytes):
        return Picked(row_set)
    table = read_tables(paged)
    dense = row_set.selected is not None or entries <= DENSE_KEYS_PER_PICK * picks
    if dense and shared and tile >= DENSE_TILE_ROWS:
        return MaskedTable(row_set, table, entries)
    return Table(row_set, table)
