"""Accepting drafts: distributions, the rejection rule and how many drafts to verify. Pure functions, no model.

A draft d drawn from q is accepted with probability min(1, p(d) / q(d)), where p is the target's distribution; behind
the first rejection the token is drawn from max(p - q, 0), renormalised, and behind a block accepted whole from p. The
emitted tokens then follow the target's distribution, whatever q is (Leviathan et al. 2023; Chen et al. 2023), as
long as q is what the drafts were really drawn from: both pass the same temperature, top-k and top-p. At temperature 0
both are one-hot and the rule is equality with the target's best token.

Randomness is a function of a sequence's seed, the position of the token and its use, never of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax.sampling import Sampling, check_seed, filter_logits

_DRAFT, _ACCEPT, _NEXT = range(3)  # what a random number is for


class Settings(NamedTuple):
    """`Sampling` and a seed per sequence, as arrays [S]."""

    temperature: jax.Array  # float32, 0 = greedy
    top_k: jax.Array  # int32, 0 = all
    top_p: jax.Array  # float32
    seed: jax.Array  # uint32


def settings_of(samplings: Sequence[Sampling], seeds: Sequence[int], vocab: int, size: int | None = None) -> Settings:
    """Settings of sequences, padded to `size` with greedy ones. Raises ValueError for a seed outside 32 bits."""
    for seed in seeds:
        check_seed(seed)
    pad = (size or len(samplings)) - len(samplings)
    samplings = [*samplings, *[Sampling()] * pad]
    return Settings(
        np.array([s.temperature for s in samplings], np.float32),
        np.array([min(s.top_k, vocab) for s in samplings], np.int32),
        np.array([s.top_p for s in samplings], np.float32),
        np.array([*seeds, *[0] * pad], np.uint32),
    )


def drawn_logits(logits: jax.Array, settings: Settings) -> jax.Array:
    """Log-weights [S, ..., V] that tokens are drawn from: after temperature, top-k and top-p; one-hot if greedy."""
    logits = logits.astype(jnp.float32)
    shape = (-1,) + (1,) * (logits.ndim - 1)
    temperature, top_k, top_p = (jnp.asarray(v).reshape(shape) for v in settings[:3])
    cold = temperature <= 0
    # From the best token down, so that a tiny temperature overflows to -inf, never to a second +inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(cold, 1.0, temperature)
    best = jnp.argmax(logits, axis=-1)[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where(cold, jnp.where(best, 0.0, -jnp.inf), filter_logits(scaled, top_k, top_p))


def distribution(logits: jax.Array, settings: Settings) -> jax.Array:
    """Probabilities float32[S, ..., V] that a token is drawn with from logits [S, ..., V] under `settings` [S]."""
    return jax.nn.softmax(drawn_logits(logits, settings), axis=-1)


def draft_tokens(logits: jax.Array, settings: Settings, position: jax.Array) -> jax.Array:
    """Drafts int32[S] for the tokens at `position` int32[S], drawn from logits [S, V]."""
    return _draw(drawn_logits(logits, settings), settings.seed, position, _DRAFT)


def next_tokens(logits: jax.Array, settings: Settings, position: jax.Array) -> jax.Array:
    """Undrafted tokens int32[S] at `position`, from the target's logits [S, V]: the first one behind a prompt."""
    return _draw(drawn_logits(logits, settings), settings.seed, position, _NEXT)


class Accepted(NamedTuple):
    """Outcome of one verified block per sequence."""

    count: jax.Array  # int32[S] accepted drafts
    next_token: jax.Array  # int32[S] the token behind them


def accept_block(p: jax.Array, q: jax.Array, drafts: jax.Array, count: jax.Array, uniform: jax.Array):
    """(accepted drafts int32[], weights [V] of the token behind them) of one sequence.

    Args:
      p: float32[K + 1, V] target distributions; row i is that of the token behind i drafts.
      q: float32[K, V] distributions that the drafts were drawn from.
      drafts: int32[K]; only the first `count` were verified, the rest is padding.
      uniform: float32[K] in [0, 1).

    The weights come from row `accepted` of p: the row behind the last accepted draft.
    """
    number = jnp.arange(drafts.shape[0])
    picked = drafts[:, None]
    p_draft = jnp.take_along_axis(p[:-1], picked, axis=-1)[:, 0]
    q_draft = jnp.take_along_axis(q, picked, axis=-1)[:, 0]
    # A product instead of p / q: a draft that q gives no weight (nobody drew it) must not become infinity.
    passed = (uniform * q_draft < p_draft) & (number < count)
    accepted = jnp.sum(jnp.cumprod(passed.astype(jnp.int32)))
    row = p[accepted]
    rejected_q = jnp.where(accepted < count, q[jnp.minimum(accepted, drafts.shape[0] - 1)], 0.0)
    rest = jnp.maximum(row - rejected_q, 0.0)
    # p and q equal up to rounding leave nothing; then a rejection had probability 0 and p is as good.
    return accepted, jnp.where(jnp.sum(rest) > 0, rest, row)


