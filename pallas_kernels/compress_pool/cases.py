"""Poolings that evidence is made for: the released ratio 2 and width 512, a row of each sequence or one long chunk."""

from __future__ import annotations

import functools

import numpy as np

from pallas_kernels.common.cases import Budget, Case, Cost, Update
from pallas_kernels.common.draw import Draw
from pallas_kernels.compress_pool.api import compress_pool
from pallas_kernels.compress_pool.config import FEW_ROWS, PoolConfig, bucket
from pallas_kernels.compress_pool.rows import StepRows

RATIO, WIDTH, OWNERS, OWNER, STATE_ROWS = 2, 512, 3, 1, 8


def _args(draw: Draw, small: bool, *, rows: int):
    """Every sequence begins in the middle of a group, so that its first latent needs the state."""
    rows = min(rows, 5) if small else rows
    seqs = rows if rows <= FEW_ROWS else 1
    count = rows // seqs
    start = RATIO * np.arange(seqs) + 1
    positions = (start[:, None] + np.arange(count)).reshape(-1)
    done = np.flatnonzero((positions + 1) % RATIO == 0)
    step = StepRows(
        positions, np.repeat(np.arange(seqs), count), count * np.arange(seqs), start, start + count, np.arange(seqs)
    )
    state = draw.normal((seqs, OWNERS, STATE_ROWS, 2 * WIDTH))
    return draw.normal((rows, 2 * WIDTH)), state, draw.given(done), StepRows(*map(draw.given, step))


def _want(rows, state, done, step):
    rows, state = np.asarray(rows, np.float64), np.array(state, np.float64)
    positions, row_to_seq, first_row, start, length, slot = (np.asarray(a) for a in step)
    pooled = np.zeros((len(done), WIDTH))
    for g, row in enumerate(np.asarray(done)):
        s, members = row_to_seq[row], []
        for position in range(positions[row] - RATIO + 1, positions[row] + 1):
            old = state[slot[s], OWNER, position % STATE_ROWS]
            members.append(old if position < start[s] else rows[first_row[s] + position - start[s]])
        values, gate = np.split(np.stack(members), 2, axis=1)
        weight = np.exp(gate - gate.max(0))
        pooled[g] = (weight * values).sum(0) / weight.sum(0)
    for row, position in enumerate(positions):
        if position >= length[row_to_seq[row]] - STATE_ROWS:
            state[slot[row_to_seq[row]], OWNER, position % STATE_ROWS] = rows[row]
    return pooled, state


def _cost(rows: int) -> Cost:
    seqs = rows if rows <= FEW_ROWS else 1
    groups, kept = (rows + seqs) // RATIO, seqs * min(STATE_ROWS, rows // seqs)
    row = 4 * 2 * WIDTH
    nbytes = row * (rows + seqs * (RATIO - 1) + kept) + groups * (4 * WIDTH + 4) + 4 * 2 * rows + 16 * seqs
    return Cost(nbytes, groups * WIDTH * 5 * RATIO)  # maximum, difference, exponential, sum, weighted sum


def _case(rows: int, short: bool = False) -> Case:
    return Case(
        op="compress_pool",
        name=f"ratio{RATIO}_{rows}",
        args=functools.partial(_args, rows=rows),
        call=functools.partial(compress_pool, ratio=RATIO, owner=OWNER),
        want=_want,
        cost=_cost(rows),
        budget=Budget(matrix=False, instructions=150),
        update=Update(argument=1, result=1),
        tolerance=1e-5,
        short=short,
        configs=tuple(PoolConfig(block=b, num_warps=w) for b in (128, 256, 512) for w in (1, 2, 4)),
        bucket=bucket(rows),
        shape={"rows": rows, "ratio": RATIO, "width": WIDTH},
    )


CASES = (_case(32, short=True), _case(128), _case(4096))
