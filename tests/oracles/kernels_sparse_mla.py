"""Sparse attention over packed rows, one query, head and row at a time, in float64."""

import math

import numpy as np

from tests.oracles.quant import unpack_row


def listed_rows(row_set, query):
    """The rows that one query lists and that exist, in order, each as often as listed.

    row_set: a dict with arena uint8[P, page_bytes], table, seq, index, format, width, offset, rows_per_page.
    """
    table = row_set["table"][row_set["seq"][query]]
    rows = []
    for number in row_set["index"][query]:
        page_number, row = divmod(int(number), row_set["rows_per_page"])
        if number < 0 or page_number >= len(table) or table[page_number] < 0:
            continue
        size = row_set["row_bytes"]
        start = row_set["offset"] + row * size
        data = bytes(row_set["arena"][table[page_number]][start : start + size])
        rows.append(unpack_row(row_set["format"], data, row_set["width"]).astype(np.float64))
    return rows


def sparse_mla(q, row_sets, sink, scale):
    """q [T, H, D], sink [H] -> float64 [T, H, D]."""
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        rows = [row for row_set in row_sets for row in listed_rows(row_set, t)]
        for h in range(q.shape[1]):
            logits = [scale * sum(float(a) * float(b) for a, b in zip(q[t, h], row, strict=True)) for row in rows]
            if not logits:
                continue
            top = max(logits)
            weights = [math.exp(logit - top) for logit in logits]
            share = math.inf if sink[h] - top > 700 else math.exp(sink[h] - top)
            total = sum(weights) + share
            for weight, row in zip(weights, rows, strict=True):
                out[t, h] += weight / total * row
    return out
