"""The loss of the draft layers against their frozen target (DSpark; docs/contract.md)."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsflash_jax.modules.draft_sequence import DraftForward
from dsflash_jax.training.losses import token_nll
from dsflash_jax.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """How draft layers are trained behind a frozen backbone; the weights are DSpark's.

    Attributes:
      run: steps, rows, optimiser and seed, as for a backbone; what concerns its loss and its selection has no effect.
      anchors: blocks per row, at positions drawn anew for every row.
      decay: position i of a block counts exp(-i / decay) in all three parts of the loss.
      cross_entropy, distance, confidence: weights of the three parts.
    """

    run: TrainSettings = TrainSettings()  # noqa: RUF009  frozen
    anchors: int = 32
    decay: float = 4.0
    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        if self.anchors < 1:
            raise ValueError(f"anchors={self.anchors} must be at least 1.")
        if not (math.isfinite(self.decay) and self.decay > 0):
            raise ValueError(f"decay={self.decay} must be positive and finite.")
        for name in ("cross_entropy", "distance", "confidence"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative.")

    def to_dict(self) -> dict:
        """Plain JSON types, every field present."""
        return dataclasses.asdict(self)


class DraftLoss(NamedTuple):
    """Scalars float32, the parts unweighted, and per position of a block the mean chance of acceptance [block]."""

    total: jax.Array
    cross_entropy: jax.Array
    distance: jax.Array
    confidence: jax.Array
    acceptance: jax.Array


def acceptance_chance(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    """Chance [...] that a token drawn from the draft's distribution is accepted: 1 - ||p_draft - p_target||_1 / 2."""
    return 1.0 - 0.5 * _distance(draft_logits, target_logits)


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
