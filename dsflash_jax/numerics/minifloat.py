"""Bit-exact small floating-point codes: E2M1, E4M3, bfloat16 and the power-of-two scale UE8M0.

Everything works on float32 bit patterns instead of casts, `log2` or `exp2`, for two reasons measured on JAX 0.10.2
and 0.11.2. XLA's CPU backend flushes denormal operands and results to zero, and it rewrites `x / broadcast(s)` to
`x * broadcast(1 / s)`, which moves rounding ties. And JAX's own cast to E4M3 turns 465 and above into NaN instead of
448. Integer arithmetic is the same eagerly, under `jit` and on every backend. Codes travel as uint32; `formats` turns
them into bytes. NaN and infinite inputs are unspecified unless a docstring says otherwise.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsflash_jax.numerics.format_table import CODE_BITS, E2M1_LARGEST

FLOAT32_MANTISSA_BITS = 23
FLOAT32_BIAS = 127
MAGNITUDE_MASK = 0x7FFFFFFF
SMALLEST_NORMAL_BITS = 1 << FLOAT32_MANTISSA_BITS
MANTISSA_MASK = SMALLEST_NORMAL_BITS - 1
QUIET_NAN_BITS = 0x7FC00000
HALF_BITS = (FLOAT32_BIAS - 1) << FLOAT32_MANTISSA_BITS  # bit pattern of 0.5


def float_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32, the bit pattern."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def bits_to_float(bits: jax.Array) -> jax.Array:
    """uint32 bit pattern -> float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def true_divide(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """Correctly rounded float32 `x / divisor`, also where XLA would multiply by a rounded reciprocal.

    XLA does so when the divisor is a constant or a broadcast. A divisor that seems to depend on every x is neither; an
    optimization barrier would not do, because vmap moves the broadcast behind it.
    """
    return x / jnp.where(jnp.isnan(x), x, divisor)


@dataclasses.dataclass(frozen=True)
class Minifloat:
    """A sign bit, a short exponent with subnormals and a short mantissa; round to nearest even, saturating.

    bits: width of a code. largest: largest finite value. has_nan: the all-ones magnitude means NaN (E4M3FN).
    """

    bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_nan: bool = False

    @property
    def _shift(self) -> int:
        """Mantissa bits of float32 that the code drops."""
        return FLOAT32_MANTISSA_BITS - self.mantissa_bits

    @property
    def _smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    def encode(self, x: jax.Array) -> jax.Array:
        """float32 -> uint32 codes of any shape; ties go to the even code, the sign of zero is kept.

        Clamps to +-largest first: E4M3's own overflow is NaN.
        """
        bits = float_bits(x)
        magnitude = jnp.minimum(bits_to_float(bits & MAGNITUDE_MASK), self.largest)
        half_up = float_bits(magnitude) + ((1 << (self._shift - 1)) - 1)
        odd = (float_bits(magnitude) >> self._shift) & 1
        normal = ((half_up + odd) >> self._shift) - ((FLOAT32_BIAS - self.bias) << self.mantissa_bits)
        # One unit in the last place of `anchor` is the subnormal step, so the addition itself rounds to nearest even.
        anchor = 2.0 ** (self._shift + 1 - self.bias)
        subnormal = float_bits(magnitude + anchor) & ((2 << self.mantissa_bits) - 1)
        code = jnp.where(magnitude < self._smallest_normal, subnormal, normal)
        return code | ((bits >> 31) << (self.bits - 1))

    def decode(self, codes: jax.Array) -> jax.Array:
        """uint32 codes -> float32 of the same shape, exact."""
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        normal = (magnitude << self._shift) + ((FLOAT32_BIAS - self.bias) << FLOAT32_MANTISSA_BITS)
        step = self._smallest_normal / (1 << self.mantissa_bits)
        subnormal = float_bits(magnitude.astype(jnp.float32) * step)
        value = jnp.where(magnitude < (1 << self.mantissa_bits), subnormal, normal)
        if self.has_nan:
            value = jnp.where(magnitude == (1 << (self.bits - 1)) - 1, jnp.uint32(QUIET_NAN_BITS), value)
        return bits_to_float(value | ((codes >> (self.bits - 1)) << 31))


E2M1 = Minifloat(bits=CODE_BITS["e2m1"], mantissa_bits=1, bias=1, largest=E2M1_LARGEST)
E4M3 = Minifloat(bits=CODE_BITS["e4m3"], mantissa_bits=3, bias=7, largest=448.0, has_nan=True)


@dataclasses.dataclass(frozen=True)
class WideFloat:
    """float32 (bits=32) or bfloat16 (bits=16) seen as a code, so that unquantised rows take the same path."""

    bits: int

    def encode(self, x: jax.Array) -> jax.Array:
        """float32 -> uint32 codes; bfloat16 rounds to nearest even, NaN and infinity pass."""
        if self.bits == 32:
            return float_bits(x)
        # The bitcast also keeps XLA from dropping the float32 -> bfloat16 -> float32 pair as excess precision.
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)

    def decode(self, codes: jax.Array) -> jax.Array:
        """uint32 codes -> float32, exact."""
        return bits_to_float(codes << (32 - self.bits))


