"""Products with packed FP8 and FP4 weights of released checkpoints, for a few rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.packed_linear import pallas_triton, xla
from pallas_kernels.packed_linear.config import LinearConfig, default_config
from pallas_kernels.packed_linear.weights import BLOCK, KINDS, Kind, in_width, scale_shape

OP = "packed_linear"


def packed_linear(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    *,
    kind: Kind = "fp8",
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: LinearConfig | None = None,
) -> jax.Array:
    """x float32 or bfloat16 [T, in] times a packed weight [out, in]: float32[T, out].

    kind "fp8": codes E4M3 uint8[out, in], scale uint8[ceil(out / 32), in / 32], one per tile of 32 x 32. "fp4": two
    E2M1 codes a byte uint8[out, in / 2], the even input low, scale uint8[out, in / 32]. Scales are UE8M0.
    x is rounded to E4M3 with one power of two per 32 values. Sums are float32; their order is the implementation's.
    implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernel, None = the tuned ones.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: reference inference/kernel.py, both GEMMs.
    """
    _check(x, codes, scale, kind)
    config = config or default_config(x.shape[0], x.shape[1], codes.shape[0], kind)
    kernel = Kernel(
        functools.partial(pallas_triton.packed_linear, kind=kind, config=config, interpret=interpret),
        pallas_triton.unsupported(x, codes, kind, config, interpret),
    )
    plain = functools.partial(xla.packed_linear, kind=kind)
    return dispatch(OP, implementation, plain, {"pallas_triton": kernel}, x, codes, scale, interpret=interpret)


def _check(x: jax.Array, codes: jax.Array, scale: jax.Array, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{OP}: kind={kind!r} is unknown; known: {', '.join(KINDS)}.")
    if x.dtype not in (jnp.float32, jnp.bfloat16) or x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{OP}: x must be float32 or bfloat16 [T, in], not empty, got {x.dtype}{list(x.shape)}.")
    if x.shape[1] % BLOCK:
        raise ValueError(f"{OP}: in={x.shape[1]} must be a multiple of {BLOCK}, which share a scale.")
    if codes.dtype != jnp.uint8 or codes.ndim != 2 or codes.shape[0] < 1 or in_width(codes, kind) != x.shape[1]:
        width = x.shape[1] // (2 if kind == "fp4" else 1)
        raise ValueError(f"{OP}: codes must be uint8[out, {width}], got {codes.dtype}{list(codes.shape)}.")
    wanted = scale_shape(codes.shape[0], x.shape[1], kind)
    if scale.dtype != jnp.uint8 or scale.shape != wanted:
        raise ValueError(f"{OP}: scale must be uint8{list(wanted)}, got {scale.dtype}{list(scale.shape)}.")
