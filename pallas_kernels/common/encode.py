"""Rounding to small floating-point codes by integer arithmetic that runs alike in kernels and in plain XLA.

The inverse of `codes`. Round to nearest, ties to the even code, saturating; UE8M0 scales round up. Two operations must
be exact to the last bit and are not everywhere: compilers turn x / s into x times a rounded reciprocal (or an
approximate division on a GPU) and a * b + c into one rounding. `Exact` holds forms of both that are rounded once.
NaN and infinite inputs of scaled formats are unspecified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.codes import decode_e4m3, decode_f32
from pallas_kernels.common.formats import Format

_BIAS, _MANTISSA = 127, 23  # of float32
_MAGNITUDE, _LEAST_NORMAL = 0x7FFFFFFF, 1 << _MANTISSA
_LARGEST = {"e2m1": 6.0, "e4m3": 448.0}


class Exact(NamedTuple):
    """Float32 operations that are correctly rounded on their own. Operands broadcast."""

    divide: Callable[[jax.Array, jax.Array | float], jax.Array]
    multiply: Callable[[jax.Array, jax.Array], jax.Array]


def _divide(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    # A divisor that seems to depend on every x is neither a constant nor a broadcast, whose reciprocal XLA would take.
    return x / jnp.where(x != x, x, divisor)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    # What passes through a select is not fused with a later addition.
    product = a * b
    return jnp.where(product == product, product, a + b)


XLA_EXACT = Exact(_divide, _multiply)  # also for interpreted kernels, which XLA runs


def bits_of(x: jax.Array) -> jax.Array:
    """float32 -> int32, the bit pattern."""
    return lax.bitcast_convert_type(x, jnp.int32)


def encode_e2m1(x: jax.Array) -> jax.Array:
    """float32 -> 4-bit codes (int32)."""
    return _encode(x, bits=4, mantissa=1, bias=1, largest=_LARGEST["e2m1"])


def encode_e4m3(x: jax.Array) -> jax.Array:
    """float32 -> 8-bit codes (int32)."""
    return _encode(x, bits=8, mantissa=3, bias=7, largest=_LARGEST["e4m3"])


def _encode(x: jax.Array, *, bits: int, mantissa: int, bias: int, largest: float) -> jax.Array:
    pattern = bits_of(x)
    magnitude = jnp.minimum(decode_f32(pattern & _MAGNITUDE), largest)
    field, shift = bits_of(magnitude), _MANTISSA - mantissa
    rounded = field + ((1 << (shift - 1)) - 1) + ((field >> shift) & 1)
    normal = (rounded >> shift) - ((_BIAS - bias) << mantissa)
    # One unit in the last place of the anchor is the subnormal step, so the addition itself rounds to nearest even.
    subnormal = bits_of(magnitude + 2.0 ** (shift + 1 - bias)) & ((2 << mantissa) - 1)
    code = jnp.where(magnitude < 2.0 ** (1 - bias), subnormal, normal)
    return code | ((pattern >> (32 - bits)) & (1 << (bits - 1)))


def encode_bf16(x: jax.Array) -> jax.Array:
    """float32 -> 16-bit codes (int32); infinity and NaN pass."""
    pattern = bits_of(x)
    rounded = pattern + 0x7FFF + ((pattern >> 16) & 1)
    return jnp.where(x == x, rounded >> 16, 0x7FC0) & 0xFFFF


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 values of x rounded to dtype (bfloat16 or float32), by integers: XLA may drop a pair of casts."""
    return x if dtype == jnp.float32 else decode_f32(encode_bf16(x) << 16)


def e8m0_ceil(amax: jax.Array, element: str) -> jax.Array:
    """Code e of the smallest 2^(e - 127) that clips nothing up to amax, for normal positive amax.

    Adding the complement of the largest element's mantissa carries into the exponent exactly when amax's exceeds it.
    """
    reference = int(np.float32(_LARGEST[element]).view(np.int32))
    carry = (_LEAST_NORMAL - 1) - (reference & (_LEAST_NORMAL - 1))
    return ((bits_of(amax) + carry) >> _MANTISSA) - ((reference >> _MANTISSA) - _BIAS)


def divide_by_e8m0(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Exact x / 2^(code - 127) for codes 1..253, denormal x included; a denormal quotient may become zero."""
    pattern = bits_of(x)
    magnitude = pattern & _MAGNITUDE
    denormal = magnitude < _LEAST_NORMAL
    # A denormal is its integer pattern times 2^-149 = 2^-23 * 2^-126; the 2^-126 joins the scale's exponent.
    mantissa = jnp.where(denormal, magnitude.astype(jnp.float32) * (1.0 / _LEAST_NORMAL), decode_f32(magnitude))
    inverse = jnp.where(denormal, jnp.maximum(128 - codes, 0), 254 - codes)
    quotient = mantissa * decode_f32(inverse << _MANTISSA)
    return decode_f32(bits_of(quotient) | (pattern ^ magnitude))


_ENCODERS = {"e2m1": encode_e2m1, "e4m3": encode_e4m3, "bfloat16": encode_bf16, "float32": bits_of}


def quantise(parts: Sequence[jax.Array], fmt: Format, exact: Exact) -> tuple[list[jax.Array], jax.Array | None]:
    """Codes of float32 parts [..., G, part of a group] that share the scale of their group; all int32.

    Returns (codes of each part, scale codes [..., G, 1]); no scale codes where the format has none.
    """
    encode = _ENCODERS[fmt.element]
    if fmt.scale is None:
        return [encode(part) for part in parts], None
    peaks = [jnp.max(jnp.abs(part), axis=-1, keepdims=True) for part in parts]
    amax = peaks[0]
    for peak in peaks[1:]:
        amax = jnp.maximum(amax, peak)
    amax = jnp.maximum(amax, fmt.amax_floor)
    if fmt.scale == "e8m0":
        scales = e8m0_ceil(amax, fmt.element)
        return [encode(divide_by_e8m0(part, scales)) for part in parts], scales
    ideal = exact.divide(amax, _LARGEST[fmt.element])
    scales = encode_e4m3(ideal) if fmt.scale == "e4m3" else bits_of(ideal)
    scale = decode_e4m3(scales) if fmt.scale == "e4m3" else ideal
    return [encode(exact.divide(part, scale)) for part in parts], scales


def rotate(even: jax.Array, odd: jax.Array, cos: jax.Array, sin: jax.Array, exact: Exact) -> tuple[jax.Array, ...]:
    """Pairs (even, odd) rotated by the angle of (cos, sin), float32, every product and sum rounded on its own."""
    times = exact.multiply
    return times(even, cos) - times(odd, sin), times(even, sin) + times(odd, cos)
