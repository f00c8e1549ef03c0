"""Arenas are pages of bytes uint8[P, page_bytes]: reading and writing packed rows in them by (page, byte offset)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.numerics.formats import KVFormat


def read_bytes(arena: jax.Array, page: jax.Array, offset: jax.Array, nbytes: int) -> jax.Array:
    """Gathers `nbytes` bytes at each (page, offset).

    Args:
      arena: uint8[P, page_bytes].
      page, offset: int32[...]; page < 0 reads arbitrary bytes that the caller must mask.

    Returns: uint8[..., nbytes].
    """
    index = jnp.stack([jnp.maximum(page, 0), jnp.broadcast_to(offset, page.shape)], axis=-1)
    dims = lax.GatherDimensionNumbers(offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    return lax.gather(arena, index, dims, slice_sizes=(1, nbytes), mode=lax.GatherScatterMode.CLIP)


def read_rows(arena: jax.Array, page: jax.Array, offset: jax.Array, fmt: KVFormat, width: int) -> jax.Array:
    """Unpacked rows float32[..., width]; rows with page < 0 are exactly zero whatever bytes lie there."""
    rows = fmt.unpack(read_bytes(arena, page, offset, fmt.row_bytes(width)), width)
    return jnp.where((page >= 0)[..., None], rows, 0.0)


def write_bytes(arena: jax.Array, page: jax.Array, offset: jax.Array, rows: jax.Array) -> jax.Array:
    """Scatters packed rows uint8[N, row_bytes] to (page, offset) int32[N]; rows with page < 0 write nothing.

    Two live rows of one call must not share an address (the order of duplicates is undefined in XLA).
    """
    # A negative index would wrap to the last page even with mode="drop"; one past the end is dropped.
    index = jnp.stack([jnp.where(page < 0, arena.shape[0], page), offset], axis=-1)
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(arena, index, rows, dims, mode=lax.GatherScatterMode.FILL_OR_DROP)
