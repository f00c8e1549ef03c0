"""Inputs for the cases of every op: random arrays on a device, or only their shapes, from one description."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.formats import RowLayout

Shape = tuple[int, ...]


@dataclasses.dataclass
class Draw:
    """Draws arrays one after the other from one seed. seed None: shapes only, for compilation."""

    seed: int | None
    count: int = 0

    @property
    def abstract(self) -> bool:
        """Whether only shapes are wanted."""
        return self.seed is None

    def _key(self) -> jax.Array:
        self.count += 1
        return jax.random.fold_in(jax.random.key(self.seed), self.count)

    def normal(self, shape: Shape, dtype: Any = jnp.float32) -> Any:
        """Standard normal values."""
        if self.abstract:
            return jax.ShapeDtypeStruct(shape, dtype)
        return jax.random.normal(self._key(), shape, jnp.float32).astype(dtype)

    def integers(self, low: int, high: int, shape: Shape, dtype: Any = jnp.int32) -> Any:
        """Uniform integers in [low, high)."""
        if self.abstract:
            return jax.ShapeDtypeStruct(shape, dtype)
        return jax.random.randint(self._key(), shape, low, high, jnp.int32).astype(dtype)

    def full(self, shape: Shape, value: Any, dtype: Any = jnp.int32) -> Any:
        """A constant array."""
        if self.abstract:
            return jax.ShapeDtypeStruct(shape, dtype)
        return jnp.full(shape, value, dtype)

    def given(self, values: Any, dtype: Any = jnp.int32) -> Any:
        """An array with these values."""
        array = np.asarray(values)
        return jax.ShapeDtypeStruct(array.shape, dtype) if self.abstract else jnp.asarray(array, dtype)

    def pages(self, seqs: int, width: int, total: int | None = None) -> Any:
        """Block tables int32[seqs, width]: distinct pages, shuffled, of an arena of `total` (default: just enough)."""
        if self.abstract:
            return jax.ShapeDtypeStruct((seqs, width), jnp.int32)
        order = jax.random.permutation(self._key(), total or seqs * width)
        return order[: seqs * width].reshape(seqs, width).astype(jnp.int32)

    def arena(self, pages: int, page_bytes: int, *layouts: RowLayout) -> Any:
        """uint8[pages, page_bytes]: random codes with finite values and scales near 2^-3 in the rows of `layouts`."""
        if self.abstract:
            return jax.ShapeDtypeStruct((pages, page_bytes), jnp.uint8)
        arena = jax.random.bits(self._key(), (pages, page_bytes), jnp.uint8)
        for layout in layouts:
            end = layout.offset + layout.rows_per_page * layout.row_bytes
            rows = arena[:, layout.offset : end].reshape(pages, layout.rows_per_page, layout.row_bytes)
            rows = _finite(rows, layout, self._key())
            arena = arena.at[:, layout.offset : end].set(rows.reshape(pages, -1))
        return arena


def _finite(rows: jax.Array, layout: RowLayout, key: jax.Array) -> jax.Array:
    """Random bytes of rows [..., row_bytes] made into rows without NaN whose values are of the order of one."""
    fmt, width = layout.fmt, layout.width
    if fmt.element in ("bfloat16", "float32"):
        values = jax.random.normal(key, (*rows.shape[:-1], width), jnp.float32)
        codes = jax.lax.bitcast_convert_type(values.astype(jnp.dtype(fmt.element)), jnp.uint8)
        return codes.reshape(*rows.shape[:-1], -1)
    codes, scales = rows[..., : fmt.code_bytes(width)], rows[..., fmt.code_bytes(width) :]
    if fmt.element == "e4m3":
        codes = jnp.where(codes & 0x40 != 0, codes & 0xBF, codes)  # magnitudes below 2: no NaN
    jitter = scales & 3
    if fmt.scale == "e4m3":
        scales = 0x20 + jitter  # 2^-3 and a little more
    elif fmt.scale == "e8m0":
        scales = 124 + jitter  # 2^-3 to 1
    else:
        value = jax.random.uniform(key, (*rows.shape[:-1], fmt.num_scales(width)), jnp.float32, 0.1, 0.3)
        scales = jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(scales.shape)
    return jnp.concatenate([codes, scales.astype(jnp.uint8)], axis=-1)
