"""The contract of `compress_pool` in plain jnp: every member is fetched from where it lies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.compress_pool.rows import StepRows, members


def compress_pool(
    rows: jax.Array, state: jax.Array, done: jax.Array, step: StepRows, *, ratio: int, owner: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(pooled float32[G, D], state with this step's rows); see `api.compress_pool`."""
    kept = state if owner is None else state[:, owner]
    slots, places = kept.shape[:2]
    row, seq, position = members(step, done, ratio)
    fresh = rows[jnp.maximum(row, 0)]
    old = kept[jnp.maximum(step.slot, 0)[seq], position % places]
    values, gate = jnp.split(jnp.where((row >= 0)[..., None], fresh, old), 2, axis=-1)
    pooled = jnp.sum(jax.nn.softmax(gate, axis=1) * values, axis=1)
    pooled = jnp.where((done >= 0)[:, None], pooled, 0.0)
    keep = (step.positions >= 0) & (step.positions >= step.length[step.row_to_seq] - places)
    slot = step.slot[step.row_to_seq]
    slot = jnp.where(keep & (slot >= 0), slot, slots)
    kept = kept.at[slot, jnp.maximum(step.positions, 0) % places].set(rows, mode="drop")
    return pooled, kept if owner is None else state.at[:, owner].set(kept)
