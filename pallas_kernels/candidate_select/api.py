"""The candidate pool of a query: its best blocks of entries, from the maxima of their scores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.candidate_select import pallas_triton, xla
from pallas_kernels.candidate_select.config import default_config
from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.topk_select.config import TopkConfig

OP = "candidate_select"


def candidate_select(
    block_scores: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    topk_blocks: int,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: TopkConfig | None = None,
) -> jax.Array:
    """Numbers of the best blocks per query, ascending: float32[T, NB] -> int32[T, topk_blocks], padded with -1.

    The block of the newest of `visible` int32[T] entries (0 = none) is pinned: it counts among the `topk_blocks` and
    precedes every score; a legal +inf counts as the largest finite one. -inf and NaN are never selected; +0 equals -0;
    of equal scores the lowest block wins. topk_blocks may exceed NB.
    implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernel, None = the tuned ones.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.3.2.
    """
    if block_scores.dtype != jnp.float32 or block_scores.ndim != 2 or block_scores.shape[1] < 1:
        got = f"{block_scores.dtype}{list(block_scores.shape)}"
        raise ValueError(f"{OP}: block_scores must be float32[T, NB] with NB >= 1, got {got}.")
    if visible.dtype != jnp.int32 or visible.shape != block_scores.shape[:1]:
        want = f"int32[{block_scores.shape[0]}]"
        raise ValueError(f"{OP}: visible must be {want}, got {visible.dtype}{list(visible.shape)}.")
    for name, value in (("block_size", block_size), ("topk_blocks", topk_blocks)):
        if value < 1:
            raise ValueError(f"{OP}: {name}={value} must be at least 1.")
    config = config or default_config(block_scores.shape[1], topk_blocks)
    wanted = {"block_size": block_size, "topk_blocks": topk_blocks}
    run = functools.partial(pallas_triton.candidate_select, **wanted, config=config, interpret=interpret)
    kernels = {"pallas_triton": Kernel(run, pallas_triton.unsupported(block_scores, topk_blocks, config))}
    plain = functools.partial(xla.candidate_select, **wanted)
    return dispatch(OP, implementation, plain, kernels, block_scores, visible, interpret=interpret)
