"""Value types that cross module boundaries: the ragged step, the draft step, and what a layer hands down the stack."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

GLOBAL_GROUP = "global"


class NgramRows(NamedTuple):
    """Table rows that a step's tokens read in L Engram layers, C rows each. Hashed on the host: JAX has no int64."""

    index: jax.Array  # int32[T, L, C] rows of the layer's table, or of `fetched`; -1 = none: padding, excluded token
    fetched: jax.Array | None = None  # uint8[L, U, row bytes] packed rows, where the tables stay on the host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInfo:
    """One ragged step: T query rows of up to S sequences. All arrays are int32 but `last_chunk` and `ngrams.fetched`.

    The rows of a sequence are contiguous, ascending in position, and start at position `start`. Padding rows have
    position -1; unused sequence entries have slot -1, start = length = 0 and last_row -1.
    """

    tokens: jax.Array  # [T]
    positions: jax.Array  # [T], -1 = padding
    row_to_seq: jax.Array  # [T], 0 in padding rows
    slot: jax.Array  # [S] ring and compressor-state slot, -1 = unused
    block_tables: dict[str, jax.Array]  # group name -> [S, P] page numbers, -1 = no page
    start: jax.Array  # [S] first position of this step
    length: jax.Array  # [S] positions known after this step (start + rows)
    replay_start: jax.Array  # [S] window keys below it are not seen
    write_floor: jax.Array  # [S] global rows that end below it are not written
    last_row: jax.Array  # [S] row of the last token, -1 = unused
    last_chunk: jax.Array  # [S] whether the prompt ends in this step: then an asymmetric prefill runs the decoder
    previous_token: jax.Array  # [S] token at start - 1, -1 = none
    ngrams: NgramRows | None = None  # only for models with Engram layers

    @property
    def num_rows(self) -> int:
        """T, static."""
        return self.tokens.shape[0]

    @property
    def num_seqs(self) -> int:
        """S, static."""
        return self.slot.shape[0]

    @property
    def first_row(self) -> jax.Array:
        """[S] row of each sequence's first token."""
        return self.last_row - (self.length - self.start) + 1


class Published(NamedTuple):
    """Latest source outputs, carried from layer to layer within one call.

    Lists and masks say the same. Lists are always there, masks where the XLA forms read them instead.
    """

    selection_TxK: jax.Array | None = None  # entry indices, ascending, -1 = none
    candidates_TxC: jax.Array | None = None  # candidate block numbers, ascending, -1 = none
    selected_TxE: jax.Array | None = None  # bool: the selection as a mask over the entries of a block table
    pool_TxB: jax.Array | None = None  # bool: the candidate blocks as a mask over the blocks of a block table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftStep:
    """One draft step of S sequences, all int32[S]. Unused entries have slot -1 and length 0."""

    tokens: jax.Array  # the next token of each sequence, not yet processed by the backbone
    length: jax.Array  # committed tokens, which is the next token's position
    slot: jax.Array  # ring slot, -1 = unused
    floor: jax.Array  # lowest position that passed the target layers; draft windows below it were never written
