"""`candidate_scores` as a kernel: a program gathers the keys of some candidate blocks of one query and scores them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.candidate_scores.config import CandidateConfig
from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.formats import PagedRows
from pallas_kernels.common.tiles import power_of_two
from pallas_kernels.indexer_scores.pallas_triton import common_reasons, load_keys, load_queries, prepare_queries, score


def unsupported(
    q: jax.Array, keys: PagedRows, block_size: int, score_dtype: str, config: CandidateConfig, interpret: bool
) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    reasons = common_reasons(q, keys, score_dtype, config.entries, 1, 1, interpret)
    if not power_of_two(block_size) or block_size > config.entries:
        reasons.append(f"block_size={block_size} must be a power of two up to entries={config.entries} of the config")
    return tuple(reasons + common.grid_reasons("queries", q.shape[0]))


@functools.partial(jax.jit, static_argnames=("block_size", "config", "interpret"))
def candidate_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PagedRows,
    blocks: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    config: CandidateConfig,
    interpret: bool,
) -> jax.Array:
    """As `reference.candidate_scores`, of float32 scores."""
    queries, count = blocks.shape
    flat, flat_weights, heads = prepare_queries(q, weights, keys.layout)
    listed = config.entries // block_size
    kernel = functools.partial(
        _kernel, layout=keys.layout, unit=keys.unit, heads=heads, count=count, listed=listed, block_size=block_size
    )
    # The axis of queries comes second: programs that run together share a query and its part of the block table.
    return common.call(
        kernel, flat, flat_weights, visible, blocks, keys.arena, keys.table, keys.seq,
        name="candidate_scores", grid=(pl.cdiv(count, listed), queries),
        out_shape=jax.ShapeDtypeStruct((queries, count * block_size), jnp.float32), config=config, interpret=interpret,
    )  # fmt: skip


def _kernel(
    q_ref, weight_ref, visible_ref, block_ref, arena_ref, table_ref, seq_ref, out_ref,
    layout, unit, heads, count, listed, block_size,
):  # fmt: skip
    part, query = pl.program_id(0), pl.program_id(1)
    entries = listed * block_size
    slot = part * entries + jnp.arange(entries, dtype=jnp.int32)
    place = slot // block_size
    inside = place < count
    # Every entry reads its block's number: the list is small and cached, and repeating it would cost a layout change.
    at = jnp.full(slot.shape, query, jnp.int32), jnp.where(inside, place, 0)
    block = common.load_at(block_ref, at, inside, -1)
    entry = block * block_size + slot % block_size
    seen = (block >= 0) & (entry < visible_ref[query])
    keys = load_keys(arena_ref, table_ref, seq_ref[query], jnp.where(seen, entry, -1), layout, unit, q_ref.dtype)
    scores = score(keys, load_queries(q_ref, query, 1, heads, layout), weight_ref, query, 1, heads)
    value = jnp.where(keys.valid, jnp.sum(scores, axis=1), float("-inf"))
    target = out_ref.at[query, pl.ds(part * entries, entries)]
    if count % listed:
        pltriton.store(target, value, mask=inside)
    else:
        pltriton.store(target, value)
