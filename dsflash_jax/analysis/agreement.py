"""How far two next-token distributions are apart, from their logits. Free of JAX, in float64."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities float64[..., V]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats [...], p from `logits` and q from `others`, both [..., V].

    Raises FloatingPointError where a logit is not finite: a divergence of nothing would read as agreement.
    """
    for name, values in (("logits", logits), ("others", others)):
        if not np.isfinite(values).all():
            raise FloatingPointError(f"{name} hold values that are not finite: they have no distribution.")
    p, q = log_softmax(logits), log_softmax(others)
    return np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)  # rounding may leave -1e-17


def same_best(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool[...]: whether both give the same best token; the lowest id among equals."""
    return logits.argmax(axis=-1) == others.argmax(axis=-1)
