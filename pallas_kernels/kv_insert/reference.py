"""The contract of `kv_insert` in plain jnp, one row after the other."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common import encode
from pallas_kernels.common.formats import CODE_BITS, RowLayout
from pallas_kernels.kv_insert.insert import Insert


def kv_insert(arenas: tuple[jax.Array, ...], inserts: Sequence[Insert]) -> tuple[jax.Array, ...]:
    """Each row rotated in float32, rounded to its dtype, packed in its format and written where it belongs."""
    arenas = list(arenas)
    for insert in inserts:
        arena = arenas[insert.arena]
        page, column = insert.address(arena)
        for n in range(insert.values.shape[0]):
            row = pack(rotated(insert, n), insert.layout)
            if 0 <= page[n] < arena.shape[0]:
                arena = arena.at[page[n], column[n] + jnp.arange(row.shape[0])].set(row)
        arenas[insert.arena] = arena
    return tuple(arenas)


def rotated(insert: Insert, n: int) -> jax.Array:
    """Row n, its last r elements rotated as pairs: float32[D] of values of its dtype."""
    row = insert.values[n].astype(jnp.float32)
    if not insert.rope_width:
        return row
    tail = row[row.shape[0] - insert.rope_width :]
    pairs = encode.rotate(tail[0::2], tail[1::2], insert.cos[n], insert.sin[n], encode.XLA_EXACT)
    turned = encode.round_to(jnp.stack(pairs, axis=-1).reshape(-1), insert.values.dtype)
    return jnp.concatenate([row[: -insert.rope_width], turned])


def pack(row: jax.Array, layout: RowLayout) -> jax.Array:
    """float32[D] -> uint8[row_bytes]: all element codes, then all scales; little-endian, low nibble first."""
    fmt = layout.fmt
    groups = row.reshape(fmt.num_scales(layout.width) or 1, -1)
    (codes,), scales = encode.quantise([groups], fmt, encode.XLA_EXACT)
    parts = [_bytes(codes.reshape(-1), CODE_BITS[fmt.element])]
    if scales is not None:
        parts.append(_bytes(scales.reshape(-1), CODE_BITS[fmt.scale]))
    return jnp.concatenate(parts)


def _bytes(codes: jax.Array, bits: int) -> jax.Array:
    if bits == 4:
        return (codes[0::2] | (codes[1::2] << 4)).astype(jnp.uint8)
    return jnp.stack([codes >> shift for shift in range(0, bits, 8)], axis=-1).reshape(-1).astype(jnp.uint8)
