"""Deterministic top-k selection as a mask; lists are those of `pallas_kernels.topk_select`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.topk_select.api import topk_select
from pallas_kernels.topk_select.xla import canonical

_WORD, _SIGN = 32, -(2**31)


def listed(mask: jax.Array, k: int) -> jax.Array:
    """The set positions of a mask [T, E] with at most k of them, ascending, -1 = none: int32[T, k]."""
    return topk_select(jnp.where(mask, 0.0, -jnp.inf), k, implementation="xla")


def topk_mask(scores: jax.Array, k: int) -> jax.Array:
    """bool[..., E]: what `topk_select` selects, as a mask.

    A score that exactly k scores reach is found bit by bit, by counting those that reach a candidate. Counting is a
    plain pass over the rows: on a CPU a mask takes a third to a tenth of the time of a list, which needs a sort.
    """
    ranked = canonical(scores)
    legal = ranked > -jnp.inf
    key = _ordered(ranked)
    few = _count(legal) <= k  # everything legal is selected

    def undecided(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        bit, _, reached = state
        return (bit >= 0) & jnp.any((reached != k) & ~few)

    def decide(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        bit, low, reached = state
        candidate = low | lax.shift_left(jnp.int32(1), bit)
        count = _count(key >= (candidate ^ _SIGN)[..., None])
        enough = count >= k
        return bit - 1, jnp.where(enough, candidate, low), jnp.where(enough, count, reached)

    # Unsigned in an int32. Usually half of the bits suffice; all of them are needed where scores on the border tie.
    start = (jnp.int32(_WORD - 1), jnp.zeros(few.shape, jnp.int32), jnp.full(few.shape, scores.shape[-1], jnp.int32))
    _, low, reached = lax.while_loop(undecided, decide, start)
    threshold = (low ^ _SIGN)[..., None]
    tied = (reached != k) & ~few
    chosen = lax.cond(
        jnp.any(tied),
        lambda: jnp.where(tied[..., None], _first_equals(key, threshold, k), key >= threshold),
        lambda: key >= threshold,
    )
    return jnp.where(few[..., None], legal, chosen)


def _first_equals(key: jax.Array, threshold: jax.Array, k: int) -> jax.Array:
    """All keys above the threshold and the first of those equal to it, k in all."""
    above, equal = key > threshold, key == threshold
    spare, width = k - _count(above), key.shape[-1]
    position = jnp.arange(width)

    def decide(i: jax.Array, end: jax.Array) -> jax.Array:
        candidate = end | lax.shift_left(jnp.int32(1), jnp.int32(width.bit_length() - 1) - i)
        return jnp.where(_count(equal & (position < candidate[..., None])) <= spare, candidate, end)

    end = lax.fori_loop(0, width.bit_length(), decide, jnp.zeros(spare.shape, jnp.int32))
    return above | (equal & (position < end[..., None]))


def _ordered(scores: jax.Array) -> jax.Array:
    """int32 in the order of float32 scores without NaN and -0."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return bits ^ ((bits >> (_WORD - 1)) & 0x7FFFFFFF)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32), axis=-1)
