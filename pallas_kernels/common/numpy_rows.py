"""Packed rows -> float64 in NumPy: what the results of kernels are compared with (cases), free of JAX's arithmetic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.formats import PagedRows, RowLayout

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def unpack_numpy(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """uint8[..., row_bytes] (of unscaled rows also [..., width] in their own dtype) -> float64[..., width]."""
    fmt, width = layout.fmt, layout.width
    if rows.dtype != np.uint8:
        return rows.astype(np.float64)
    if fmt.scale is None:
        return np.ascontiguousarray(rows).view(np.dtype(jnp.dtype(fmt.element))).astype(np.float64)
    codes, scales = rows[..., : fmt.code_bytes(width)], rows[..., fmt.code_bytes(width) :]
    if fmt.element == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*rows.shape[:-1], width)
        values = _E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    else:
        values = _e4m3(codes)
    factors = {"e4m3": _e4m3, "e8m0": lambda c: 2.0 ** (c.astype(np.float64) - 127), "float32": _float32}[fmt.scale](
        scales
    )
    return values * np.repeat(factors, width // factors.shape[-1], axis=-1)


def sequence_rows(rows: PagedRows, seq: int) -> np.ndarray:
    """All rows of one block table, float64[W * rows_per_page, width]; any values where there is no page."""
    layout = rows.layout
    start, size = layout.offset // rows.unit, layout.row_bytes // rows.unit
    pages = rows.arena[:, start : start + layout.rows_per_page * size][np.maximum(rows.table[seq], 0)]
    return unpack_numpy(pages.reshape(-1, size), layout)


def _e4m3(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes).view(np.dtype(jnp.float8_e4m3fn)).astype(np.float64)


def _float32(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f4").astype(np.float64)
