"""Quantised rows, one element at a time, by searching tables. Source: reference inference/kernel.py, report §2.4.4."""

import struct

import numpy as np

F32 = np.float32
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Codes 0..126 by definition: exponent field 0 is subnormal in steps of 2^-9, then (1 + m/8) * 2^(e - 7). 127 is NaN.
E4M3 = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]

# name: (element table, elements per scale or None for the whole row, kind of scale, smallest amax)
RECIPES = {
    "fp4_e4m3": (E2M1, 16, "e4m3", 6 * 2.0**-9),
    "mxfp4": (E2M1, 32, "ue8m0", 6 * 2.0**-126),
    "mxfp8": (E4M3, 32, "ue8m0", 1e-4),
    "fp8_fp32": (E4M3, None, "fp32", 1e-4),
}


def nearest_code(value, table):
    """Index of the table entry nearest to value >= 0, ties to the even index, saturating at the last entry."""
    value = min(float(value), table[-1])
    for code in range(len(table) - 1):
        middle = (table[code] + table[code + 1]) / 2
        if value < middle or (value == middle and code % 2 == 0):
            return code
    return len(table) - 1


def signed_code(value, table):
    """As nearest_code, with the sign of value (of zero too) as the bit above the table's indices."""
    sign_bit = 8 if table is E2M1 else 128
    return nearest_code(abs(value), table) + (sign_bit if np.signbit(value) else 0)


def group_scale(amax, largest, kind):
    """(scale float32, its bytes) of a group whose largest magnitude, floored, is amax."""
    if kind == "ue8m0":
        exponent = -127
        while largest * 2.0**exponent < float(amax):
            exponent += 1
        return F32(2.0**exponent), bytes([exponent + 127])
    quotient = F32(amax) / F32(largest)
    if kind == "e4m3":
        code = nearest_code(quotient, E4M3)
        return F32(E4M3[code]), bytes([code])
    return quotient, struct.pack("<f", quotient)


def pack_row(name, row):
    """One row [D] of finite float32 values (any float32 or bfloat16) as bytes: all codes, then all scales."""
    row = np.asarray(row, F32)
    if name == "fp32":
        return b"".join(struct.pack("<f", value) for value in row)
    if name == "bf16":
        return b"".join(struct.pack("<H", bfloat16_bits(value)) for value in row)
    table, group, kind, floor = RECIPES[name]
    group = group or len(row)
    codes, scales = [], b""
    for start in range(0, len(row), group):
        members = row[start : start + group]
        amax = max(np.max(np.abs(members)), F32(floor))
        scale, scale_bytes = group_scale(amax, table[-1], kind)
        scales += scale_bytes
        codes += [signed_code(value / scale, table) for value in members]
    if table is E2M1:
        codes = [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]
    return bytes(codes) + scales


def unpack_row(name, data, width):
    """Inverse of pack_row: float32 [width]. Values beyond the float32 range become infinite."""
    if name == "fp32":
        return np.array([struct.unpack_from("<f", data, 4 * i)[0] for i in range(width)], F32)
    if name == "bf16":
        bits = [struct.unpack_from("<H", data, 2 * i)[0] << 16 for i in range(width)]
        return np.array(bits, np.uint32).view(F32)
    table, group, kind, _ = RECIPES[name]
    group = group or width
    out = np.zeros(width, F32)
    scale_start = width // 2 if table is E2M1 else width
    for i in range(width):
        code = data[i // 2] >> 4 * (i % 2) & 15 if table is E2M1 else data[i]
        sign_bit = 8 if table is E2M1 else 128
        value = F32(table[code % sign_bit]) * (F32(-1.0) if code & sign_bit else F32(1.0))
        g = i // group
        if kind == "fp32":
            scale = F32(struct.unpack_from("<f", data, scale_start + 4 * g)[0])
        else:
            byte = data[scale_start + g]
            scale = F32(E4M3[byte]) if kind == "e4m3" else F32(2.0 ** (byte - 127))
        with np.errstate(over="ignore"):
            out[i] = value * scale
    return out


def fake_quant(name, rows):
    """What a cache in that format gives back for rows [..., D]. Returns float32 of the same shape."""
    rows = np.asarray(rows, F32)
    flat = rows.reshape(-1, rows.shape[-1])
    out = [unpack_row(name, pack_row(name, row), len(row)) for row in flat]
    return np.array(out, F32).reshape(rows.shape)


def bfloat16_bits(value):
    """Upper half of the float32 bit pattern, rounded to nearest even."""
    bits = int(np.asarray(value, F32).view(np.uint32))
    upper, lower = bits >> 16, bits & 0xFFFF
    if lower > 0x8000 or (lower == 0x8000 and upper % 2):
        upper += 1
    return upper
