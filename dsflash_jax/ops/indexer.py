"""Index scores and the candidate pool (report §2.3.2; contract.md, Attention and selection)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsflash_jax.ops.linear import einsum_f32
from dsflash_jax.ops.topk import canonical, select_topk


def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array, score_dtype: str) -> jax.Array:
    """sum_h weights[h] * relu(q[h] . k) for every key.

    Args:
      q: [B, H, D]. weights: [B, H], signed, already scaled. keys: [E, D] shared, or [B, E, D] per query.
      score_dtype: "float32", or "bfloat16" to round the dot, the product and the head sum as the released code does.

    Returns: float32[B, E].
    """
    batch, heads, width = q.shape
    if batch == 1 and score_dtype == "float32":
        # Decode: one matrix product per factor, entries leading; five times faster on CPU than the general form.
        dots = einsum_f32("ed,hd->eh", keys.reshape(-1, width), q[0])
        return einsum_f32("eh,h->e", jnp.maximum(dots, 0), weights[0])[None]
    if keys.ndim == 2:
        dots = einsum_f32("nd,ed->ne", q.reshape(-1, width), keys).reshape(batch, heads, -1)
    else:
        dots = einsum_f32("bhd,bed->bhe", q, keys)
    # Without the barrier XLA CPU fuses the product into the head sum and loses its fast matrix kernel.
    dots = jax.lax.optimization_barrier(dots)
    if score_dtype == "bfloat16":
        product = jnp.maximum(_round_bf16(dots), 0) * weights[..., None]
        return _round_bf16(jnp.sum(_round_bf16(product), axis=1))
    # Written out over the heads: element-wise code fuses into one pass, a reduction over a middle axis does not.
    return sum(jnp.maximum(dots[:, h], 0) * weights[:, h, None] for h in range(heads))


def _round_bf16(x: jax.Array) -> jax.Array:
    # reduce_precision, not a pair of casts, which XLA may cancel.
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def mask_invisible(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """-inf from entry `visible` [B] on: scores [B, E]."""
    entry = jnp.arange(scores.shape[-1])
    return jnp.where(entry < visible[:, None], scores, -jnp.inf)


def block_ranks(scores: jax.Array, visible: jax.Array, block_size: int) -> jax.Array:
    """What candidate blocks are chosen by: masked scores [B, E] -> float32[B, blocks], the chosen ones the largest.

    A block's rank is its best position, NaN counting as -inf; the block of the newest visible entry is pinned: it ranks
    above all others. Blocks without a visible position rank -inf, so they are never chosen.
    """
    rows, width = scores.shape
    blocks = -(-width // block_size)
    padded = jnp.pad(scores, ((0, 0), (0, blocks * block_size - width)), constant_values=-jnp.inf)
    best = jnp.max(canonical(padded).reshape(rows, blocks, block_size), axis=-1)
    # A legal score of +inf ranks behind the pin, whose block would otherwise lose a tie to lower ones.
    best = jnp.minimum(best, jnp.finfo(best.dtype).max)
    newest = jnp.where(visible > 0, (visible - 1) // block_size, -1)
    return jnp.where(jnp.arange(blocks) == newest[:, None], jnp.inf, best)


def candidate_blocks(scores: jax.Array, visible: jax.Array, block_size: int, topk_blocks: int) -> jax.Array:
    """Best candidate blocks per query: masked scores [B, E] -> block numbers int32[B, topk_blocks], ascending, -1 pad.

    The pinned block counts among the `topk_blocks`; see `block_ranks`.
    """
    return select_topk(block_ranks(scores, visible, block_size), topk_blocks)


def block_mask(blocks: jax.Array, width: int, block_size: int) -> jax.Array:
    """bool[B, width]: whether each entry lies in one of the listed candidate blocks [B, C]."""
    count = -(-width // block_size)
    index = jnp.where(blocks < 0, count, blocks)
    rows = jnp.arange(blocks.shape[0])[:, None]
    hit = jnp.zeros((blocks.shape[0], count + 1), bool).at[rows, index].set(True)[:, :count]
    return jnp.repeat(hit, block_size, axis=1)[:, :width]


def block_entries(blocks: jax.Array, block_size: int) -> jax.Array:
    """Entries of the listed blocks, ascending: [B, C] -> int32[B, C * block_size], -1 for absent blocks."""
    entries = blocks[..., None] * block_size + jnp.arange(block_size)
    return jnp.where(blocks[..., None] < 0, -1, entries).reshape(blocks.shape[0], -1)
