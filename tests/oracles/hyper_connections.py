"""Single-pass hyper-connections. Source: report §2.4.1, reference inference/model.py."""

import numpy as np

F32 = np.float32


def mixes(stream, fn, norm_eps):
    """Raw coefficients of one token: (fn . flat) * rsqrt(mean(flat^2) + eps), the root taken over all copies together.

    stream: [C, E]; fn: [(2 + C) * C, C * E]. Returns float32 [(2 + C) * C], laid out [pre C | post C | comb C*C].
    """
    flat = np.asarray(stream, F32).reshape(-1)
    # Scaled after the product, as the released code does.
    return (fn @ flat) * (F32(1.0) / np.sqrt(np.mean(flat * flat, dtype=F32) + F32(norm_eps)))


def coefficients(mix, scale, base, copies, iterations, eps):
    """Split raw coefficients into pre, post and comb.

    mix, base: [(2 + C) * C]; scale: [3] for the three parts; eps: hc_eps.
    Returns pre [C] = sigmoid + eps, post [C] = 2 * sigmoid, comb [C, C] (source, destination) after Sinkhorn.
    """
    mix, base, scale = np.asarray(mix, F32), np.asarray(base, F32), np.asarray(scale, F32)
    pre, post = np.zeros(copies, F32), np.zeros(copies, F32)
    logits = np.zeros((copies, copies), F32)
    for i in range(copies):
        pre[i] = _sigmoid(mix[i] * scale[0] + base[i]) + F32(eps)
        post[i] = F32(2.0) * _sigmoid(mix[copies + i] * scale[1] + base[copies + i])
        for j in range(copies):
            at = 2 * copies + i * copies + j
            logits[i, j] = mix[at] * scale[2] + base[at]
    return pre, post, sinkhorn(logits, iterations, eps)


def sinkhorn(logits, iterations, eps):
    """Nearly doubly stochastic matrix from logits [C, C]: float32 [C, C].

    Row softmax + eps, then a column normalisation, then iterations - 1 times rows and columns; it ends with columns.
    """
    m = np.array(logits, F32)
    for i in range(len(m)):
        row = np.exp(m[i] - m[i].max())
        m[i] = row / row.sum(dtype=F32) + F32(eps)
    _normalise_columns(m, eps)
    for _ in range(iterations - 1):
        for i in range(len(m)):
            m[i] /= m[i].sum(dtype=F32) + F32(eps)
        _normalise_columns(m, eps)
    return m


def _normalise_columns(m, eps):
    for j in range(m.shape[1]):
        m[:, j] /= m[:, j].sum(dtype=F32) + F32(eps)


def collapse(stream, pre):
    """Input of a sublayer: sum over copies of pre[i] * stream[i]. stream [C, E], pre [C] -> float32 [E]."""
    out = np.zeros(stream.shape[1], F32)
    for i in range(len(stream)):
        out += F32(pre[i]) * stream[i]
    return out


def expand(stream, sub, post, comb):
    """Stream after a sublayer: new[j] = post[j] * sub + sum_i comb[i, j] * stream[i].

    stream: [C, E] before the sublayer; sub: [E]; post: [C]; comb: [C, C]. Returns float32 [C, E].
    """
    out = np.zeros(stream.shape, F32)
    for j in range(len(stream)):
        out[j] = F32(post[j]) * sub
        for i in range(len(stream)):
            out[j] += F32(comb[i, j]) * stream[i]
    return out


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return F32(1.0) / (F32(1.0) + np.exp(-x))
