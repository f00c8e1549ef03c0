"""`compress_pool` by one table of the old rows of every sequence and the rows of this step.

Temporaries are about twice the rows of the step, which the caller holds anyway, so there is nothing to tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.compress_pool.rows import StepRows, members


def compress_pool(
    rows: jax.Array, state: jax.Array, done: jax.Array, step: StepRows, *, ratio: int, owner: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """As `reference.compress_pool`."""
    kept = state[:, None] if owner is None else state
    part, places, history = owner or 0, kept.shape[2], ratio - 1
    old_position = step.start[:, None] - history + jnp.arange(history)
    old = kept[jnp.maximum(step.slot, 0)[:, None], part, old_position % places]
    table = jnp.concatenate([old.reshape(-1, rows.shape[1]), rows])
    first_fresh = step.slot.shape[0] * history
    row, seq, position = members(step, done, ratio)
    before = seq * history + jnp.clip(position - (step.start[seq] - history), 0, history - 1)
    values, gate = jnp.split(table[jnp.where(row >= 0, first_fresh + row, before)], 2, axis=-1)
    pooled = jnp.where((done >= 0)[:, None], pool(values, gate), 0.0)
    keep = (step.positions >= 0) & (step.positions >= step.length[step.row_to_seq] - places)
    slot = step.slot[step.row_to_seq]
    slot = jnp.where(keep & (slot >= 0), slot, kept.shape[0])
    # From the table: the write then depends on the read of the old rows. Otherwise XLA may order the read last and
    # keep a copy of the whole state for it.
    fresh = table[jnp.where(keep, first_fresh + jnp.arange(rows.shape[0]), 0)]
    kept = kept.at[slot, part, jnp.maximum(step.positions, 0) % places].set(fresh, mode="drop")
    return pooled, kept[:, 0] if owner is None else kept


def pool(values: jax.Array, gate: jax.Array) -> jax.Array:
    """Per-channel softmax of `gate` over the group axis, weighting `values`: float32[..., m, D] twice -> [..., D]."""
    return jnp.sum(jax.nn.softmax(gate, axis=-2) * values, axis=-2)
