"""Index scores of the entries of candidate blocks, listed per query."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.candidate_scores import pallas_triton, xla
from pallas_kernels.candidate_scores.config import CandidateConfig, default_config
from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.common.formats import PagedRows
from pallas_kernels.indexer_scores.inputs import SCRATCH_BYTES, check_inputs

OP = "candidate_scores"


def candidate_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    blocks: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    score_dtype: str = "float32",
    scratch_bytes: int = SCRATCH_BYTES,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: CandidateConfig | None = None,
) -> jax.Array:
    """sum_h weights[h] * relu(q[h] . k) of the entries of listed blocks; reads no other keys.

    Args:
      q: float32 or bfloat16 [T, H, D], rounded like the keys; its dtype is that of the products, summed in float32.
      weights: float32[T, H], signed, already scaled. keys: packed index keys; keys.seq int32[T].
      blocks: int32[T, C], numbers of aligned blocks of `block_size` entries, in any order; -1 = none.
      visible: int32[T], entries that a query may see; 0 = none.
      score_dtype, scratch_bytes, implementation, interpret: as of `indexer_scores`. config: tiles of the kernel.

    Returns: float32[T, C * block_size], -inf for absent blocks, entries >= visible and entries without a page.
    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.3.2 (Reindex layers score the candidate pool only).
    """
    if q.ndim != 3:
        raise ValueError(f"{OP}: q must be [T, H, D], got {list(q.shape)}.")
    check_inputs(OP, q, weights, keys, visible, score_dtype, scratch_bytes)
    if blocks.dtype != jnp.int32 or blocks.ndim != 2 or blocks.shape[0] != q.shape[0] or not blocks.shape[1]:
        raise ValueError(f"{OP}: blocks must be int32[{q.shape[0]}, C], got {blocks.dtype}{list(blocks.shape)}.")
    if block_size < 1:
        raise ValueError(f"{OP}: block_size={block_size} must be at least 1.")
    config = config or default_config(keys.layout.format)
    run = functools.partial(pallas_triton.candidate_scores, block_size=block_size, config=config, interpret=interpret)
    reasons = pallas_triton.unsupported(q, keys, block_size, score_dtype, config, interpret)
    plain = functools.partial(
        xla.candidate_scores, block_size=block_size, score_dtype=score_dtype, scratch_bytes=scratch_bytes
    )
    kernels = {"pallas_triton": Kernel(run, reasons)}
    return dispatch(OP, implementation, plain, kernels, q, weights, keys, blocks, visible, interpret=interpret)
