"""Packed rows in a kernel: loaded by column chunk and decoded in registers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.codes import DECODERS
from pallas_kernels.common.formats import CODE_BITS, RowLayout


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How `width` columns are cut into `count` chunks.

    paired: chunks 2 j and 2 j + 1 are the even and the odd columns of one range, as 4-bit codes decode to them; else
    every chunk is a range.
    """

    width: int
    count: int
    paired: bool

    @property
    def size(self) -> int:
        """Columns of a chunk."""
        return self.width // self.count

    @property
    def span(self) -> int:
        """Columns of a range that is loaded at once."""
        return self.size * 2 if self.paired else self.size

    def columns(self, chunk: int) -> tuple[int, int]:
        """(first column, step) of a chunk."""
        return (chunk // 2 * self.span + chunk % 2, 2) if self.paired else (chunk * self.size, 1)

    def problems(self, layout: RowLayout) -> list[str]:
        """Why rows of that layout cannot be decoded in such chunks."""
        broken = []
        if self.width % self.count or self.size & (self.size - 1):
            broken.append(f"width={self.width} cut into chunks={self.count} must give a power of two")
        elif self.paired and self.count % 2:
            broken.append(f"chunks={self.count} must be even: 4-bit codes are decoded to even and odd columns")
        elif layout.fmt.group and self.span % layout.fmt.group and layout.fmt.group % self.span:
            broken.append(f"ranges of {self.span} columns must be whole groups of {layout.fmt.group}")
        return broken


def load_chunks(
    ref: Any, layout: RowLayout, page: jax.Array, column: jax.Array, mask: jax.Array, chunks: Chunks, dtype: Any
) -> list[jax.Array]:
    """The chunks [N, size] of rows [N] that begin at (page, column), in `dtype`; zeros where mask is False."""
    out = []
    for start in range(0, chunks.width, chunks.span):
        at = (ref, layout, page, column, mask)
        parts = _load_values(*at, start, chunks)
        if layout.fmt.scale is not None:
            scales = _load_scales(*at, start, chunks.span)
            parts = [part * common.per_group(scales, chunks.size) for part in parts]
        out += [part.astype(dtype) for part in parts]
    return out


def _load_values(ref, layout: RowLayout, page, column, mask, start: int, chunks: Chunks) -> list[jax.Array]:
    """Unscaled values of columns start .. start + span: one array, or even and odd columns."""
    element = layout.fmt.element
    if element == "e2m1":
        pairs = common.load_columns(ref, page, column + start // 2, chunks.size, mask).astype(jnp.int32)
        return [DECODERS[element](pairs & 15), DECODERS[element](pairs >> 4)]
    if ref.dtype != jnp.uint8:
        values = common.load_columns(ref, page, column + start, chunks.span, mask)
    else:
        codes = _load_codes(ref, page, column, start, chunks.span, CODE_BITS[element], mask)
        values = _wide(codes) if element == "bfloat16" else DECODERS[element](codes)
    return list(common.deinterleave(values)) if chunks.paired else [values]


def _wide(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes.astype(jnp.uint16), jnp.bfloat16)


def _load_scales(ref, layout: RowLayout, page, column, mask, start: int, span: int) -> jax.Array:
    """Scales float32[N, G] of the groups of columns start .. start + span."""
    fmt = layout.fmt
    first = fmt.code_bytes(layout.width)
    if fmt.group is None:
        return DECODERS[fmt.scale](_load_word(ref, page, column + first, mask))
    codes = common.load_columns(ref, page, column + first + start // fmt.group, max(1, span // fmt.group), mask)
    return DECODERS[fmt.scale](codes.astype(jnp.int32))


def _load_word(ref, page, column, mask) -> jax.Array:
    """A little-endian 32-bit code [N, 1] at any byte."""
    parts = [common.load_columns(ref, page, column + i, 1, mask).astype(jnp.int32) << (8 * i) for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _load_codes(ref, page, column, start: int, count: int, bits: int, mask) -> jax.Array:
    """Little-endian codes int32[N, count] of 8, 16 or 32 bits from byte column + start * bits / 8 on."""
    size = bits // 8
    codes = common.load_columns(ref, page, column + start * size, count * size, mask).astype(jnp.int32)
    for width in (8, 16):
        if bits > width:
            low, high = common.deinterleave(codes)
            codes = low | (high << width)
    return codes
