"""Packed rows in NumPy, by tables of all values: what cases expect and GPU results are compared with.

No rule of `codes` or `encode`: values are looked up, codes searched.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.common.formats import Format, PagedRows

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3 = np.concatenate([np.arange(8) / 512, *((1 + np.arange(8) / 8) * 2.0 ** (e - 7) for e in range(1, 16))])[:127]
_MAGNITUDES = {"e2m1": _E2M1, "e4m3": _E4M3}  # in the order of their codes, which rise with them
_VALUES = {
    "e2m1": np.concatenate([_E2M1, -_E2M1]),
    "e4m3": np.concatenate([_E4M3, [np.nan], -_E4M3, [np.nan]]),
    "e8m0": np.append(2.0 ** (np.arange(255) - 127.0), np.nan),
}


def decode(codes: np.ndarray, code: str) -> np.ndarray:
    """float64 values of codes "e2m1", "e4m3" or "e8m0", NaN for those that are no number."""
    return _VALUES[code][codes]


def nearest(values: np.ndarray, element: str) -> np.ndarray:
    """int32 codes of float32 values: the nearest of the table, of two the even code, saturating; the sign on top."""
    table = _MAGNITUDES[element]
    middles, magnitude = (table[1:] + table[:-1]) / 2, np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(middles, magnitude, side) for side in ("left", "right"))
    code = np.where(below % 2 == 0, below, above)
    return (code + np.signbit(values) * (len(_VALUES[element]) // 2)).astype(np.int32)


def power_of_two_scale(amax: np.ndarray, largest: float) -> np.ndarray:
    """UE8M0 codes: the smallest power of two that clips nothing up to amax."""
    amax = amax.astype(np.float64)
    exponent = np.floor(np.log2(amax / largest)).astype(np.int32) - 1
    for _ in range(3):
        exponent += largest * 2.0**exponent < amax
    return exponent + 127


def pack(values: np.ndarray, fmt: Format) -> np.ndarray:
    """float32[N, D] -> uint8[N, row_bytes]."""
    rows, width = values.shape
    if fmt.scale is None:
        bits = values.astype(np.float32).view(np.uint32)
        return (bits if fmt.element == "float32" else bfloat16_bits(bits)).view(np.uint8).reshape(rows, -1)
    grouped = values.reshape(rows, fmt.num_scales(width), -1)
    largest = _MAGNITUDES[fmt.element][-1]
    amax = np.maximum(np.abs(grouped).max(-1), np.float32(fmt.amax_floor))
    if fmt.scale == "e8m0":
        codes = power_of_two_scale(amax, largest)
        scales, data = np.float32(2.0) ** (codes - 127), codes.astype(np.uint8)
    else:
        scales = amax / np.float32(largest)
        data = scales.astype("<f4").view(np.uint8).reshape(rows, -1)
        if fmt.scale == "e4m3":
            data = nearest(scales, "e4m3").astype(np.uint8)
            scales = decode(data, "e4m3")
    quotient = grouped / scales[..., None].astype(np.float32)
    element = nearest(quotient, fmt.element).reshape(rows, width).astype(np.uint8)
    if fmt.element == "e2m1":
        element = element[:, 0::2] | element[:, 1::2] << 4
    return np.concatenate([element, data], axis=1)


def bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """uint32 patterns of float32 -> uint16 patterns of bfloat16, to nearest, ties to even."""
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def unpack(rows: np.ndarray, fmt: Format, width: int) -> np.ndarray:
    """Packed rows uint8[..., row_bytes] -> float64[..., width]."""
    codes, scales = (np.ascontiguousarray(part) for part in np.split(rows, [fmt.code_bytes(width)], axis=-1))
    values = _read(codes, fmt.element)
    if fmt.scale is None:
        return values
    return values * np.repeat(_read(scales, fmt.scale), width // fmt.num_scales(width), axis=-1)


def _read(data: np.ndarray, code: str) -> np.ndarray:
    """float64 values of little-endian codes in bytes; of two 4-bit codes the low nibble is first."""
    if code == "e2m1":
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
    if code in _VALUES:
        return decode(data, code)
    if code == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view("<f4").astype(np.float64)


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
    return _unpacked(np.stack([np.asarray(rows.arena[page, start : start + length]) for page, start in found]), rows)


def sequence_rows(rows: PagedRows, seq: int) -> np.ndarray:
    """All rows of one block table, float64[W * rows_per_page, width]; any values where there is no page."""
    layout = rows.layout
    start, size = layout.offset // rows.unit, layout.row_bytes // rows.unit
    pages = rows.arena[:, start : start + layout.rows_per_page * size][np.maximum(rows.table[seq], 0)]
    return _unpacked(np.asarray(pages).reshape(-1, size), rows)


def _unpacked(data: np.ndarray, rows: PagedRows) -> np.ndarray:
    """Rows as they lie in the arena, which may hold unscaled ones in their own dtype -> float64."""
    return unpack(data, rows.layout.fmt, rows.layout.width) if rows.unit == 1 else data.astype(np.float64)
