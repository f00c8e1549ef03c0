"""Mixture of experts. Source: report §4.2.1, reference inference/model.py."""

import numpy as np

F32 = np.float32


def gate(x, weight, bias, top_k, scoring, *, normalise=True, route_scale=1.0, temperature=1.0):
    """Experts and route weights of one token.

    x: [E]; weight: [n, E]; bias: [n], used to choose only; scoring: "sqrtsoftplus", "sigmoid" or "softmax".
    Weights are the unbiased scores of the chosen, divided by (sum + 1e-20) when `normalise` and top_k > 1, times
    route_scale. Returns (indices int32 [k], weights float32 [k]) by descending score + bias; among equals the lowest
    expert comes first.
    """
    logits = (np.asarray(weight, F32) @ np.asarray(x, F32)) / F32(temperature)
    raw = route_scores(logits, scoring)
    biased = raw + np.asarray(bias, F32)
    order = sorted(range(len(raw)), key=lambda e: (-float(biased[e]), e))[:top_k]
    weights = np.array([raw[e] for e in order], F32)
    if normalise and top_k > 1:
        weights = weights / (weights.sum(dtype=F32) + F32(1e-20))
    return np.array(order, np.int32), weights * F32(route_scale)


def route_scores(logits, scoring):
    """Score of each expert from its logit: float32 [n]."""
    logits = np.asarray(logits, F32)
    if scoring == "softmax":
        powers = np.exp(logits - logits.max())
        return powers / powers.sum(dtype=F32)
    if scoring == "sigmoid":
        with np.errstate(over="ignore"):
            return F32(1.0) / (F32(1.0) + np.exp(-logits))
    if scoring == "sqrtsoftplus":
        # Identity above 20, like the released code's softplus; log1p keeps the far negative end above zero.
        return np.array([np.sqrt(v if v > 20 else np.log1p(np.exp(v))) for v in logits], F32)
    raise ValueError(f"scoring={scoring!r} must be sqrtsoftplus, sigmoid or softmax.")


def expert(x, w1, w2, w3, limit, route_weight=1.0):
    """One SwiGLU expert: w2 (route_weight * silu(gate) * up).

    x: [E]; w1 (gate), w3 (up): [I, E]; w2: [E, I]; limit: gate clamped from above, up on both sides; 0 = no clamp.
    The route weight multiplies before w2. Returns float32 [E].
    """
    g, up = w1 @ np.asarray(x, F32), w3 @ np.asarray(x, F32)
    if limit > 0:
        g = np.minimum(g, F32(limit))
        up = np.minimum(np.maximum(up, F32(-limit)), F32(limit))
    with np.errstate(over="ignore"):
        silu = g / (F32(1.0) + np.exp(-g))
    return w2 @ (silu * up * F32(route_weight))


def combine(x, indices, weights, experts, shared, limit):
    """Routed experts in expert order, then the shared expert.

    x: [E]; indices, weights: [k] from `gate`; experts: list of (w1, w2, w3); shared: (w1, w2, w3). Returns float32 [E].
    """
    out = np.zeros(len(x), F32)
    for e in sorted(range(len(indices)), key=lambda i: indices[i]):
        out += expert(x, *experts[indices[e]], limit, weights[e])
    return out + expert(x, *shared, limit)
