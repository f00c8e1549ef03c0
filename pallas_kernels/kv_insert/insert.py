"""The argument of `kv_insert`: new rows of one kind and where they go."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.common.formats import PagedRows, RowLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Insert:
    """N rows of one format for one arena.

    Row n goes to running row `index[n]` of sequence `seq[n]`, found through `table` as in `formats.PagedRows`. Rows
    with a negative index, behind the table or on page -1 are padding and write nothing, whatever their values.
    """

    values: jax.Array  # float32 or bfloat16 [N, D], not rotated
    cos: jax.Array | None  # float32[N, r / 2] for the last r elements, adjacent pairs; None = no rotation
    sin: jax.Array | None
    index: jax.Array  # int32[N]
    seq: jax.Array  # int32[N] table rows
    table: jax.Array  # int32[S, W] page numbers, -1 = no page
    layout: RowLayout = dataclasses.field(metadata=dict(static=True))
    arena: int = dataclasses.field(default=0, metadata=dict(static=True))  # which arena of the call

    @property
    def rope_width(self) -> int:
        """r: how many of the last elements are rotated, static."""
        return 0 if self.cos is None else 2 * self.cos.shape[1]

    def address(self, arena: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(page, byte) of each row in its arena; page -1 where nothing is written."""
        rows = PagedRows(arena, self.table, self.seq, self.layout)
        return rows.address(self.index, self.seq)
