"""Exact top-k of each row, ascending positions: what sparse attention and the candidate pool select by."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.topk_select import pallas_triton, xla
from pallas_kernels.topk_select.config import TopkConfig, default_config

OP = "topk_select"


def topk_select(
    scores: jax.Array,
    k: int,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: TopkConfig | None = None,
) -> jax.Array:
    """Positions of the k largest scores of each row, ascending: float32[T, N] -> int32[T, k], padded with -1.

    Of equal scores the lowest position wins; +0 equals -0; NaN and -inf are never selected. k may exceed N.
    implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernel, None = the tuned ones.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.3.2 (the index_topk best entries per query).
    """
    if scores.dtype != jnp.float32 or scores.ndim != 2 or scores.shape[1] < 1:
        raise ValueError(f"{OP}: scores must be float32[T, N] with N >= 1, got {scores.dtype}{list(scores.shape)}.")
    if k < 1:
        raise ValueError(f"{OP}: k={k} must be at least 1.")
    config = config or default_config(scores.shape[1], k)
    reasons = pallas_triton.unsupported(scores, k, config)
    kernel = Kernel(functools.partial(pallas_triton.topk_select, k=k, config=config, interpret=interpret), reasons)
    plain = functools.partial(xla.topk_select, k=k)
    return dispatch(OP, implementation, plain, {"pallas_triton": kernel}, scores, interpret=interpret)
