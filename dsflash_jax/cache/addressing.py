"""Addresses and rows of a layout's members for arrays: what needs `jnp`, so that `layout` itself stays free of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsflash_jax.cache.layout import Member


def entry_address(member: Member, tables: jax.Array, seq: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(page, byte offset) of each `entry` of sequence `seq` through block tables [S, P]; page -1 where there is none.

    `seq` broadcasts against `entry`. Only the pages asked for are read: whole table rows per query would be [T, P].
    """
    width = tables.shape[-1]
    page = tables[seq, jnp.clip(entry // member.rows_per_page, 0, width - 1)]
    inside = (entry >= 0) & (entry < width * member.rows_per_page)
    return jnp.where(inside, page, -1), member.row_offset(jnp.maximum(entry, 0))


def member_address(member: Member, page: jax.Array) -> tuple[jax.Array, jax.Array, int]:
    """(page, byte offset, bytes) of the whole member in each `page`: the last arguments of `ops.rows.read_bytes`."""
    return page, jnp.full_like(page, member.offset), member.nbytes


def unpack_member(member: Member, packed: jax.Array) -> jax.Array:
    """Bytes of whole members uint8[..., nbytes] -> their rows float32[N, width], in order of page and row."""
    return member.format.unpack(packed.reshape(-1, member.row_bytes), member.width)
