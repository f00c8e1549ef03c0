"""How one cache row is packed into bytes: the registry of KV formats.

A format is a code for the elements, a code for the scales and the number of elements that share a scale. A packed row
is all element codes, then all scales. Widths and bytes: model.md §2.6-2.7; rounding: golden README §6 "Quantisers".
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.numerics import minifloat
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
    """UE8M0: the smallest power of two that clips nothing. floor: smallest amax, so that no scale is zero (B56)."""

    floor: float
    bits: int = 8

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
    bits: int = 8

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
    bits: int = 32

    def encode(self, amax: jax.Array, largest: float) -> jax.Array:
        return minifloat.float_bits(minifloat.true_divide(amax, largest))

    def divide(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return minifloat.true_divide(x, minifloat.bits_to_float(codes))

    def multiply(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        return x * minifloat.bits_to_float(codes)


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """Packs rows of a cache. Hashable: meant as a static field or static jit argument.

    name: registry key. element: code of the values. scale: code of the scales, None = no scale.
    group: elements per scale, None = the whole row.
    """

    name: str
    element: Minifloat | WideFloat
    scale: Scale | None = None
    group: int | None = None

    def check_width(self, width: int) -> None:
        """Raises ValueError if rows of `width` elements cannot be packed."""
        if width < 1:
            raise ValueError(f"width {width} of a {self.name} row is not positive")
        if self.group is not None and width % self.group:
            raise ValueError(f"width {width} is not a multiple of the {self.name} group of {self.group}")

    def row_bytes(self, width: int) -> int:
        """Bytes of one packed row of `width` elements."""
        self.check_width(width)
        return (width * self.element.bits + self._num_groups(width) * self._scale_bits) // 8

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

    @property
    def _scale_bits(self) -> int:
        return 0 if self.scale is None else self.scale.bits

    def _num_groups(self, width: int) -> int:
        return 1 if self.group is None else width // self.group

    def _grouped(self, x: jax.Array) -> jax.Array:
        groups = self._num_groups(x.shape[-1])
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
        values = self.element.decode(codes)
        if self.scale is None:
            return values
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


_FORMATS = {
    fmt.name: fmt
    for fmt in (
        KVFormat("fp4_e4m3", E2M1, E4M3Scale(floor=6 * 2.0**-9), group=16),
        KVFormat("mxfp4", E2M1, PowerOfTwoScale(floor=6 * 2.0**-126), group=32),
        KVFormat("mxfp8", E4M3, PowerOfTwoScale(floor=1e-4), group=32),
        KVFormat("fp8_fp32", E4M3, Float32Scale(floor=1e-4)),
        KVFormat("bf16", WideFloat(bits=16)),
        KVFormat("fp32", WideFloat(bits=32)),
    )
}

FORMAT_NAMES = tuple(_FORMATS)


def get_format(name: str) -> KVFormat:
    """The format of that name; ValueError lists the known names otherwise."""
    if name not in _FORMATS:
        raise ValueError(f"unknown KV format {name!r}; known formats: {', '.join(FORMAT_NAMES)}")
    return _FORMATS[name]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through(fmt: KVFormat, x: jax.Array) -> jax.Array:
    """fmt.fake_quant(x) whose gradient is the identity (model.md §5.2), for training that sees what the cache stores.

    A custom rule instead of `x + stop_gradient(q - x)`, which neither rounds to q exactly nor keeps -0.
    """
    return fmt.fake_quant(x)


@straight_through.defjvp
def _straight_through_jvp(fmt, primals, tangents):
    return straight_through(fmt, *primals), tangents[0]
