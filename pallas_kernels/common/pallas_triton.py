"""What the Triton kernels share: matrix products, masked gathers of bytes, and the call itself.

Pallas-Triton is deprecated since JAX 0.11. Only files of this name import it, here and in the op folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.common.encode import XLA_EXACT, Exact
from pallas_kernels.common.formats import CODE_BITS, RowLayout
from pallas_kernels.common.tiles import TileConfig

MIN_DOT = 16  # smallest side of a matrix product in Triton
GRID_LIMIT = 65_535  # programs along every grid axis but the first (CUDA programming guide)


def call(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    config: TileConfig,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """One kernel launch. Whole arrays are passed as references: kernels compute their own addresses."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=name,
    )(*operands)


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """a [M, K] times b [K, N] (or [N, K]) summed in float32.

    float32 operands are multiplied as float32: the default would be TF32 on a GPU and float32 when interpreted.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def load_columns(ref: Any, page: jax.Array, start: jax.Array, width: int, mask: jax.Array) -> jax.Array:
    """ref[page, start + (0..width-1)] for rows [N] of a 2-D reference: [N, width], 0 where mask [N] is False.

    All indices are arrays: interpretation has no masked load that mixes arrays and slices.
    """
    columns = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    pages = jnp.broadcast_to(page[:, None], columns.shape)
    other = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
    return pltriton.load(ref.at[pages, columns], mask=jnp.broadcast_to(mask[:, None], columns.shape), other=other)


def store_columns(ref: Any, page: jax.Array, start: jax.Array, value: jax.Array, mask: jax.Array) -> None:
    """Stores value [N, width] at ref[page, start + (0..width-1)] where mask [N] is True.

    Interpretation writes old values back through masked lanes, so their addresses must not be written elsewhere.
    """
    columns = start[:, None] + jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
    pages = jnp.broadcast_to(page[:, None], columns.shape)
    pltriton.store(ref.at[pages, columns], value, mask=jnp.broadcast_to(mask[:, None], columns.shape))


def row_address(
    layout: RowLayout, unit: int, table_ref: Any, seq: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(page, column, valid) of rows `index` [N] of sequence `seq` (scalar) through a block table [S, W].

    Rows below 0, behind the table or without a page are not valid; their address is page 0's first row.
    """
    width = table_ref.shape[1]
    inside = (index >= 0) & (index < width * layout.rows_per_page)
    safe = jnp.where(inside, index, 0)
    at = jnp.full(index.shape, seq, jnp.int32), safe // layout.rows_per_page
    page = pltriton.load(table_ref.at[at], mask=inside, other=-1)
    valid = inside & (page >= 0)
    # Constants are divided before they are multiplied: the compiler then knows how far a row is aligned.
    first, step = layout.offset // unit, layout.row_bytes // unit
    row = jnp.where(valid, safe % layout.rows_per_page, 0)
    return jnp.where(valid, page, 0), first + row * step, valid


def interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
    """[N, W] twice -> [N, 2 W] with even[..., i] at 2 i and odd[..., i] at 2 i + 1."""
    return jnp.stack([even, odd], axis=-1).reshape(even.shape[0], 2 * even.shape[1])


def deinterleave(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `interleave`."""
    pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2)
    even, odd = jnp.unstack(pairs, axis=-1)
    return even, odd


def per_group(scales: jax.Array, width: int) -> jax.Array:
    """[N, G] -> [N, width], each scale repeated for the width / G elements of its group."""
    rows, groups = scales.shape
    return jnp.broadcast_to(scales[:, :, None], (rows, groups, width // groups)).reshape(rows, width)


def to_bytes(codes: jax.Array, code: str) -> jax.Array:
    """int32 codes [N, W] -> uint8[N, W * bytes of a code], little-endian; 4-bit codes come as whole bytes."""
    if CODE_BITS[code] == 16:
        codes = interleave(codes, codes >> 8)
    elif CODE_BITS[code] == 32:
        codes = interleave(interleave(codes, codes >> 16), interleave(codes >> 8, codes >> 24))
    return (codes & 0xFF).astype(jnp.uint8)


def bytes_of(codes: jax.Array, code: str) -> jax.Array:
    """As `to_bytes` of one code a row, int32[N, 1], by shifts: the compiler crashes where it joins such columns."""
    shifts = 8 * jnp.arange(CODE_BITS[code] // 8, dtype=jnp.int32)[None, :]
    return ((codes >> shifts) & 0xFF).astype(jnp.uint8)


def exact(interpret: bool) -> Exact:
    """Division and multiplication that are rounded once: PTX says so, where XLA does not run the kernel.

    A plain division becomes `div.full`, two units in the last place off, and a plain product joins a sum in `fma`.
    """
    if interpret:
        return XLA_EXACT
    return Exact(divide=lambda x, y: _ptx("div.rn.f32", x, y), multiply=lambda a, b: _ptx("mul.rn.f32", a, b))


def _ptx(instruction: str, a: jax.Array, b: jax.Array | float) -> jax.Array:
    shape = jnp.broadcast_shapes(a.shape, jnp.shape(b))
    args = [jnp.broadcast_to(x, shape) for x in (a, jnp.asarray(b, jnp.float32))]
    [result] = pltriton.elementwise_inline_asm(
        f"{instruction} $0, $1, $2;", args=args, constraints="=f,f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )  # fmt: skip
    return result


def small_sides(interpret: bool, **sides: int) -> list[str]:
    """A reason for each named side of a matrix product that Triton cannot multiply; none when interpreted."""
    if interpret:
        return []
    return [f"{name}={side} is less than {MIN_DOT}, the least of a matrix product" for name, side in sides.items()
            if side < MIN_DOT]  # fmt: skip


def grid_reasons(what: str, count: int) -> list[str]:
    """The reason against more programs along the second or third grid axis than a launch takes."""
    return [f"{count:,} {what} are more than the {GRID_LIMIT:,} of a grid axis"] if count > GRID_LIMIT else []


def load_at(ref: Any, at: Sequence[jax.Array], mask: jax.Array, other: Any) -> Any:
    """ref[at] for index arrays of one shape and any rank of reference, `other` where mask is False."""
    return pltriton.load(ref.at[tuple(at)], mask=mask, other=other)


def scatter(ref: Any, at: Sequence[jax.Array], value: jax.Array, mask: jax.Array) -> None:
    """ref[at] = value where mask; masked lanes must aim at an address that nothing else writes."""
    pltriton.store(ref.at[tuple(at)], value, mask=mask)
