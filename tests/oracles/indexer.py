"""The indexer: scores, visibility, top-k and candidate blocks. Source: report §2.3.1 and §2.3.2."""

import numpy as np

F32 = np.float32


def scores(q, keys, weights):
    """Index score of every key for one query: sum over heads of relu(q_h . k) * w_h.

    q: [H, D]; keys: [N, D] (one key shared by all heads); weights: [H], signed, scales already applied.
    Returns float32 [N]; may be negative.
    """
    q, keys, weights = np.asarray(q, F32), np.asarray(keys, F32), np.asarray(weights, F32)
    out = np.zeros(len(keys), F32)
    for n, key in enumerate(keys):
        for h in range(len(q)):
            out[n] += max(np.dot(q[h], key), F32(0.0)) * weights[h]
    return out


def head_weights(projected, head_dim):
    """Scale of the per-head weights: projected [H] * head_dim^-0.5 * H^-0.5. Returns float32 [H]."""
    projected = np.asarray(projected, F32)
    return projected * F32(head_dim**-0.5 * len(projected) ** -0.5)


def visible_count(position, ratio):
    """Entries that the query at `position` may see: complete groups up to and including itself (0 for padding, < 0)."""
    return (position + 1) // ratio if position >= 0 else 0


def visible_counts(positions, ratio):
    """`visible_count` for each of positions [T]. Returns int32 [T]."""
    return np.array([visible_count(int(p), ratio) for p in positions], np.int32)


def mask_scores(row, visible, candidates=None, block_size=0):
    """Copy of row [N] with -inf at entries >= visible and outside candidates (block ids, -1 = none), if given."""
    out = np.array(row, F32)
    for n in range(len(out)):
        if n >= visible or (candidates is not None and n // block_size not in candidates):
            out[n] = -np.inf
    return out


def top_k(row, k):
    """Entries with the k highest scores, ascending by entry, padded with -1 to width k.

    row: [N]. Ties go to the lowest entry; +0 and -0 are equal; NaN and -inf are never selected; +inf is legal.
    Returns int32 [k].
    """
    order = [n for n in range(len(row)) if not np.isnan(row[n]) and row[n] != -np.inf]
    order.sort(key=lambda n: (-float(row[n]), n))
    return _padded(sorted(order[:k]), k)


def candidate_blocks(row, visible, block_size, topk_blocks):
    """Blocks of entries that later index sources may select from, for one query.

    row: [N] scores of the candidate source; entries >= visible do not count. A block's score is the maximum over its
    visible entries. The block of the newest visible entry is always kept and counts among topk_blocks; the rest follow
    by score, lowest block first among equals; blocks without a score above -inf are dropped (NaN counts as -inf).
    Returns int32 [topk_blocks] block ids, ascending, -1 = none.
    """
    visible = min(visible, len(row))
    if visible <= 0:
        return _padded([], topk_blocks)
    newest = (visible - 1) // block_size
    ranked = []
    for block in range(newest):
        members = [float(row[n]) for n in range(block * block_size, (block + 1) * block_size)]
        best = max((s for s in members if not np.isnan(s)), default=-np.inf)
        if best != -np.inf:
            ranked.append((-best, block))
    ranked.sort()
    return _padded(sorted([newest] + [block for _, block in ranked[: topk_blocks - 1]]), topk_blocks)


def candidate_mask(blocks, entries, block_size):
    """Whole-block mask over `entries` entries: True where the entry's block is in blocks. Returns bool [entries]."""
    return np.array([n // block_size in blocks for n in range(entries)], bool)


def _padded(values, width):
    return np.array(list(values) + [-1] * (width - len(values)), np.int32)
