"""What every layer derives from one `StepInfo`, computed once per step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsflash_jax.types import StepInfo


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Query rows in tiles of one sequence each, so that a tile reads one sequence's index keys once."""

    rows: jax.Array  # int32[NT, B], -1 = padding
    seq: jax.Array  # int32[NT]
    place: jax.Array  # int32[T]: where row t lies in the flattened [NT * B]


def make_tiles(step: StepInfo, tile_rows: int) -> Tiles:
    """Cuts each sequence's rows into tiles of `tile_rows`; enough tiles for any split of T rows over S sequences."""
    rows, seqs = step.num_rows, step.num_seqs
    num_tiles = -(-rows // tile_rows) + (seqs - 1 if tile_rows > 1 else 0)
    count = step.length - step.start
    tiles_of = -(-count // tile_rows)
    first_tile = jnp.cumsum(tiles_of) - tiles_of
    seq = jnp.searchsorted(jnp.cumsum(tiles_of), jnp.arange(num_tiles), side="right")
    seq = jnp.minimum(seq, seqs - 1)
    within = (jnp.arange(num_tiles) - first_tile[seq])[:, None] * tile_rows + jnp.arange(tile_rows)
    live = (within >= 0) & (within < count[seq][:, None])
    row = jnp.where(live, step.first_row[seq][:, None] + within, -1)
    offset = jnp.arange(rows) - step.first_row[step.row_to_seq]
    place = first_tile[step.row_to_seq] * tile_rows + offset
    return Tiles(row, seq, jnp.clip(place, 0, num_tiles * tile_rows - 1))


def completing_rows(step: StepInfo, ratio: int) -> jax.Array:
    """Rows whose token completes a group of `ratio`: int32[G], -1 padding, G = T // ratio + S (at most T)."""
    if ratio == 1:
        return jnp.where(step.positions >= 0, jnp.arange(step.num_rows), -1)
    size = min(step.num_rows, step.num_rows // ratio + step.num_seqs)
    done = (step.positions >= 0) & ((step.positions + 1) % ratio == 0)
    return jnp.nonzero(done, size=size, fill_value=-1)[0]


def history_table(step: StepInfo, old: jax.Array) -> jax.Array:
    """A table in which each sequence's old rows stand right before room for its fresh ones: runs are contiguous.

    old: [S, history, W], oldest first. Returns [S * history + T, W]; `history_index` finds rows in it.
    """
    seqs, history = old.shape[:2]
    if seqs == 1:
        return jnp.pad(old[0], ((0, step.num_rows), (0, 0)))
    table = jnp.zeros((seqs * history + step.num_rows, old.shape[-1]), old.dtype)
    first = _block_start(step, history)
    at = jnp.where((step.slot >= 0)[:, None], first[:, None] + jnp.arange(history), table.shape[0])
    return table.at[at].set(old, mode="drop")


def history_index(step: StepInfo, seq: jax.Array, position: jax.Array, history: int) -> jax.Array:
    """Row of a token in the table of `history_table`; -1 before position 0 or more than `history` before start.

    `position` may have trailing axes beyond `seq`.
    """
    start = step.start[seq]
    index = _block_start(step, history)[seq] + position - (start - history)
    return jnp.where((position >= 0) & (position >= start - history), index, -1)


def _block_start(step: StepInfo, history: int) -> jax.Array:
    """[S] first table row of each sequence's block of `history` old rows and its fresh rows."""
    return jnp.arange(step.num_seqs) * history + step.first_row
