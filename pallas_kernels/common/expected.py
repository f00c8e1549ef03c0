"""Packed rows decoded by tables in NumPy float64: what GPU results are compared with."""

from __future__ import annotations

import numpy as np

from pallas_kernels.common.formats import FORMATS, PagedRows

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BYTES = np.arange(256)
_STEPS = np.where(_BYTES & 0x78, 8, 0) + (_BYTES & 7)  # in units of 2^-9 times the exponent's power of two
_E4M3 = np.where(_BYTES & 0x80, -1.0, 1.0) * _STEPS * 2.0 ** (np.maximum(_BYTES >> 3 & 15, 1) - 10)
_E4M3[[0x7F, 0xFF]] = np.nan
_E8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan)


def unpack(rows: np.ndarray, format_name: str, width: int) -> np.ndarray:
    """Packed rows uint8[..., row_bytes] -> float64[..., width]."""
    fmt = FORMATS[format_name]
    codes, scales = np.split(np.ascontiguousarray(rows), [fmt.code_bytes(width)], axis=-1)
    values = _decode(codes, fmt.element)
    if fmt.scale is None:
        return values
    factors = _decode(np.ascontiguousarray(scales), fmt.scale)
    return values * np.repeat(factors, width // fmt.num_scales(width), axis=-1)


def rows_of(rows: PagedRows, query: int, index: np.ndarray) -> np.ndarray:
    """The listed rows of one query that exist, float64[n, width], in the order of the list int32[K]."""
    layout, table = rows.layout, np.asarray(rows.table)[int(rows.seq[query])]
    found = []
    for row in np.asarray(index).tolist():
        page = row // layout.rows_per_page
        if row >= 0 and page < len(table) and table[page] >= 0:
            found.append(
                (int(table[page]), (layout.offset + row % layout.rows_per_page * layout.row_bytes) // rows.unit)
            )
    if not found:
        return np.zeros((0, layout.width))
    length = layout.row_bytes // rows.unit
    data = np.stack([np.asarray(rows.arena[page, start : start + length]) for page, start in found])
    return unpack(data, layout.format, layout.width) if rows.unit == 1 else data.astype(np.float64)


def sequence_rows(rows: PagedRows, seq: int) -> np.ndarray:
    """All rows of one block table, float64[W * rows_per_page, width]; any values where there is no page."""
    layout = rows.layout
    start, size = layout.offset // rows.unit, layout.row_bytes // rows.unit
    pages = rows.arena[:, start : start + layout.rows_per_page * size][np.maximum(rows.table[seq], 0)]
    data = np.asarray(pages).reshape(-1, size)
    return unpack(data, layout.format, layout.width) if rows.unit == 1 else data.astype(np.float64)


def _decode(data: np.ndarray, code: str) -> np.ndarray:
    if code == "e2m1":
        pairs = np.stack([data & 15, data >> 4], axis=-1)
        return _E2M1[pairs.reshape(*data.shape[:-1], -1)]
    if code == "e4m3":
        return _E4M3[data]
    if code == "e8m0":
        return _E8M0[data]
    if code == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view("<f4").astype(np.float64)
