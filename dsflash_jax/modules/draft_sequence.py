"""The draft layers on whole sequences for training: many blocks per row at once, without caches, differentiable.

The window rows are those that a draft step would find in the ring: made of the same target states and rounded to the
ring's format, with a straight-through gradient. The tokens of a block are given, so its Markov corrections are those
of a draft that has been right so far.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.modules.attention import Attention
from dsflash_jax.modules.dspark import (
    DraftOutput,
    block_attention,
    block_hidden,
    draft_heads,
    enter_block,
    float_rows,
    project_targets,
)
from dsflash_jax.modules.transformer import Transformer
from dsflash_jax.numerics.formats import straight_through
from dsflash_jax.ops.rope import apply_rope
from dsflash_jax.types import DraftStep
from pallas_kernels.sparse_mla.row_set import RowSet


class DraftForward(NamedTuple):
    """Drafted blocks and what they should have been: row i of the block at anchor a is about the token at a + 1 + i."""

    drafted: DraftOutput  # leaves [B, A, block, ...]; its tokens are the given ones
    target_logits: jax.Array  # float32[B, A, block, V], the backbone's


def forward_with_drafts(
    model: Transformer, tokens: jax.Array, anchors: jax.Array, main_hidden: jax.Array, logits: jax.Array
) -> DraftForward:
    """`draft_sequence` beside the backbone's logits [B, T, V] of the same tokens."""
    place = anchors[..., None] + jnp.arange(model.cfg.dspark_block_size)
    target = jax.vmap(lambda row, at: row[at])(logits, place)
    return DraftForward(draft_sequence(model, tokens, main_hidden, anchors), target)


def draft_sequence(model: Transformer, tokens: jax.Array, main_hidden: jax.Array, anchors: jax.Array) -> DraftOutput:
    """Blocks behind the tokens at positions `anchors` int32[B, A] of rows int32[B, T]: leaves [B, A, block, ...].

    main_hidden: [B, T, targets * d], what entered the target layers. Anchors lie in 1..T - block: row i of a block has
    the token at anchor + i as its previous one, and predicts the one behind it.
    """
    length = anchors.reshape(-1)
    row = jnp.repeat(jnp.arange(anchors.shape[0]), anchors.shape[1])
    given = tokens[row[:, None], length[:, None] + jnp.arange(model.cfg.dspark_block_size)]
    step = DraftStep(given[:, 0], length, slot=row, floor=jnp.zeros_like(row))
    entered = enter_block(model, step)
    keys = _window_keys(model, main_hidden)

    def attend_block(attn: Attention, x: jax.Array) -> jax.Array:
        rows = dataclasses.replace(float_rows(keys[attn.role.layer]), seq=row)
        return block_attention(attn, x, entered[2], RowSet(rows, entered[2].window))

    hidden = block_hidden(model, entered, attend_block, training=True)
    following = jnp.roll(given, -1, axis=1)  # its last column is chosen, but nothing follows from it
    out = draft_heads(model, hidden, given[:, 0], lambda i, _: following[:, i])
    return jax.tree.map(lambda leaf: leaf.reshape(*anchors.shape, *leaf.shape[1:]), out)


def _window_keys(model: Transformer, main_hidden: jax.Array) -> dict[int, jax.Array]:
    """Window rows of every position by layer number, float32[B, T, D]."""
    x = project_targets(model.mtp, main_hidden)
    cos, sin = model.freqs.by_name()["swa"]
    rope = (cos[: x.shape[1]], sin[: x.shape[1]])
    ring, found = cache_layout(model.cfg).ring, {}
    for layer in model.mtp:
        number = layer.attn.role.layer
        rounded = straight_through(ring[number].format, apply_rope(layer.attn.window_latent(x), *rope))
        found[number] = rounded.astype(jnp.float32)
    return found
