"""How one cache row is packed into bytes: the formats of `format_table` with the arithmetic of their codes.

Rounding rules: docs/contract.md "Rounding of what is kept"; tests/golden/units_quant.npz holds the reference's results.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.numerics import minifloat
from dsflash_jax.numerics.format_table import CODE_BITS, FORMAT_NAMES, FormatFacts, format_facts
from dsflash_jax.numerics.minifloat import E2M1, E4M3, Minifloat, WideFloat


class Scale(Protocol):
    """One scale per group. Codes are uint32 [..., groups, 1] against elements float32 [..., groups, group]."""

    bits: int
    floor: float

    def encode(self, amax: jax.Array, largest: float) -> jax.Array:
        """Codes of the scales that map amax (the groups' largest magnitudes, >= floor) to about `largest`."""

    def divide(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        """x / scale."""

    def multiply(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        """x * scale."""


@dataclasses.dataclass(frozen=True)
class PowerOfTwoScale:
    """UE8M0: the smallest power of two that clips nothing. floor: smallest amax, so that no scale is zero."""

    floor: float
    bits: int = CODE_BITS["e8m0"]

    def encode(self, amax: jax.Array, largest: float) -> jax.Array:
        return minifloat.ue8m0_ceil(amax, largest)

    def divide(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return minifloat.divide_by_ue8m0(x, codes)

    def multiply(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return minifloat.multiply_by_ue8m0(x, codes)


@dataclasses.dataclass(frozen=True)
class E4M3Scale:
    """E4M3, rounded to nearest: it may round down and clip the group's largest value. Saturates at 448."""

    floor: float
    bits: int = CODE_BITS["e4m3"]

    def encode(self, amax: jax.Array, largest: float) -> jax.Array:
        return E4M3.encode(minifloat.true_divide(amax, largest))

    def divide(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return minifloat.true_divide(x, E4M3.decode(codes))

    def multiply(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return x * E4M3.decode(codes)


@dataclasses.dataclass(frozen=True)
class Float32Scale:
    """A little-endian float32, amax / largest."""

    floor: float
    bits: int = CODE_BITS["float32"]

    def encode(self, amax: jax.Array, largest: float) -> jax.Array:
        return minifloat.float_bits(minifloat.true_divide(amax, largest))

    def divide(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return minifloat.true_divide(x, minifloat.bits_to_float(codes))

    def multiply(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return x * minifloat.bits_to_float(codes)


@dataclasses.dataclass(frozen=True)
class KVFormat(FormatFacts):
    """Packs rows of a cache. Hashable: meant as a static field or static jit argument.

    element: code of the values. scale: code of the scales, None = no scale.
    """

    element: Minifloat | WideFloat
    scale: Scale | None

    def pack(self, x: jax.Array) -> jax.Array:
        """float32 or bfloat16 [..., D] -> uint8 [..., row_bytes(D)]."""
        codes, scales = self._quantise(x)
        parts = [_codes_to_bytes(codes, self.element.bits)]
        if self.scale is not None:
            parts.append(_codes_to_bytes(scales, self.scale.bits))
        return jnp.concatenate(parts, axis=-1)

    def unpack(self, rows: jax.Array, width: int) -> jax.Array:
        """uint8 [..., row_bytes(width)] -> float32 [..., width], exact. Raises ValueError on any other row length."""
        expected = self.row_bytes(width)
        if rows.dtype != jnp.uint8 or rows.shape[-1] != expected:
            raise ValueError(
                f"{self.name} rows of width {width} are uint8 [..., {expected}], got {rows.dtype} {list(rows.shape)}"
            )
        code_bytes = width * self.element.bits // 8
        codes = _bytes_to_codes(rows[..., :code_bytes], self.element.bits)
        scales = None if self.scale is None else _bytes_to_codes(rows[..., code_bytes:], self.scale.bits)
        return self._dequantise(codes, scales)

    def fake_quant(self, x: jax.Array) -> jax.Array:
        """Values that a cache would give back, in x's dtype: unpack(pack(x)) bit for bit, without the bytes."""
        return self._dequantise(*self._quantise(x)).astype(x.dtype)

    def _grouped(self, x: jax.Array) -> jax.Array:
        groups = self.num_groups(x.shape[-1])
        return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)

    def _quantise(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Codes uint32 [..., D] and scale codes uint32 [..., groups] (None without scales)."""
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{self.name} packs float32 or bfloat16 rows, got {x.dtype}")
        self.check_width(x.shape[-1])
        x = x.astype(jnp.float32)
        if self.scale is None:
            return self.element.encode(x), None
        grouped = self._grouped(x)
        amax = jnp.maximum(jnp.max(jnp.abs(grouped), axis=-1, keepdims=True), self.scale.floor)
        scales = self.scale.encode(amax, self.element.largest)
        return self.element.encode(self.scale.divide(grouped, scales)).reshape(x.shape), scales[..., 0]

    def _dequantise(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        if self.scale is None:
            return self.element.decode(codes)
        values = self.element.decode(_apart(codes))
        return self.scale.multiply(self._grouped(values), scales[..., None]).reshape(codes.shape)


def _codes_to_bytes(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 codes [..., n] -> uint8 [..., n * bits / 8], little-endian; of two 4-bit codes the even index is low."""
    lanes = 32 // bits
    if codes.shape[-1] % lanes == 0:
        # Whole words by one reduction: the CPU backend otherwise fuses the quantiser into the concatenation of codes
        # and scales, element by element, at up to ten times the cost.
        lanes_last = codes.reshape(*codes.shape[:-1], codes.shape[-1] // lanes, lanes)
        words = lax.reduce_or(lanes_last << (bits * jnp.arange(lanes, dtype=jnp.uint32)), (codes.ndim,))
    else:
        words = codes.astype({8: jnp.uint8, 16: jnp.uint16}[bits])
    data = lax.bitcast_convert_type(words, jnp.uint8)
    return data.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8)


def _apart(codes: jax.Array) -> jax.Array:
    """The same codes as an array of their own, by a reduction, which XLA does not fuse into what follows.

    Picking codes out of a row and multiplying by the scale of a group have different shapes. In one loop the CPU
    backend does not vectorise them, at three times the cost (JAX 0.10 and 0.11).
    """
    return lax.reduce_or(jnp.stack([codes, jnp.zeros_like(codes)]), (0,))


def _bytes_to_codes(data: jax.Array, bits: int) -> jax.Array:
    """Inverse of `_codes_to_bytes`."""
    if bits == 8:
        return data.astype(jnp.uint32)
    # Words of four bytes (two for bfloat16), then one shift per lane: on the CPU backend this vectorises, while
    # interleaving two nibble planes costs about twice as much.
    word_bytes = 2 if bits == 16 else 4
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // word_bytes, word_bytes).astype(jnp.uint32)
    words = functools.reduce(jnp.bitwise_or, [parts[..., i] << (8 * i) for i in range(word_bytes)])
    if bits >= 16:
        return words
    lanes = (words[..., None] >> (bits * jnp.arange(32 // bits, dtype=jnp.uint32))) & ((1 << bits) - 1)
    return lanes.reshape(*data.shape[:-1], data.shape[-1] * 8 // bits)


_ELEMENTS = {"e2m1": E2M1, "e4m3": E4M3} | {wide: WideFloat(CODE_BITS[wide]) for wide in ("bfloat16", "float32")}
_SCALES = {"e4m3": E4M3Scale, "e8m0": PowerOfTwoScale, "float32": Float32Scale}


def _with_codes(facts: FormatFacts) -> KVFormat:
    scale = None if facts.scale_code is None else _SCALES[facts.scale_code](floor=facts.amax_floor)
    return KVFormat(**dataclasses.asdict(facts), element=_ELEMENTS[facts.element_code], scale=scale)


_FORMATS = {name: _with_codes(format_facts(name)) for name in FORMAT_NAMES}


def get_format(name: str) -> KVFormat:
    """The format of that name; ValueError lists the known names otherwise."""
    return _FORMATS[format_facts(name).name]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through(fmt: KVFormat, x: jax.Array) -> jax.Array:
    """fmt.fake_quant(x) whose gradient is the identity, for training that sees what the cache stores.

    The report trains with rounded KV (R §2.4.4); that the gradient passes straight through is presumed, not published.

    A custom rule instead of `x + stop_gradient(q - x)`, which neither rounds to q exactly nor keeps -0.
    """
    return fmt.fake_quant(x)


@straight_through.defjvp
def _straight_through_jvp(fmt, primals, tangents):
    return straight_through(fmt, *primals), tangents[0]
