"""Packed rows in NumPy by searching tables of all values, as cases expect them; no rule of `codes` or `encode`."""

from __future__ import annotations

import numpy as np

from pallas_kernels.common.formats import Format

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
_E4M3 = np.concatenate([np.arange(8) / 512, *((1 + np.arange(8) / 8) * 2.0 ** (e - 7) for e in range(1, 16))])[:127]
_TABLES = {"e2m1": _E2M1, "e4m3": _E4M3}


def nearest(values: np.ndarray, element: str) -> np.ndarray:
    """int32 codes of float32 values: the nearest of the table, of two the even code, saturating; the sign on top."""
    table = _TABLES[element]
    middles, magnitude = (table[1:] + table[:-1]) / 2, np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(middles, magnitude, side) for side in ("left", "right"))
    code = np.where(below % 2 == 0, below, above)
    return (code + np.signbit(values) * (8 if element == "e2m1" else 128)).astype(np.int32)


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    """float64 values of codes, NaN for the two that are none."""
    table = _TABLES[element]
    size = 8 if element == "e2m1" else 128
    values = np.concatenate([table, np.full(size - len(table), np.nan)])
    return np.concatenate([values, -values])[codes]


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
    largest = _TABLES[fmt.element][-1]
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
