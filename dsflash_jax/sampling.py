"""Choosing the next token from logits: greedy, or temperature with top-k and top-p. Pure functions on arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 leave every token in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        if not 0 <= self.temperature <= _LARGEST:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive and finite in float32.")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or a positive whole number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and at most at 1.")


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that a random key does not hold whole: JAX keeps 32 bits and drops the rest."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be a whole number in 0..{2**32 - 1}.")


def greedy(logits: jax.Array) -> jax.Array:
    """The best token of logits [..., V], int32[...]; the lowest id wins ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def filter_logits(logits: jax.Array, top_k: jax.Array | int, top_p: jax.Array | float) -> jax.Array:
    """Logits [..., V] with -inf where top-k, then top-p on what it left, drop a token.

    top_k 0 keeps all. top_p keeps the smallest set of best tokens whose probability reaches it, at least one token.
    The lowest id wins ties at both borders. Both may be traced.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    vocab = logits.shape[-1]
    kept = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)
    shares = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    # The best token stays by its rank: a top_p below float32's normal range counts as 0, which nothing is below.
    # Rounding of the sum could drop the last tokens at top_p = 1, which promises to keep all.
    kept &= (before < top_p) | (jnp.arange(vocab) == 0) | (jnp.asarray(top_p) >= 1)
    rank = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(kept, rank, axis=-1), logits, -jnp.inf)


def sample(
    logits: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float,
    top_k: jax.Array | int = 0,
    top_p: jax.Array | float = 1.0,
) -> jax.Array:
    """Tokens int32[...] drawn from softmax(logits [..., V] / temperature) after top-k and top-p; 0 is greedy.

    The same key and logits give the same tokens. All settings may be traced: one compiled program serves them all.
    """
    cold = jnp.asarray(temperature) <= 0
    logits = logits.astype(jnp.float32)
    # From the best token down, so that a tiny temperature overflows to -inf, never to a second +inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(cold, 1.0, temperature)
    drawn = jax.random.categorical(key, filter_logits(scaled, top_k, top_p), axis=-1)
    return jnp.where(cold, greedy(logits), drawn).astype(jnp.int32)


def check_logits(logits: Any, sequences: Sequence[Any], positions: Sequence[int]) -> None:
    """Raises FloatingPointError naming the first sequence and position whose logits [S, V] hold NaN or +inf.

    `positions` are those of the tokens that the logits follow. -inf is a token that cannot be drawn, and allowed
    unless a row has nothing else. Waits for the logits.
    """
    rows = np.asarray(logits, np.float32)
    for row, sequence, position in zip(rows[: len(sequences)], sequences, positions, strict=True):
        if np.isfinite(row.max()):  # max is NaN if any is
            continue
        kind = "NaN" if np.isnan(row).any() else "+inf" if np.isposinf(row).any() else "nothing but -inf"
        where = f"logits of sequence {sequence!r} at position {position}"
        raise FloatingPointError(f"{where} hold {kind}: no token can follow.")
