"""Top-k of a row by repeated search: loops and Python comparisons only."""

import math


def topk_positions(row, k):
    """Positions of the k largest values of a list, ascending, -1 padded; NaN and -inf never, of equals the lowest."""
    left = [(i, float(v)) for i, v in enumerate(row) if not math.isnan(v) and v != -math.inf]
    chosen = []
    while left and len(chosen) < k:
        best = left[0]
        for candidate in left[1:]:
            if candidate[1] > best[1]:  # -0.0 > 0.0 is false, as is the converse
                best = candidate
        left.remove(best)
        chosen.append(best[0])
    return sorted(chosen) + [-1] * (k - len(chosen))
