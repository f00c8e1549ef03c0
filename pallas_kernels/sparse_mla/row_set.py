"""What `sparse_mla` attends to."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.common.formats import PagedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSet:
    """Rows that each query lists: numbers of its sequence in `rows`, -1 = none; a number listed twice counts twice.

    run: a promise about lists like a sliding window's. A query lists consecutive rows, each once, and all rows that
    the queries of a tile list lie within K + B - 1 consecutive ones (K = length of the lists, B = queries of the tile).
    selected: the same rows as a mask over all N that a table addresses, for lists without repeats. Where it is given
    and a tile has queries enough to share them, the XLA path multiplies all rows of a sequence under it and does not
    look at the list; a kernel does not look at the mask.
    """

    rows: PagedRows
    index: jax.Array  # int32[T, K]
    selected: jax.Array | None = None  # bool[T, N]
    run: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def picks(self) -> int:
        """Length of the lists, static."""
        return self.index.shape[1]
