"""Acceptance of drafts and how many to verify, one draft after another. Source: model.md §6; the DSpark paper."""

import numpy as np


def accept(p, q, drafts, uniform):
    """(accepted drafts, weights [V] of the token behind them, summing to 1).

    p: [K + 1][V] target probabilities, row i those of the token behind i drafts; q: [K][V] probabilities that the
    drafts were drawn with; drafts: [K] tokens; uniform: [K] in [0, 1).
    A draft passes with probability min(1, p / q). The first that does not is replaced by a token of what p has more
    than q; behind the last draft stands a token of p.
    """
    for i, draft in enumerate(drafts):
        if q[i][draft] == 0:
            passed = p[i][draft] > 0
        else:
            passed = uniform[i] < p[i][draft] / q[i][draft]
        if not passed:
            return i, remainder(p[i], q[i])
    return len(drafts), list(p[len(drafts)])


def remainder(p, q):
    """What p has more than q, scaled to sum 1; p itself where q lacks nothing."""
    rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    total = sum(rest)
    return [value / total for value in rest] if total else list(p)


def matching(best, drafts):
    """Greedy acceptance: leading drafts that are the target's best tokens, best [K + 1]; then its own token."""
    count = 0
    while count < len(drafts) and drafts[count] == best[count]:
        count += 1
    return count, best[count]


def lengths(confidence, limits, rate):
    """Drafts to verify per sequence, from confidence [S][K] in 0..1 and at most limits [S] of them.

    rate(rows): steps per second at that many rows. Whoever would reach its next draft most likely gets it, while the
    expected number of tokens per second grows; the first that does not make it grow ends the search. Of equally likely
    ones the shorter prefix comes first, then the lower sequence.
    """
    admitted = [0] * len(limits)
    expected, rows = float(len(limits)), len(limits)
    while True:
        choices = []
        for sequence, limit in enumerate(limits):
            count = admitted[sequence]
            if count < min(limit, len(confidence[sequence])):
                reach = float(np.prod(np.asarray(confidence[sequence][: count + 1], float)))
                choices.append((-reach, count, sequence))
        if not choices:
            return admitted
        minus_reach, _, sequence = min(choices)
        if not (expected - minus_reach) * rate(rows + 1) > expected * rate(rows):
            return admitted
        expected, rows = expected - minus_reach, rows + 1
        admitted[sequence] += 1
