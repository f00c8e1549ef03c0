"""Packed weights as the op reads them: kinds, scales per output, and inputs rounded as the products take them."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common import encode
from pallas_kernels.common.codes import decode_e2m1, decode_e4m3, decode_e8m0
from pallas_kernels.common.formats import FORMATS

Kind = Literal["fp8", "fp4"]
BLOCK = 32  # inputs that share a scale; of "fp8" weights also outputs
KINDS = ("fp8", "fp4")


def in_width(codes: jax.Array, kind: Kind) -> int:
    """Inputs of a weight, static."""
    return codes.shape[-1] * (2 if kind == "fp4" else 1)


def scale_shape(out: int, inputs: int, kind: Kind) -> tuple[int, int]:
    """Shape of the scales of a weight [out, inputs]."""
    return (out if kind == "fp4" else -(-out // BLOCK)), inputs // BLOCK


def scale_per_output(scale: jax.Array, out: int, kind: Kind) -> jax.Array:
    """uint8[out, in / 32]."""
    return scale if kind == "fp4" else jnp.repeat(scale, BLOCK, axis=0)[:out]


def values(codes: jax.Array, kind: Kind) -> jax.Array:
    """Unscaled float32[out, in] of codes."""
    codes = codes.astype(jnp.int32)
    if kind == "fp8":
        return decode_e4m3(codes)
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
    return decode_e2m1(pairs.reshape(codes.shape[0], -1))


def rounded(x: jax.Array) -> jax.Array:
    """x [T, in] rounded to E4M3 with one power of two per 32 values: float32 values that bfloat16 holds exactly."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, BLOCK)
    (codes,), scales = encode.quantise([groups], FORMATS["mxfp8"], encode.XLA_EXACT)
    return (decode_e4m3(codes) * decode_e8m0(scales)).reshape(x.shape)
