"""`candidate_select` by the top-k kernel, which ranks a pinned position above every score as it loads them."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.candidate_select.xla import newest_block
from pallas_kernels.topk_select import pallas_triton as topk
from pallas_kernels.topk_select.config import TopkConfig

unsupported = topk.unsupported


@functools.partial(jax.jit, static_argnames=("block_size", "topk_blocks", "config", "interpret"))
def candidate_select(
    block_scores: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    topk_blocks: int,
    config: TopkConfig,
    interpret: bool,
) -> jax.Array:
    """As `reference.candidate_select`."""
    pinned = newest_block(visible, block_size)
    return topk.topk_select(
        block_scores, pinned, k=topk_blocks, config=config, interpret=interpret, name="candidate_select"
    )
