"""Candidate blocks and the entries in them (report §2.3.2; contract.md, Attention and selection)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mask_invisible(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """-inf from entry `visible` [B] on: scores [B, E]."""
    entry = jnp.arange(scores.shape[-1])
    return jnp.where(entry < visible[:, None], scores, -jnp.inf)


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


def pool_entries(picked: jax.Array, blocks: jax.Array, block_size: int) -> jax.Array:
    """Entries that the positions `picked` [T, K] (-1 = none) among the entries of the blocks [T, C] stand for."""
    block = jnp.take_along_axis(blocks, jnp.maximum(picked, 0) // block_size, axis=-1)
    return jnp.where(picked >= 0, block * block_size + picked % block_size, -1)
