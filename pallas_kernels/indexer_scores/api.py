"""Index scores of every entry that a sequence's block table names, and their maxima over candidate blocks."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.common.formats import PagedRows
from pallas_kernels.indexer_scores import pallas_triton, xla
from pallas_kernels.indexer_scores.config import IndexerConfig, default_config
from pallas_kernels.indexer_scores.inputs import SCRATCH_BYTES, check_inputs

OP = "indexer_scores"


def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    visible: jax.Array,
    *,
    block_size: int = 0,
    blocks_only: bool = False,
    score_dtype: str = "float32",
    scratch_bytes: int = SCRATCH_BYTES,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: IndexerConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """sum_h weights[h] * relu(q[h] . k) of every entry e < visible, -inf of all others and of entries without a page.

    Args:
      q: float32 or bfloat16 [N, B, H, D], tiles of B query rows of one sequence each, rounded like the keys; its dtype
        is that of the products, which are summed in float32.
      weights: float32[N, B, H], signed, already scaled.
      keys: packed index keys; keys.seq int32[N]. A table's width is what is scored: cut it to the pages in use.
      visible: int32[N, B], entries that a row may see; 0 = none.
      block_size: also return maxima over aligned blocks of so many entries, NaN counting as -inf; 0 = do not.
      blocks_only: return the maxima alone, so that no matrix of scores exists.
      score_dtype: "bfloat16" rounds the dot, the product and the head sum as the released code does (plain path only).
      scratch_bytes: bound of the plain path's temporaries. config: tiles of the kernel, None = the tuned ones.
      implementation, interpret: see `common.dispatch.dispatch`.

    Returns: scores float32[N, B, E] with E = keys.rows_per_seq, or (scores, maxima), or maxima
    float32[N, B, ceil(E / block_size)].
    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.3.1.
    """
    if q.ndim != 4:
        raise ValueError(f"{OP}: q must be [N, B, H, D], got {list(q.shape)}.")
    check_inputs(OP, q, weights, keys, visible, score_dtype, scratch_bytes)
    if block_size < 0 or (blocks_only and not block_size):
        raise ValueError(f"{OP}: block_size={block_size} must be at least {1 if blocks_only else 0}.")
    config = config or default_config(keys.layout.format, q.shape[1])
    wanted = {"block_size": block_size, "blocks_only": blocks_only}
    run = functools.partial(pallas_triton.indexer_scores, **wanted, config=config, interpret=interpret)
    reasons = pallas_triton.unsupported(q, keys, block_size, score_dtype, config, interpret)
    plain = functools.partial(xla.indexer_scores, **wanted, score_dtype=score_dtype, scratch_bytes=scratch_bytes)
    kernels = {"pallas_triton": Kernel(run, reasons)}
    return dispatch(OP, implementation, plain, kernels, q, weights, keys, visible, interpret=interpret)