def ue8m0_ceil(amax: jax.Array, largest: float) -> jax.Array:
    """Byte e of the smallest power of two s = 2^(e - 127) with largest * s >= amax, for normal positive float32 amax.

    Rounding up never clips a value. Adding the complement of `largest`'s mantissa carries into the exponent
    exactly when amax's mantissa exceeds it, so no multiplication or logarithm is involved.
    """
    reference = int(np.float32(largest).view(np.uint32))
    carry = MANTISSA_MASK - (reference & MANTISSA_MASK)
    exponent = (reference >> FLOAT32_MANTISSA_BITS) - FLOAT32_BIAS
    return ((float_bits(amax) + carry) >> FLOAT32_MANTISSA_BITS) - exponent


def ue8m0_decode(codes: jax.Array) -> jax.Array:
    """uint32 byte values 0..255 -> float32 2^(e - 127); 255 is NaN. Byte 0 is a float32 denormal."""
    bits = jnp.where(codes == 0, jnp.uint32(SMALLEST_NORMAL_BITS >> 1), codes << FLOAT32_MANTISSA_BITS)
    return bits_to_float(jnp.where(codes == 255, jnp.uint32(QUIET_NAN_BITS), bits))


def divide_by_ue8m0(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Exact float32 x / 2^(e - 127) for bytes 1..253, denormal x included although the CPU backend flushes it.

    A quotient that is itself denormal may become zero.
    """
    bits = float_bits(x)
    magnitude = bits & MAGNITUDE_MASK
    denormal = magnitude < SMALLEST_NORMAL_BITS
    # A denormal is its integer bit pattern times 2^-149 = 2^-23 * 2^-126; the 2^-126 joins the scale's exponent.
    scaled = magnitude.astype(jnp.float32) * (1.0 / SMALLEST_NORMAL_BITS)
    mantissa = jnp.where(denormal, scaled, bits_to_float(magnitude))
    codes = codes.astype(jnp.int32)
    inverse_exponent = jnp.where(denormal, jnp.maximum(128 - codes, 0), 254 - codes)
    quotient = mantissa * bits_to_float(inverse_exponent.astype(jnp.uint32) << FLOAT32_MANTISSA_BITS)
    return bits_to_float(float_bits(quotient) | (bits ^ magnitude))


def multiply_by_ue8m0(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Exact float32 x * 2^(e - 127) for bytes 1..254 and products that are normal, zero or +-0.5 * 2^-126.

    That last product, the smallest MXFP4 value times the smallest MXFP4 scale, is the only denormal that the quantisers
    can write. It is put together as an integer because the CPU backend would flush it; a rule for every denormal would
    cost a third of the whole unpacking. Overflow gives infinity.
    """
    bits = float_bits(x)
    product = float_bits(x * ue8m0_decode(codes))
    denormal = (codes == 1) & ((bits & MAGNITUDE_MASK) == HALF_BITS)
    return bits_to_float(jnp.where(denormal, bits ^ (HALF_BITS | (SMALLEST_NORMAL_BITS >> 1)), product))
