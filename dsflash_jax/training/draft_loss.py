"""The loss of the draft layers against their frozen target (DSpark; docs/contract.md)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsflash_jax.modules.draft_sequence import DraftForward
from dsflash_jax.training.losses import token_nll
from dsflash_jax.training.settings import DraftSettings


class DraftLoss(NamedTuple):
    """Scalars float32, the parts unweighted, and per position of a block the mean chance of acceptance [block]."""

    total: jax.Array
    cross_entropy: jax.Array
    distance: jax.Array
    confidence: jax.Array
    acceptance: jax.Array


def draft_loss(out: DraftForward, targets: jax.Array, settings: DraftSettings) -> DraftLoss:
    """Cross-entropy of the true tokens, L1 to the target's distribution, and BCE of the confidence.

    targets: int32[B, A, block], the token behind each row of a block. The confidence learns the chance of acceptance,
    as a constant: it does not pull the draft towards an easier target.
    """
    size = targets.shape[-1]
    weight = jnp.exp(-jnp.arange(size) / settings.decay)
    distance = _distance(out.drafted.logits, out.target_logits)
    chance = 1.0 - 0.5 * distance
    nll = token_nll(out.drafted.logits.reshape(-1, size, out.drafted.logits.shape[-1]), targets.reshape(-1, size))
    bce = _binary_cross_entropy(out.drafted.confidence, jax.lax.stop_gradient(chance))
    parts = [_decayed_mean(part, weight) for part in (nll, distance, bce)]
    weights = (settings.cross_entropy, settings.distance, settings.confidence)
    total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    return DraftLoss(total, *parts, jnp.mean(chance.reshape(-1, size), axis=0))


def _distance(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    p, q = (jax.nn.softmax(logits.astype(jnp.float32), axis=-1) for logits in (target_logits, draft_logits))
    return jnp.sum(jnp.abs(q - p), axis=-1)


def _binary_cross_entropy(logit: jax.Array, chance: jax.Array) -> jax.Array:
    return -(chance * jax.nn.log_sigmoid(logit) + (1.0 - chance) * jax.nn.log_sigmoid(-logit))


def _decayed_mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.mean(values.reshape(-1, weight.shape[0]), axis=0) @ weight / jnp.sum(weight)
