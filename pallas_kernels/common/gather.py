"""Reading packed rows from an arena in plain XLA: gathered as bytes, unpacked afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.formats import PagedRows, RowLayout
from pallas_kernels.common.unpack import unpack_rows


def slices(arena: jax.Array, page: jax.Array, column: jax.Array, length: int) -> jax.Array:
    """`length` elements of arena [P, page] from each (page, column) int32[...] on: [..., length].

    page < 0 reads arbitrary elements that the caller must mask.
    """
    index = jnp.stack([jnp.maximum(page, 0), jnp.broadcast_to(column, page.shape)], axis=-1)
    dims = lax.GatherDimensionNumbers(offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    return lax.gather(arena, index, dims, slice_sizes=(1, length), mode=lax.GatherScatterMode.CLIP)


def read_rows(arena: jax.Array, page: jax.Array, column: jax.Array, layout: RowLayout) -> jax.Array:
    """Rows at (page, column) as float32[..., width]; exactly zero where page < 0, whatever lies there."""
    data = slices(arena, page, column, layout.row_bytes // arena.dtype.itemsize)
    # Masked before unpacking: bytes of zeros are a row of zeros in every format, and XLA's CPU backend vectorises the
    # unpacking only if no mask is computed in between.
    return _values(jnp.where((page >= 0)[..., None], data, jnp.zeros((), data.dtype)), layout)


def read_tables(rows: PagedRows) -> jax.Array:
    """All rows that the block tables [S, W] reach: float32[S, W * rows_per_page, width]; any values without a page."""
    layout, unit = rows.layout, rows.unit
    start = jnp.full_like(rows.table, layout.offset // unit)
    data = slices(rows.arena, rows.table, start, layout.rows_per_page * layout.row_bytes // unit)
    return _values(data.reshape(rows.table.shape[0], rows.rows_per_seq, layout.row_bytes // unit), layout)


def _values(data: jax.Array, layout: RowLayout) -> jax.Array:
    if data.dtype == jnp.uint8:
        return unpack_rows(data, layout.fmt, layout.width)
    return data.astype(jnp.float32)
