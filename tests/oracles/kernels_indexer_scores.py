"""Index scores over paged, packed keys: one query row, one entry, one head at a time, in float64."""

import math

import numpy as np

from tests.oracles.quant import bfloat16_bits, unpack_row

ROW_BYTES = {
    "fp4_e4m3": lambda width: width // 2 + width // 16,
    "mxfp4": lambda width: width // 2 + width // 32,
    "mxfp8": lambda width: width + width // 32,
    "fp8_fp32": lambda width: width + 4,
    "bf16": lambda width: 2 * width,
    "fp32": lambda width: 4 * width,
}


def key(arena, table_row, place, entry):
    """Key `entry` [width] of the sequence with that block table, or None where it has no page.

    arena: uint8 [P, page_bytes]. place: dict of format, width, offset, rows_per_page.
    """
    page = table_row[entry // place["rows_per_page"]]
    if page < 0:
        return None
    size = ROW_BYTES[place["format"]](place["width"])
    start = place["offset"] + entry % place["rows_per_page"] * size
    return unpack_row(place["format"], bytes(arena[page, start : start + size]), place["width"])


def score(q, weights, vector):
    """sum over heads of weight * relu(q_h . key); q [H, D], weights [H]. NaN and infinity pass as in the sum."""
    total = 0.0
    for head, weight in zip(q, weights, strict=True):
        dot = sum(float(a) * float(b) for a, b in zip(head, vector, strict=True))
        total += (0.0 if dot < 0 else dot) * float(weight)
    return total


def score_bf16(q, weights, vector):
    """`score` with the dots, the products and their sum rounded to bfloat16."""
    total = np.float32(0.0)
    for head, weight in zip(q, weights, strict=True):
        dot = as_bf16(sum(float(a) * float(b) for a, b in zip(head, vector, strict=True)))
        total += as_bf16(max(dot, np.float32(0.0)) * np.float32(weight))
    return as_bf16(total)


def as_bf16(value):
    return np.uint32(bfloat16_bits(np.float32(value)) << 16).view(np.float32)


def index_scores(arena, table, seq, place, q, weights, visible, one=score):
    """Scores [N, B, E] of q [N, B, H, D]; -inf from entry `visible` [N, B] on and where there is no page."""
    entries = table.shape[1] * place["rows_per_page"]
    out = np.full((*visible.shape, entries), -np.inf)
    for tile, row in np.ndindex(visible.shape):
        for entry in range(min(entries, max(0, visible[tile, row]))):
            vector = key(arena, table[seq[tile]], place, entry)
            if vector is not None:
                out[tile, row, entry] = one(q[tile, row], weights[tile, row], vector)
    return out


def block_maxima(row, block_size):
    """Largest score of each aligned block of a row; NaN counts as -inf, as does what lies behind the row's end."""
    out = []
    for start in range(0, len(row), block_size):
        best = -math.inf
        for value in row[start : start + block_size]:
            if value > best:  # false for NaN
                best = value
        out.append(best)
    return out
