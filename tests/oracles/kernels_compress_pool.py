"""Gated pooling over a ragged step, one token after the other in float64. Source: report §2.3."""

import math


def step(rows, state, owner, sequences, ratio):
    """Feeds the rows of a step; returns the latent of each row that completes a group: {row: [D]}. Changes `state`.

    rows: [T][2 D] of value, then gate. state: [slots][owners][R][2 D], the row of a position at position % R.
    sequences: (slot, first row, first position, number of rows).
    """
    latents, places = {}, len(state[0][0])
    for slot, first, start, count in sequences:
        history = {}  # position -> row, of what this sequence may still need
        for position in range(max(0, start - ratio + 1), start):
            history[position] = [float(v) for v in state[slot][owner][position % places]]
        for n in range(count):
            position = start + n
            history[position] = [float(v) for v in rows[first + n]]
            if (position + 1) % ratio == 0:
                latents[first + n] = pool([history[position - back] for back in reversed(range(ratio))])
        for n in range(count):
            state[slot][owner][(start + n) % places] = rows[first + n]
    return latents


def pool(members):
    """[m][2 D] -> [D]: per channel the values weighted by the softmax of the gates."""
    width = len(members[0]) // 2
    out = []
    for channel in range(width):
        gates = [member[width + channel] for member in members]
        weights = [math.exp(gate - max(gates)) for gate in gates]
        out.append(sum(w * m[channel] for w, m in zip(weights, members, strict=True)) / sum(weights))
    return out
