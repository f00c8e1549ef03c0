"""Sparse attention with a sink, the window's position lists, the output projection.

Source: report §2.3, reference inference/model.py (whose kernel floors the running maximum at -1e30).
"""

import numpy as np

F32 = np.float32
RUNNING_MAX_FLOOR = F32(-1e30)


def sparse_attention(q, kv, indices, sink, scale):
    """Attention of every query over its own list of rows; each row is key and value of all heads.

    q: [T, H, D]; kv: [N, D]; indices: int [T, K], -1 = no row, a row listed twice counts twice; sink: [H] logits that
    add exp(sink) to the denominator only (neither scaled nor carrying a value); scale multiplies q . k.
    Returns float32 [T, H, D]. A query without a row gives exactly zero, also when its sink is -inf (the reference then
    divides 0 by 0).
    """
    q, kv, sink = np.asarray(q, F32), np.asarray(kv, F32), np.asarray(sink, F32)
    out = np.zeros(q.shape, F32)
    for t in range(q.shape[0]):
        rows = [kv[i] for i in indices[t] if i >= 0]
        for h in range(q.shape[1]):
            if rows:
                out[t, h] = _one_head(q[t, h], rows, sink[h], F32(scale))
    return out


def _one_head(q, rows, sink, scale):
    logits = [np.dot(q, row) * scale for row in rows]
    # The sink is not part of the maximum: a large sink overflows to inf and the output goes to zero.
    peak = max(max(logits), RUNNING_MAX_FLOOR)
    with np.errstate(over="ignore", under="ignore"):
        denominator = np.exp(sink - peak)
        value = np.zeros(len(q), F32)
        for logit, row in zip(logits, rows, strict=True):
            p = np.exp(logit - peak)
            denominator += p
            value += p * row
        return value / denominator


def window_positions(position, window, first=0):
    """Positions that the query at `position` sees through its window: max(first, position-window+1) .. position.

    first: the start of the sequence, or of a replay. Returns int32 [window], ascending, padded with -1 at the end.
    """
    seen = list(range(max(first, position - window + 1), position + 1))
    return np.array(seen + [-1] * (window - len(seen)), np.int32)


def ring_slots(position, window):
    """The same window as slots of a ring of `window` rows, oldest first: int32 [window], -1 = not written."""
    return np.array([p % window if p >= 0 else -1 for p in range(position - window + 1, position + 1)], np.int32)


def grouped_output(heads, wo_a, wo_b, groups):
    """Grouped low-rank output projection of one token.

    heads: [H, D] attention output after the inverse rotation; wo_a: [groups * R, H * D / groups];
    wo_b: [E, groups * R].
    Each group of heads has its own [R, H * D / groups] block of wo_a. Returns float32 [E].
    """
    parts = np.asarray(heads, F32).reshape(groups, -1)
    rank = wo_a.shape[0] // groups
    low = [wo_a[g * rank : (g + 1) * rank] @ parts[g] for g in range(groups)]
    return wo_b @ np.concatenate(low)
