"""New cache rows one after the other: rotate, round, pack, write. Source: report §2.4.4, released inference code."""

import numpy as np

from .quant import bfloat16_bits, pack_row

F32 = np.float32


def rotate_tail(row, cos, sin, bfloat16):
    """float32 [D] with its last pairs turned, each product and sum rounded once, the results to bfloat16 if asked."""
    out = np.array(row, F32)
    first = len(out) - 2 * len(cos)
    for i, (c, s) in enumerate(zip(cos, sin, strict=True)):
        real, imag = F32(row[first + 2 * i]), F32(row[first + 2 * i + 1])
        turned = F32(F32(real * c) - F32(imag * s)), F32(F32(real * s) + F32(imag * c))
        for part, value in enumerate(turned):
            if bfloat16:
                value = np.array([bfloat16_bits(value) << 16], np.uint32).view(F32)[0]
            out[first + 2 * i + part] = value
    return out


def insert(arena, table, fmt, rows_per_page, offset, row_bytes, rows):
    """Writes rows into uint8 [P, page_bytes] in place; returns how many.

    rows: (values float32 [D], cos, sin or None, bfloat16, index, seq). table: [S][W] page numbers. Rows without a page
    are left out.
    """
    written = 0
    for values, cos, sin, bfloat16, index, seq in rows:
        if index < 0 or index >= len(table[seq]) * rows_per_page:
            continue
        page = table[seq][index // rows_per_page]
        if page < 0 or page >= len(arena):
            continue
        row = values if cos is None else rotate_tail(values, cos, sin, bfloat16)
        data = pack_row(fmt, row)
        assert len(data) == row_bytes
        first = offset + index % rows_per_page * row_bytes
        arena[page, first : first + row_bytes] = list(data)
        written += 1
    return written
