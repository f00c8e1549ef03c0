"""Rotary position embedding over adjacent pairs, with YaRN.

Source: reference inference/model.py; no magnitude factor and no temperature go with YaRN.
"""

import math

import numpy as np

F32 = np.float32


def frequencies(dim, base, yarn=None):
    """Angle per position of every pair, float32 [dim / 2].

    dim: rotated width (even). base: RoPE theta.
    yarn: None for plain RoPE, else (factor, original_length, beta_fast, beta_slow).

    Each is 1 / float32(base^(2i/dim)), the power taken in double from a float32 exponent and rounded once.
    """
    if dim % 2:
        raise ValueError(f"dim={dim} must be even: RoPE rotates pairs.")
    theta = np.zeros(dim // 2, F32)
    for i in range(dim // 2):
        theta[i] = F32(1.0) / F32(math.pow(base, float(F32(2 * i) / F32(dim))))
    if yarn is None:
        return theta

    factor, original_length, beta_fast, beta_slow = yarn
    low = max(math.floor(_pair_with_rotations(beta_fast, dim, base, original_length)), 0)
    # Clamped by dim - 1 although it is a pair index: the released code does so (reference inference/model.py).
    high = min(math.ceil(_pair_with_rotations(beta_slow, dim, base, original_length)), dim - 1)
    for i in range(dim // 2):
        ramp = F32(min(max(F32(i - low) / F32(max(high - low, 1e-3)), 0.0), 1.0))
        theta[i] = theta[i] / F32(factor) * ramp + theta[i] * (F32(1.0) - ramp)
    return theta


def _pair_with_rotations(rotations, dim, base, original_length):
    """Fractional index of the pair that turns `rotations` times within `original_length` positions."""
    return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))


def table_rows(positions, theta):
    """Cosines and sines at given positions: two float32 [positions, pairs]. The angle is rounded to float32."""
    cos = np.zeros((len(positions), len(theta)), F32)
    sin = np.zeros((len(positions), len(theta)), F32)
    for row, position in enumerate(positions):
        for i in range(len(theta)):
            angle = float(F32(position) * theta[i])
            cos[row, i] = math.cos(angle)
            sin[row, i] = math.sin(angle)
    return cos, sin


def tables(dim, length, base, yarn=None):
    """RoPE tables for positions 0..length-1: cos and sin, float32 [length, dim / 2]. Arguments as `frequencies`."""
    return table_rows(range(length), frequencies(dim, base, yarn))


def rotate(x, cos_row, sin_row, inverse=False):
    """Rotate the tail of a vector (or of several at one position).

    x: [..., D]; cos_row, sin_row: [R / 2] for that position. The last R elements are taken as R / 2 complex numbers
    x[2i] + i*x[2i+1] and multiplied by cos + i*sin (its conjugate if `inverse`). Returns float32 [..., D].
    """
    out = np.array(x, F32)
    start = out.shape[-1] - 2 * len(cos_row)
    for i in range(len(cos_row)):
        cos, sin = F32(cos_row[i]), F32(-sin_row[i] if inverse else sin_row[i])
        real, imag = out[..., start + 2 * i].copy(), out[..., start + 2 * i + 1].copy()
        out[..., start + 2 * i] = real * cos - imag * sin
        out[..., start + 2 * i + 1] = real * sin + imag * cos
    return out
