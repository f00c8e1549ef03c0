"""Packed weights and their products, one element at a time. Source: reference inference/kernel.py, both GEMMs."""

import numpy as np

from tests.oracles.quant import E2M1, E4M3, group_scale, signed_code

F32 = np.float32
BLOCK = 32


def value(code, table):
    """Element of a table by code; the bit above the table's indices is the sign."""
    sign_bit = 8 if table is E2M1 else 128
    magnitude = F32(table[code & (sign_bit - 1)])
    return -magnitude if code & sign_bit else magnitude


def power(code):
    """UE8M0 byte -> scale."""
    return F32(2.0 ** (int(code) - 127))


def element(kind, codes, scale, o, i):
    """(unscaled value, scale) of weight [o, i]."""
    if kind == "fp8":
        return value(int(codes[o, i]), E4M3), power(scale[o // BLOCK, i // BLOCK])
    byte = int(codes[o, i // 2])
    return value(byte >> 4 if i % 2 else byte & 15, E2M1), power(scale[o, i // BLOCK])


def unpack(kind, codes, scale):
    """float32 [out, in]."""
    width = codes.shape[1] * (1 if kind == "fp8" else 2)
    weight = np.zeros((codes.shape[0], width), F32)
    for o in range(weight.shape[0]):
        for i in range(width):
            number, factor = element(kind, codes, scale, o, i)
            weight[o, i] = number * factor
    return weight


def rounded_input(x):
    """(E4M3 values, scale of each block of 32) of one input row."""
    values, scales = np.zeros(len(x), F32), []
    for first in range(0, len(x), BLOCK):
        block = x[first : first + BLOCK]
        scale, _ = group_scale(max(np.max(np.abs(block)), F32(1e-4)), 448.0, "ue8m0")
        scales.append(scale)
        for i, number in enumerate(block):
            values[first + i] = value(signed_code(number / scale, E4M3), E4M3)
    return values, scales


class Matrix:
    """A packed weight that multiplies one input row, in the place of a float array; `linear` without its loops."""

    def __init__(self, kind, codes, scale):
        table = E4M3 if kind == "fp8" else E2M1
        if kind == "fp4":
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        codes_of = [code for code in range(2 * len(E4M3) + 2 if kind == "fp8" else 16)]
        values = np.array([value(code, table) if code % 128 < len(E4M3) else 0 for code in codes_of], F32)
        self.values = values[codes].reshape(len(codes), -1, BLOCK)
        rows = np.arange(len(codes)) // BLOCK if kind == "fp8" else np.arange(len(codes))
        self.scales = np.array([power(code) for code in range(255)], F32)[scale[rows]]

    def __matmul__(self, x):
        values, scales = rounded_input(np.asarray(x, F32))
        out = np.zeros(len(self.values), F32)
        for k, scale in enumerate(scales):
            total = self.values[:, k].astype(np.float64) @ values[k * BLOCK : (k + 1) * BLOCK].astype(np.float64)
            out += total.astype(F32) * scale * self.scales[:, k]
        return out


def linear(kind, x, codes, scale):
    """x [rows, in] times the packed weight: float32 [rows, out]; each block summed exactly, blocks added in order."""
    out = np.zeros((len(x), codes.shape[0]), F32)
    for row in range(len(x)):
        values, scales = rounded_input(np.asarray(x[row], F32))
        for o in range(codes.shape[0]):
            for k, input_scale in enumerate(scales):
                total = np.float64(0)
                for i in range(k * BLOCK, (k + 1) * BLOCK):
                    number, weight_scale = element(kind, codes, scale, o, i)
                    total += np.float64(values[i]) * np.float64(number)
                out[row, o] += F32(total) * input_scale * weight_scale
    return out
