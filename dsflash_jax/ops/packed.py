"""Weights kept as codes and power-of-two scales, and products with them, as released (contract.md, Packed weights).

Two kinds. "fp8": E4M3 codes [..., out, in], one scale per 32 x 32 tile. "fp4": two E2M1 codes per byte
[..., out, in / 2], the even input in the low nibble, one scale per row and 32 inputs. Scales are UE8M0 bytes.
Inputs are rounded like a row of the window cache: E4M3 with one power of two per 32 values.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsflash_jax.config import BEST_KERNELS, Kernels
from dsflash_jax.numerics.formats import get_format
from dsflash_jax.numerics.minifloat import E2M1, E4M3, divide_by_ue8m0, multiply_by_ue8m0, ue8m0_ceil
from pallas_kernels.packed_linear import api as op

BLOCK = 32  # inputs that share a scale; of "fp8" weights also outputs
KINDS = ("fp8", "fp4")
_FP4_ROWS = get_format("mxfp4")
# The smallest amax that a tile's scale is made for: a tile of zeros then has a normal float32 as its scale.
_LEAST_AMAX = 1e-30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight [..., out, in] as released: uint8 codes, uint8 scales, the kind (module text)."""

    codes: jax.Array
    scale: jax.Array
    kind: str = dataclasses.field(metadata=dict(static=True))
    kernels: Kernels = dataclasses.field(default=BEST_KERNELS, metadata=dict(static=True))  # that products with it call
    expert: jax.Array | None = None  # int32[G], of a stack [E, out, in]: which one each group of rows takes; -1 = none

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that the codes stand for."""
        *lead, width = self.codes.shape
        return (*lead, width if self.kind == "fp8" else 2 * width)


def packed_shapes(kind: str, out_width: int, in_width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of (codes, scale) of a weight [out, in]. Raises ValueError unless `in` is a multiple of 32."""
    if in_width % BLOCK:
        raise ValueError(f"in={in_width} of a packed weight must be a multiple of {BLOCK}, which share a scale.")
    if kind == "fp8":
        return (out_width, in_width), (-(-out_width // BLOCK), in_width // BLOCK)
    return (out_width, in_width // 2), (out_width, in_width // BLOCK)


def pack_weight(weight: jax.Array, kind: str) -> PackedWeight:
    """float32 [..., out, in] rounded to the kind's codes: the largest value of a tile or group is never clipped."""
    *lead, out_width, in_width = weight.shape
    packed_shapes(kind, out_width, in_width)
    if kind == "fp4":
        row = _FP4_ROWS.pack(weight)
        return PackedWeight(row[..., : in_width // 2], row[..., in_width // 2 :], kind)
    spare = -out_width % BLOCK
    padded = jnp.pad(weight, [(0, 0)] * len(lead) + [(0, spare), (0, 0)])
    tiles = padded.reshape(*lead, (out_width + spare) // BLOCK, BLOCK, in_width // BLOCK, BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(tiles), axis=(-3, -1), keepdims=True), _LEAST_AMAX)
    scale = ue8m0_ceil(amax, E4M3.largest)
    codes = E4M3.encode(divide_by_ue8m0(tiles, jnp.broadcast_to(scale, tiles.shape)))
    codes = codes.reshape(padded.shape)[..., :out_width, :]
    return PackedWeight(codes.astype(jnp.uint8), scale[..., 0, :, 0].astype(jnp.uint8), kind)


def unpack_weight(weight: PackedWeight) -> jax.Array:
    """float32 [..., out, in], exact for normal results."""
    *lead, out_width, in_width = weight.shape
    scale = jnp.repeat(_scale_per_output(weight), BLOCK, axis=-1).astype(jnp.uint32)
    return multiply_by_ue8m0(_values(weight.codes, weight.kind), scale).reshape(*lead, out_width, in_width)


def packed_linear(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """x [..., in] times a packed weight [out, in] -> float32[..., out], by the op of that name.

    A stack with `expert` takes x [G, T, in]; a group without an expert gives 0.
    """
    run = functools.partial(op.packed_linear, kind=weight.kind, **weight.kernels.options)
    if weight.expert is not None:
        return run(x, weight.codes, weight.scale, weight.expert)
    out = run(x.reshape(-1, x.shape[-1]), weight.codes, weight.scale)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _scale_per_output(weight: PackedWeight) -> jax.Array:
    """uint8[..., out, in / 32]."""
    if weight.kind == "fp4":
        return weight.scale
    return jnp.repeat(weight.scale, BLOCK, axis=-2)[..., : weight.shape[-2], :]


def _values(codes: jax.Array, kind: str) -> jax.Array:
    """Unscaled float32 values [..., out, in] of uint8 codes."""
    codes = codes.astype(jnp.uint32)
    if kind == "fp8":
        return E4M3.decode(codes)
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
    return E2M1.decode(pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1]))
