"""RMS normalisation. Source: reference inference/model.py."""

import numpy as np

F32 = np.float32


def rms_norm(x, weight, eps):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, all in float32.

    x: [..., D]; weight: [D]; eps may be as small as 1e-20 (a zero row then gives zeros). Returns float32 [..., D].
    Squares beyond the float32 range overflow to inf, and the row becomes zero, as in the reference.
    """
    x = np.asarray(x, F32)
    rows = x.reshape(-1, x.shape[-1])
    out = np.zeros_like(rows)
    with np.errstate(over="ignore", under="ignore"):
        for r, row in enumerate(rows):
            mean = np.mean(row * row, dtype=F32)
            out[r] = row * (F32(1.0) / np.sqrt(mean + F32(eps))) * np.asarray(weight, F32)
    return out.reshape(x.shape)
