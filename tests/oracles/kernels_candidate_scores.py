"""Index scores of listed blocks of entries: one query, one block, one entry at a time, in float64."""

import numpy as np

from tests.oracles.kernels_indexer_scores import key, score


def candidate_scores(arena, table, seq, place, q, weights, blocks, visible, block_size):
    """Scores [T, C * block_size] of q [T, H, D] over blocks [T, C], -1 = none."""
    out = np.full((blocks.shape[0], blocks.shape[1] * block_size), -np.inf)
    for t, c in np.ndindex(blocks.shape):
        for i in range(block_size):
            entry = blocks[t, c] * block_size + i
            inside = blocks[t, c] >= 0 and entry < visible[t] and entry < table.shape[1] * place["rows_per_page"]
            vector = key(arena, table[seq[t]], place, entry) if inside else None
            if vector is not None:
                out[t, c * block_size + i] = score(q[t], weights[t], vector)
    return out
