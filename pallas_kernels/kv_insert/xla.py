"""`kv_insert` as array operations: rows are packed together, then scattered into the arena in place.

Temporaries are a few times the size of the rows, which the caller holds anyway, so there is nothing to tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import encode
from pallas_kernels.common.formats import CODE_BITS, RowLayout
from pallas_kernels.kv_insert.insert import Insert


def kv_insert(arenas: tuple[jax.Array, ...], inserts: Sequence[Insert]) -> tuple[jax.Array, ...]:
    """As `reference.kv_insert`."""
    arenas = list(arenas)
    for insert in inserts:
        arena = arenas[insert.arena]
        arenas[insert.arena] = _scatter(arena, *insert.address(arena), pack(rotated(insert), insert.layout))
    return tuple(arenas)


def rotated(insert: Insert) -> jax.Array:
    """The rows with their last r elements rotated, in their dtype."""
    values, half = insert.values, insert.rope_width // 2
    if not half:
        return values
    head, tail = values[:, : -2 * half], values[:, -2 * half :]
    pairs = tail.astype(jnp.float32).reshape(-1, half, 2)
    turned = encode.rotate(pairs[..., 0], pairs[..., 1], insert.cos, insert.sin, encode.XLA_EXACT)
    turned = jnp.stack(turned, axis=-1).reshape(tail.shape)
    return jnp.concatenate([head, encode.round_to(turned, values.dtype).astype(values.dtype)], axis=-1)


def pack(values: jax.Array, layout: RowLayout) -> jax.Array:
    """float32 or bfloat16 [N, D] -> packed rows uint8[N, row_bytes]."""
    fmt, rows = layout.fmt, values.shape[0]
    groups = fmt.num_scales(layout.width) or 1
    grouped = values.astype(jnp.float32).reshape(rows, groups, layout.width // groups)
    (codes,), scales = encode.quantise([grouped], fmt, encode.XLA_EXACT)
    parts = [_bytes(codes.reshape(rows, -1), CODE_BITS[fmt.element])]
    if scales is not None:
        parts.append(_bytes(scales[..., 0], CODE_BITS[fmt.scale]))
    return jnp.concatenate(parts, axis=-1)


def _bytes(codes: jax.Array, bits: int) -> jax.Array:
    """int32 codes [N, n] -> uint8[N, n * bits / 8], little-endian; of two 4-bit codes the even index is low."""
    lanes = 32 // bits
    if codes.shape[1] % lanes:
        words = codes.astype({4: jnp.uint8, 8: jnp.uint8, 16: jnp.uint16}[bits])
        if bits == 4:
            words = words[:, 0::2] | (words[:, 1::2] << 4)
    else:
        # Whole words by one reduction: the CPU backend otherwise fuses the quantiser into the concatenation of codes
        # and scales, element by element, at up to ten times the cost.
        shifted = codes.reshape(codes.shape[0], -1, lanes) << (bits * jnp.arange(lanes, dtype=jnp.int32))
        words = lax.reduce_or(shifted, (2,))
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(codes.shape[0], -1)


def _scatter(arena: jax.Array, page: jax.Array, column: jax.Array, rows: jax.Array) -> jax.Array:
    # A negative index would wrap to the last page even where out-of-range ones are dropped; one past the end is.
    index = jnp.stack([jnp.where(page < 0, arena.shape[0], page), column], axis=-1)
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(arena, index, rows, dims, mode=lax.GatherScatterMode.FILL_OR_DROP)
