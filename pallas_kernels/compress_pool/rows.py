"""The argument of `compress_pool` that says which rows a step has: the arrays of a ragged step, by their names."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class StepRows(NamedTuple):
    """T rows of up to S sequences; a sequence's rows are contiguous and ascend in position. All int32."""

    positions: jax.Array  # [T], negative = padding
    row_to_seq: jax.Array  # [T]
    first_row: jax.Array  # [S] row of each sequence's position `start`
    start: jax.Array  # [S] first position of this step
    length: jax.Array  # [S] start + rows of this step
    slot: jax.Array  # [S] state slot, negative = unused


def members(step: StepRows, done: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the members of each group lie: (row of this step or -1, seq [G, 1], position), [G, ratio].

    done: int32[G] rows that complete groups, -1 = no group: its positions are -1.
    """
    row = jnp.maximum(done, 0)
    seq = step.row_to_seq[row][:, None]
    position = step.positions[row][:, None] - (ratio - 1) + jnp.arange(ratio)
    position = jnp.where(done[:, None] >= 0, position, -1)
    back = position - step.start[seq]
    return jnp.where((position >= 0) & (back >= 0), step.first_row[seq] + back, -1), seq, position
