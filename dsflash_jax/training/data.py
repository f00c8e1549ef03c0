"""Training rows: associative recall, needle, copy and plain text, as pure functions of (seed, step).

A batch depends on nothing but its specification, the corpus and (seed, step, stream), so a resumed run continues
with the rows it would have seen, without replaying any.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from dsflash_jax.training.vocabulary import FIRST_KEY, FIRST_VALUE, KEY_TOKENS, VALUE_TOKENS

# Random streams of one seed: training rows, held-out rows, the pool that draft layers learn from, draws from that pool.
TRAIN_STREAM, HELD_OUT_STREAM, POOL_STREAM, DRAW_STREAM = range(4)
# What shapes every row besides TaskMix. `row_constants` names it, and studies record that: no settings do.
_LAG_SHARES = (0.6, 0.4)  # of the lags that do not rest: inside the window, up to two; near lags are the easier half
_NEAR_PAIRS = 3  # of a near row: so few that each comes again inside the window
_COPY_SPAN = 8  # tokens of a copied span


class Batch(NamedTuple):
    """One batch of rows; position t predicts targets[t], the token at t + 1.

    tokens, targets: int32[B, T]. answer_mask: bool[B, T], targets[t] is an answer the row determines.
    text_mask: bool[B, T], targets[t] is running text (text rows only: elsewhere pairs interrupt the text).
    lag: int32[B, T], tokens back to the source of the answer, 0 where no answer. aligned: bool[B, T], the source pair
    starts at an even position, so that it lies within one group of two tokens.
    """

    tokens: np.ndarray
    targets: np.ndarray
    answer_mask: np.ndarray
    text_mask: np.ndarray
    lag: np.ndarray
    aligned: np.ndarray


@dataclasses.dataclass(frozen=True)
class TaskMix:
    """Shape of a batch and what its rows are; rows that are no task are text.

    window: the model's sliding window, which sets the distances asked. Shares are of rows, rounded to whole rows.
    near: recall rows of few pairs, all asked again inside the window: without them a model of window layers alone does
    not learn to look keys up in the time that suffices for the others, and it is the yardstick.
    pairs: key/value pairs of a recall row; text_slots: share of its slots left as text at least; patience: share of a
    pair's occurrences after which it rests for more than two windows.
    """

    rows: int
    context: int
    window: int
    recall: float
    near: float = 0.0
    needle: float = 0.0
    copy: float = 0.0
    pairs: int = 8
    text_slots: float = 0.0
    patience: float = 0.1

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1.")
        for name in ("recall", "near", "needle", "copy", "text_slots", "patience"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1.")
        shares = self.recall + self.near + self.needle + self.copy
        if shares > 1.0 + 1e-9:
            raise ValueError(f"recall + near + needle + copy = {shares} exceeds 1.")
        if not 1 <= self.pairs <= KEY_TOKENS:
            raise ValueError(f"pairs={self.pairs} must lie between 1 and the number of keys, {KEY_TOKENS}.")
        least = max(4 * self.pairs, 4 * _COPY_SPAN)
        if self.context < least:
            raise ValueError(f"context={self.context} is too short: {self.pairs} pairs need at least {least} tokens.")

    def row_counts(self) -> tuple[int, int, int, int, int]:
        """Rows of recall, near recall, needle, copy and text; they sum to rows."""
        edges = np.rint(np.cumsum([self.recall, self.near, self.needle, self.copy]) * self.rows).astype(int)
        recall, near, needle, copy = (int(n) for n in np.diff(edges, prepend=0))
        return recall, near, needle, copy, self.rows - int(edges[-1])

    def lag_shares(self) -> tuple[float, float, float]:
        """Shares of the lags of a recall row: inside the window, up to two windows, beyond."""
        inside, up_to_two = _LAG_SHARES
        return inside * (1 - self.patience), up_to_two * (1 - self.patience), self.patience


def row_constants() -> dict[str, object]:
    """The constants of this module that shape every row, as plain JSON: no settings record holds them."""
    return {"lag_shares": list(_LAG_SHARES), "near_pairs": _NEAR_PAIRS, "copy_span": _COPY_SPAN}


def make_batch(mix: TaskMix, text: np.ndarray, seed: int, step: int, stream: int = TRAIN_STREAM) -> Batch:
    """The batch of one step. text: uint8[N] tokens of the corpus split that belongs to the stream.

    Raises ValueError when the text is shorter than a row.
    """
    length = mix.context + 1
    if text.size < length:
        raise ValueError(f"corpus split has {text.size} tokens: a row of context={mix.context} needs {length}.")
    rng = np.random.default_rng([seed, stream, step])
    starts = rng.integers(0, text.size - length + 1, mix.rows)
    rows = _Rows.over(text[starts[:, None] + np.arange(length)].astype(np.int32))
    *counts, plain = mix.row_counts()
    edges = np.cumsum([0, *counts])
    parts = [rows.part(first, last) for first, last in zip(edges[:-1], edges[1:], strict=True)]
    _write_recall(parts[0], mix.pairs, mix.lag_shares(), mix, rng)
    _write_recall(parts[1], min(mix.pairs, _NEAR_PAIRS), (1.0, 0.0, 0.0), mix, rng)
    _write_needle(parts[2], rng)
    _write_copy(parts[3], rng)
    rows.text_mask[mix.rows - plain:] = True
    return rows.batch()


def text_batch(text: np.ndarray, rows: int, context: int) -> Batch:
    """Plain text rows at even distances over the whole text, without overlap, for evaluation.

    Raises ValueError when the text is too short for so many rows.
    """
    if rows < 1 or rows * context + 1 > text.size:
        raise ValueError(f"text rows={rows} of context={context} do not fit: there are {text.size} tokens.")
    starts = np.arange(rows) * ((text.size - 1) // rows)
    filled = _Rows.over(text[starts[:, None] + np.arange(context + 1)].astype(np.int32))
    filled.text_mask[:] = True
    return filled.batch()


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """Consecutive batches of `rows` rows each. Raises ValueError when they do not come out even."""
    count = batch.tokens.shape[0]
    if rows < 1 or count % rows:
        raise ValueError(f"rows={rows} must divide the {count} rows of the batch.")
    return [Batch(*(array[first : first + rows] for array in batch)) for first in range(0, count, rows)]


class _Rows(NamedTuple):
    """Rows under construction: one token more than a batch row, masks indexed by the position that predicts."""

    tokens: np.ndarray       # int32[B, T + 1]
    answer_mask: np.ndarray  # bool[B, T]
    text_mask: np.ndarray
    lag: np.ndarray          # int32[B, T]
    aligned: np.ndarray

    @classmethod
    def over(cls, tokens: np.ndarray) -> _Rows:
        shape = (tokens.shape[0], tokens.shape[1] - 1)
        flags = [np.zeros(shape, bool) for _ in range(3)]
        return cls(tokens, flags[0], flags[1], np.zeros(shape, np.int32), flags[2])

    def part(self, first: int, last: int) -> _Rows:
        return _Rows(*(array[first:last] for array in self))

    def batch(self) -> Batch:
        return Batch(self.tokens[:, :-1], self.tokens[:, 1:], *self[1:])


def _write_recall(
    rows: _Rows, pairs: int, lag_shares: tuple[float, float, float], mix: TaskMix, rng: np.random.Generator
) -> None:
    """Recall rows: slots of (key, value) over text; a repeated key asks for its value, and renews the pair's position.

    Each occurrence draws the lag after which its pair is due again: inside the window, up to two windows, or beyond, up
    to the whole row. A slot goes to the pair longest due; where none is due it stays text. Asking any pair at any slot
    instead would renew every pair so often that far lags hardly occur.
    """
    count, context = rows.answer_mask.shape
    if count == 0:
        return
    slots = (context - 1) // 2
    every = np.arange(count)
    phase = rng.integers(0, 2, count)
    keys = rng.permuted(np.tile(np.arange(KEY_TOKENS), (count, 1)), axis=1)[:, : pairs] + FIRST_KEY
    values = rng.integers(0, VALUE_TOKENS, (count, pairs)) + FIRST_VALUE
    stays_text = rng.random((slots, count)) < mix.text_slots
    waits = _waits(mix, lag_shares, rng, slots, count)
    last = np.zeros((count, pairs), int)
    due = np.full((count, pairs), 2 * context)  # not yet introduced: never due
    introduced = np.zeros(count, int)
    for slot in range(slots):
        position = phase + 2 * slot
        introduces = introduced < pairs
        pair = np.where(introduces, np.minimum(introduced, pairs - 1), due.argmin(axis=1))
        row = every[(introduces | (due[every, pair] <= position)) & ~stays_text[slot]]
        at, pair, asks = position[row], pair[row], ~introduces[row]
        rows.tokens[row, at] = keys[row, pair]
        rows.tokens[row, at + 1] = values[row, pair]
        rows.answer_mask[row, at] = asks
        rows.lag[row, at] = np.where(asks, at - last[row, pair], 0)
        last[row, pair] = at
        due[row, pair] = at + waits[slot, row]
        introduced[row] += introduces[row]
    rows.aligned[:] = (phase == 0)[:, None]


def _waits(
    mix: TaskMix, lag_shares: tuple[float, float, float], rng: np.random.Generator, slots: int, count: int
) -> np.ndarray:
    """Lags until a pair is due again, int[slots, rows]: in one window, in two, or (share: patience) beyond."""
    edges = np.minimum([2, mix.window, 2 * mix.window, mix.context], mix.context)
    bucket = rng.choice(3, (slots, count), p=lag_shares)
    return (edges[bucket] + rng.random((slots, count)) * (edges[bucket + 1] - edges[bucket])).astype(int)


def _write_needle(rows: _Rows, rng: np.random.Generator) -> None:
    """Needle rows: one pair somewhere in the first half of the text, its key asked as the last token."""
    count, context = rows.answer_mask.shape
    if count == 0:
        return
    every, ask = np.arange(count), context - 1
    at = rng.integers(0, context // 2, count)
    key = rng.integers(0, KEY_TOKENS, count) + FIRST_KEY
    value = rng.integers(0, VALUE_TOKENS, count) + FIRST_VALUE
    rows.tokens[every, at], rows.tokens[every, at + 1] = key, value
    rows.tokens[:, ask], rows.tokens[:, ask + 1] = key, value
    rows.answer_mask[:, ask] = True
    rows.lag[:, ask] = ask - at
    rows.aligned[:, ask] = at % 2 == 0


def _write_copy(rows: _Rows, rng: np.random.Generator) -> None:
    """Copy rows: a span of distinct symbols in the text occurs twice; all but its first token are answers."""
    count, context = rows.answer_mask.shape
    if count == 0:
        return
    every_symbol = np.arange(FIRST_KEY, FIRST_KEY + KEY_TOKENS + VALUE_TOKENS)
    symbols = rng.permuted(np.tile(every_symbol, (count, 1)), axis=1)[:, :_COPY_SPAN]
    source = rng.integers(0, context - 2 * _COPY_SPAN, count)
    again = rng.integers(source + _COPY_SPAN, context + 1 - _COPY_SPAN)
    column, span = np.arange(count)[:, None], np.arange(_COPY_SPAN)
    rows.tokens[column, source[:, None] + span] = symbols
    rows.tokens[column, again[:, None] + span] = symbols
    asks = again[:, None] + span[:-1]
    rows.answer_mask[column, asks] = True
    rows.lag[column, asks] = (again - source)[:, None]
    rows.aligned[column, asks] = (source[:, None] + span[:-1]) % 2 == 0