def accept_drafts(
    target_logits: jax.Array,
    draft_logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    length: jax.Array,
    settings: Settings,
) -> Accepted:
    """The rejection rule for S sequences, both sides treated alike.

    Args:
      target_logits: [S, K + 1, V] of the verified rows: the next token, then the drafts.
      draft_logits: [S, K, V] that the drafts int32[S, K] were drawn from.
      count: int32[S] drafts verified, 0..K. Rows behind them are padding of any value.
      length: int32[S] committed tokens: the next token's position.
    """
    p, q = distribution(target_logits, settings), distribution(draft_logits, settings)
    position = length[:, None] + 1 + jnp.arange(drafts.shape[1])
    uniform = jax.vmap(lambda s, ps: jax.vmap(lambda x: jax.random.uniform(_key(s, x, _ACCEPT)))(ps))(
        settings.seed, position
    )
    # Padding may be NaN (nobody computed it) and must not reach a maximum.
    live = jnp.arange(drafts.shape[1] + 1)[None] <= count[:, None]
    p, q = jnp.where(live[..., None], p, 0.0), jnp.where(live[:, 1:, None], q, 0.0)
    accepted, weights = jax.vmap(accept_block)(p, q, drafts, count, uniform)
    return Accepted(accepted, _draw(jnp.log(weights), settings.seed, length + 1 + accepted, _NEXT))


def check_drafts(drafts: int) -> None:
    """Raises ValueError for a number of drafts to verify below 0."""
    if drafts < 0:
        raise ValueError(f"drafts={drafts} must not be negative.")


def fixed_lengths(limits: Sequence[int], drafts: int) -> list[int]:
    """Drafts to verify per sequence: the same number for all, as far as their `limits` allow. The control."""
    check_drafts(drafts)
    return [min(limit, drafts) for limit in limits]


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds of a verify step by its rows, measured at some numbers of rows, linear between and flat outside them."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless rows ascend from 1 or more and every time is positive and finite."""
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(f"rows={list(self.rows)} must name one row count for each of {len(self.seconds)} times.")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"rows={list(self.rows)} must ascend without repeats from 1 or more.")
        if not all(0 < s < float("inf") for s in self.seconds):
            raise ValueError(f"seconds={list(self.seconds)} must be positive and finite.")

    def rate(self, rows: int) -> float:
        """Steps per second at `rows` rows."""
        return 1.0 / float(np.interp(rows, self.rows, self.seconds))


def profile_costs(run: Callable[[int], None], rows: Sequence[int], clock: Callable[[], float], repeats: int = 5):
    """A `CostTable` of `run(rows)`, which must finish one verify step of that many rows: best of `repeats` timings.

    Each size runs once unmeasured, so that nothing is timed while it compiles.
    """
    best = []
    for count in rows:
        run(count)
        times = []
        for _ in range(repeats):
            start = clock()
            run(count)
            times.append(clock() - start)
        best.append(min(times))
    return CostTable(tuple(rows), tuple(best))


def confidence_lengths(confidence: np.ndarray, limits: Sequence[int], costs: CostTable) -> list[int]:
    """Drafts to verify per sequence, from float[S, K] acceptance probabilities (after the sigmoid).

    Prefixes are admitted in descending order of a = the product of a sequence's confidences so far, while
    (S + sum of admitted a) * rate(S + admitted drafts) grows; the first that does not grow it ends the search. Going
    on past it would let a draft's own confidence decide about the drafts before it, which biases what is emitted.
    Source: DSpark, prefix scheduling (docs/contract.md). Raises ValueError for values outside 0..1.
    """
    confidence = np.asarray(confidence, np.float64)
    if not np.all((confidence >= 0) & (confidence <= 1)):
        raise ValueError("confidence must lie in 0..1: apply the sigmoid to a draft step's values first.")
    reach = np.cumprod(confidence, axis=1)
    order = sorted(((-reach[s, j], j, s) for s, limit in enumerate(limits) for j in range(min(limit, reach.shape[1]))))
    lengths, expected = [0] * len(limits), float(len(limits))
    best = expected * costs.rate(len(limits))
    for admitted, (minus_reach, _, s) in enumerate(order, 1):
        expected -= minus_reach
        found = expected * costs.rate(len(limits) + admitted)
        if not found > best:
            break
        best = found
        lengths[s] += 1
    return lengths


def _key(seed: jax.Array, position: jax.Array, use: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), use)


def _draw(log_weights: jax.Array, seed: jax.Array, position: jax.Array, use: int) -> jax.Array:
    """int32[S] from log-weights [S, V]: the maximum of log-weight plus Gumbel noise, so weight 0 never wins."""

    def one(row: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.categorical(_key(seed, position, use), row)

    return jax.vmap(one)(log_weights, jnp.asarray(seed), jnp.asarray(position)).astype(jnp.int32)
