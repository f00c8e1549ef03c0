"""`compress_pool` in two launches: groups are pooled, then the state rows of each sequence are replaced.

Two, because a long step overwrites the very state rows that its first group reads. The second takes the pooled values
as an operand that it does not read, so that no compiler orders it first or copies the state.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.formats import arena_reasons
from pallas_kernels.common.tiles import next_power_of_two, power_of_two
from pallas_kernels.compress_pool.config import PoolConfig
from pallas_kernels.compress_pool.rows import StepRows


def unsupported(rows: jax.Array, state: jax.Array) -> tuple[str, ...]:
    """Why the kernels cannot serve the call; empty if they can."""
    places = state.shape[-2]
    flat = jax.ShapeDtypeStruct((state.size // state.shape[-1], state.shape[-1]), state.dtype)
    reasons = [*arena_reasons(rows, "rows"), *arena_reasons(flat, "state")]
    if not power_of_two(places):
        reasons.append(f"the state's R={places} must be a power of two")
    return tuple(reasons)


@functools.partial(jax.jit, static_argnames=("ratio", "owner", "config", "interpret"))
def compress_pool(
    rows: jax.Array,
    state: jax.Array,
    done: jax.Array,
    step: StepRows,
    *,
    ratio: int,
    owner: int | None,
    config: PoolConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """As `api.compress_pool`."""
    width, seqs = rows.shape[1], step.slot.shape[0]
    flat = state.reshape(-1, width)  # one row after the other; no bytes move
    place = functools.partial(_state_row, owners=1 if owner is None else state.shape[1], owner=owner or 0,
                              places=state.shape[-2])  # fmt: skip
    half = width // 2
    block = min(config.block, half & -half)  # the largest power of two that divides the channels: no lane is masked
    call = functools.partial(common.call, config=config, interpret=interpret)
    groups = done if done.shape[0] else jnp.full((1,), -1, jnp.int32)  # a launch has at least one program
    pooled = call(
        functools.partial(_pool, ratio=ratio, block=block, place=place), rows, flat, groups, *step,
        name="compress_pool", grid=(groups.shape[0], half // block),
        out_shape=jax.ShapeDtypeStruct((groups.shape[0], half), jnp.float32),
    )  # fmt: skip
    flat = call(
        functools.partial(_keep, places=state.shape[-2], block=block, place=place), rows, flat, pooled, *step,
        name="compress_pool_keep", grid=(seqs, width // block), aliases={1: 0},
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
    )  # fmt: skip
    return pooled[: done.shape[0]], flat.reshape(state.shape)


def _state_row(slot: jax.Array, position: jax.Array, *, owners: int, owner: int, places: int) -> jax.Array:
    """Flat state row of a position >= 0 of a sequence slot."""
    return (slot * owners + owner) * places + position % places


def _pool(rows_ref, state_ref, done_ref, *refs, ratio: int, block: int, place):
    """One group and `block` of its channels; members in lanes of the first axis."""
    step, out_ref = StepRows(*refs[:-1]), refs[-1]
    group, first = pl.program_id(0), block * pl.program_id(1)
    done = done_ref[group]
    row = jnp.maximum(done, 0)
    seq = step.row_to_seq[row]
    member = jnp.arange(next_power_of_two(ratio), dtype=jnp.int32)
    position = step.positions[row] - (ratio - 1) + member
    live = (member < ratio) & (position >= 0) & (done >= 0)
    back = position - step.start[seq]
    fresh, old = live & (back >= 0), live & (back < 0)
    row_of = jnp.where(fresh, step.first_row[seq] + back, 0)
    state_of = jnp.where(old, place(jnp.maximum(step.slot[seq], 0), jnp.maximum(position, 0)), 0)
    width = out_ref.shape[1]
    channel = first + jnp.arange(block, dtype=jnp.int32)

    def fetch(start: int) -> jax.Array:
        """Column start + channel of every member; only one of the two loads of a lane happens."""
        column = start + channel
        new, kept = _masked(rows_ref, row_of, fresh, column), _masked(state_ref, state_of, old, column)
        return jnp.where(fresh[:, None], new, kept)

    values, gate = fetch(0), jnp.where(live[:, None], fetch(width), float("-inf"))
    peak = jnp.max(gate, axis=0, keepdims=True)
    weight = jnp.exp(gate - jnp.where(peak == float("-inf"), 0.0, peak))
    total = jnp.sum(weight, axis=0, keepdims=True)
    pooled = jnp.sum(weight / jnp.where(total == 0.0, 1.0, total) * values, axis=0)
    out_ref[group, pl.ds(first, block)] = pooled


def _masked(ref, row: jax.Array, valid: jax.Array, column: jax.Array) -> jax.Array:
    """ref[row, column] as [rows, columns], 0 where a row is not valid."""
    shape = (row.shape[0], column.shape[0])
    at = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)
    return common.load_at(ref, at, jnp.broadcast_to(valid[:, None], shape), 0.0)


def _keep(rows_ref, _, __, *refs, places: int, block: int, place):
    """The last rows of one sequence and `block` of their values, each to the state row of its position."""
    step, state_ref = StepRows(*refs[:-1]), refs[-1]
    seq, first = pl.program_id(0), block * pl.program_id(1)
    start, length, slot = step.start[seq], step.length[seq], step.slot[seq]
    position = length - places + jnp.arange(places, dtype=jnp.int32)
    valid = (position >= start) & (position >= 0) & (slot >= 0)
    row = jnp.where(valid, step.first_row[seq] + position - start, 0)
    value = _masked(rows_ref, row, valid, first + jnp.arange(block, dtype=jnp.int32))
    # Masked lanes keep the address of their own position: nothing else writes it in this step.
    target = place(jnp.maximum(slot, 0), position + places)
    common.store_columns(state_ref, target, jnp.full_like(target, first), value, valid)
