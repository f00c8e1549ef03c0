"""Small floating-point codes by integer arithmetic that runs alike in kernels and in plain XLA.

No casts to 8-bit floats: compute capability 8.0 has none in Triton. Exact for every code; CPUs flush float32
subnormals, so E4M3 goes through float16, whose subnormals no backend flushes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_BIAS, _MANTISSA = 127, 23  # of float32


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """4-bit codes (int32) -> float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (-0 included)."""
    magnitude = codes & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + ((_BIAS - 1) << _MANTISSA), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where((codes & 8) != 0, -value, value)


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """8-bit codes (int32) -> float32; the two NaN codes give NaN."""
    half = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    value = lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32) * 256.0
    return jnp.where((codes & 0x7F) == 0x7F, jnp.nan, value)


def decode_e8m0(codes: jax.Array) -> jax.Array:
    """8-bit codes (int32) -> float32 2^(code - 127), 255 is NaN; code 0 is a denormal that a product may flush."""
    bits = jnp.where(codes == 0, 1 << (_MANTISSA - 1), codes << _MANTISSA)
    return jnp.where(codes == 255, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32))


def decode_bf16(codes: jax.Array) -> jax.Array:
    """16-bit codes (int32) -> float32."""
    return lax.bitcast_convert_type(codes << 16, jnp.float32)


def decode_f32(codes: jax.Array) -> jax.Array:
    """32-bit codes (int32) -> float32."""
    return lax.bitcast_convert_type(codes, jnp.float32)


DECODERS = {
    "e2m1": decode_e2m1, "e4m3": decode_e4m3, "e8m0": decode_e8m0, "bfloat16": decode_bf16, "float32": decode_f32,
}  # fmt: skip
