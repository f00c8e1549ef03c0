"""The candidate pool of one query by repeated search: Python comparisons only."""

import math

LARGEST = (2 - 2**-23) * 2.0**127


def best_blocks(scores, visible, block_size, count):
    """Numbers of the `count` best blocks, ascending, -1 padded; the block of entry visible - 1 is always among them.

    A score of +inf counts as the largest finite float32, so of such scores the lowest block wins.
    """
    left = [(block, min(float(value), LARGEST) if value == value else value) for block, value in enumerate(scores)]
    chosen = []
    newest = (visible - 1) // block_size
    if visible > 0 and newest < len(scores):
        chosen.append(newest)
        left.pop(newest)
    left = [(block, value) for block, value in left if not math.isnan(value) and value != -math.inf]
    while left and len(chosen) < count:
        best = left[0]
        for candidate in left[1:]:
            if candidate[1] > best[1]:
                best = candidate
        left.remove(best)
        chosen.append(best[0])
    return sorted(chosen) + [-1] * (count - len(chosen))
