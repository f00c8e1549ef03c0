"""The training loss: cross-entropy on answers and on text, and the indexer's KL."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossParts(NamedTuple):
    """Scalars float32: the weighted total and its unweighted parts, in nats."""

    total: jax.Array
    answer: jax.Array
    text: jax.Array
    indexer_kl: jax.Array


class Counts(NamedTuple):
    """Answer and text targets of the whole batch, float32 scalars: the denominators of the two means."""

    answer: jax.Array
    text: jax.Array


def token_nll(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood per token in nats, float32[B, T]. logits: [B, T, V]; targets: int[B, T]."""
    logits = logits.astype(jnp.float32)
    # A one-hot sum instead of a gather: its gradient is dense arithmetic, not a scatter, which is slow on CPUs.
    chosen = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def count_targets(answer_mask: jax.Array, text_mask: jax.Array) -> Counts:
    """Targets of each kind in this part of a batch."""
    return Counts(jnp.sum(answer_mask, dtype=jnp.float32), jnp.sum(text_mask, dtype=jnp.float32))


def loss_parts(
    logits: jax.Array, indexer_kl: jax.Array, targets: jax.Array, answer_mask: jax.Array, text_mask: jax.Array,
    counts: Counts, *, text_weight: float, indexer_weight: float,
) -> LossParts:
    """Answer CE + text_weight * text CE + indexer_weight * indexer KL.

    `counts` are those of the whole batch, so that the parts of a batch split over devices add up to the same loss; a
    kind without targets contributes 0. Each mean is over its own targets: text tokens are many more than answers.
    """
    nll = token_nll(logits, targets)
    answer = jnp.sum(nll * answer_mask) / jnp.maximum(counts.answer, 1.0)
    text = jnp.sum(nll * text_mask) / jnp.maximum(counts.text, 1.0)
    total = answer + text_weight * text + indexer_weight * indexer_kl
    return LossParts(total, answer, text, indexer_kl)
