"""Packed rows -> float32 in plain XLA: the CPU and fallback path of the ops that read packed rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.codes import DECODERS
from pallas_kernels.common.formats import CODE_BITS, Format

_LEAST_NORMAL_BITS, _SIGN = 1 << 23, -(2**31)  # of float32


def unpack_rows(rows: jax.Array, fmt: Format, width: int) -> jax.Array:
    """Packed rows uint8[..., row_bytes] -> float32[..., width], exact.

    Subnormal products other than +-0.5 * 2^-126 may become zero. Raises ValueError for any other row length.
    """
    if rows.dtype != jnp.uint8 or rows.shape[-1] != fmt.row_bytes(width):
        want = f"uint8[..., {fmt.row_bytes(width)}]"
        raise ValueError(f"{fmt.name} rows of width {width} are {want}, got {rows.dtype}{list(rows.shape)}.")
    split = fmt.code_bytes(width)
    codes = _codes(rows[..., :split], CODE_BITS[fmt.element])
    if fmt.scale is None:
        return DECODERS[fmt.element](codes)
    values = DECODERS[fmt.element](_apart(codes))
    groups = fmt.num_scales(width)
    values = values.reshape(*rows.shape[:-1], groups, width // groups)
    scale_codes = _codes(rows[..., split:], CODE_BITS[fmt.scale])[..., None]
    product = values * DECODERS[fmt.scale](scale_codes)
    if fmt.scale == "e8m0":
        product = jnp.where((scale_codes == 1) & (jnp.abs(values) == 0.5), _signed_least(values), product)
    return product.reshape(*rows.shape[:-1], width)


def _apart(codes: jax.Array) -> jax.Array:
    """The same codes as an array of their own, by a reduction, which XLA does not fuse into what follows.

    Picking codes out of a row and multiplying by the scale of a group have different shapes. In one loop the CPU
    backend does not vectorise them, at four times the cost (JAX 0.10 and 0.11).
    """
    return lax.reduce_or(jnp.stack([codes, jnp.zeros_like(codes)]), (0,))


def _signed_least(values: jax.Array) -> jax.Array:
    """+-2^-127: the only subnormal product that the quantisers write (0.5 in MXFP4), which a CPU would flush."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return lax.bitcast_convert_type((bits & jnp.int32(_SIGN)) | (_LEAST_NORMAL_BITS >> 1), jnp.float32)


def _codes(data: jax.Array, bits: int) -> jax.Array:
    """Little-endian codes uint8[..., n * bits / 8] -> int32[..., n]; of two 4-bit codes the even index is low."""
    if bits == 8:
        return data.astype(jnp.int32)
    if bits == 4:
        pairs = (data.astype(jnp.int32)[..., None] >> jnp.array([0, 4], jnp.int32)) & 15
        return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])
    size = bits // 8
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // size, size).astype(jnp.int32)
    return functools.reduce(jnp.bitwise_or, [parts[..., i] << (8 * i) for i in range(size)])
