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
    expert: jax.Array | None = None,
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
    expert int32[G]: groups of rows, each with a weight of its own: x [G, T, in], codes and scale with a leading axis
    [E], result [G, T, out]. Group g reads weight expert[g] in 0..E - 1 and no other; -1 = none, and its result is 0.
    implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernel, None = the tuned ones.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: reference inference/kernel.py, both GEMMs.
    """
    _check(x, codes, scale, expert, kind)
    groups = () if expert is None else (expert,)
    config = config or default_config(x.shape[-2], x.shape[-1], codes.shape[-2], kind, grouped=bool(groups))
    kernel = Kernel(
        functools.partial(pallas_triton.packed_linear, kind=kind, config=config, interpret=interpret),
        pallas_triton.unsupported(x, codes, kind, config, interpret),
    )
    plain = functools.partial(xla.packed_linear, kind=kind)
    return dispatch(OP, implementation, plain, {"pallas_triton": kernel}, x, codes, scale, *groups, interpret=interpret)


def _check(x: jax.Array, codes: jax.Array, scale: jax.Array, expert: jax.Array | None, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{OP}: kind={kind!r} is unknown; known: {', '.join(KINDS)}.")
    grouped, groups, experts = expert is not None, "", ""
    if grouped:
        if expert.dtype != jnp.int32 or expert.ndim != 1 or not expert.size:
            raise ValueError(f"{OP}: expert must be int32[G], not empty, got {expert.dtype}{list(expert.shape)}.")
        groups, experts = f"{expert.shape[0]}, ", "E, "
    if x.dtype not in (jnp.float32, jnp.bfloat16) or x.ndim != 2 + grouped or 0 in x.shape:
        shape = f"[{groups}T, in]"
        raise ValueError(f"{OP}: x must be float32 or bfloat16 {shape}, not empty, got {x.dtype}{list(x.shape)}.")
    if grouped and x.shape[0] != expert.shape[0]:
        raise ValueError(f"{OP}: x has {x.shape[0]} groups of rows for {expert.shape[0]} entries of expert.")
    inputs = x.shape[-1]
    if inputs % BLOCK:
        raise ValueError(f"{OP}: in={inputs} must be a multiple of {BLOCK}, which share a scale.")
    if codes.dtype != jnp.uint8 or codes.ndim != x.ndim or 0 in codes.shape or in_width(codes, kind) != inputs:
        width = inputs // (2 if kind == "fp4" else 1)
        raise ValueError(f"{OP}: codes must be uint8[{experts}out, {width}], got {codes.dtype}{list(codes.shape)}.")
    wanted = (*codes.shape[:-2], *scale_shape(codes.shape[-2], inputs, kind))
    if scale.dtype != jnp.uint8 or scale.shape != wanted:
        raise ValueError(f"{OP}: scale must be uint8{list(wanted)}, got {scale.dtype}{list(scale.shape)}.")
