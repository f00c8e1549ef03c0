"""DSpark draft layers: a block of tokens drafted from what the backbone's target layers read (report §2.4.3).

Each draft layer is a window layer (ratio 0, RoPE table "swa") whose window keys do not come from its own stream but
from the backbone's: `seed_windows` writes them for every row that passes the target layers. A draft step embeds the
next token and noise, attends in both directions within the block, and corrects the head's logits token by token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsflash_jax.cache.addressing import paged_rows
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.attention import Attention, Rope
from dsflash_jax.modules.hyper_connections import initial_streams, run_sublayer
from dsflash_jax.modules.layer import StepContext
from dsflash_jax.modules.linear import Linear, RMSNorm
from dsflash_jax.modules.window import ring_insert
from dsflash_jax.numerics.formats import straight_through
from dsflash_jax.ops.hyper_connections import collapse
from dsflash_jax.ops.rope import apply_rope
from dsflash_jax.roles import LayerRole
from dsflash_jax.types import DraftStep
from pallas_kernels.common.formats import PagedRows, RowLayout
from pallas_kernels.kv_insert.api import kv_insert
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.row_set import RowSet

if TYPE_CHECKING:
    from dsflash_jax.modules.transformer import Transformer

# (number in the block, corrected logits [S, V]) -> tokens int32[S] drafted from them.
Choose = Callable[[int, jax.Array], jax.Array]
# (attention of a draft layer, its input [S, block, d]) -> its output [S, block, d].
Attend = Callable[[Attention, jax.Array], jax.Array]


class DraftOutput(NamedTuple):
    """A drafted block per sequence. Row i predicts the token after the block's i-th: row 0 follows the next token."""

    tokens: jax.Array  # int32[S, block]
    logits: jax.Array  # float32[S, block, V], Markov correction included
    confidence: jax.Array  # float32[S, block], before the sigmoid


def draft_roles(cfg: ModelConfig) -> tuple[LayerRole, ...]:
    """Roles of the draft layers, numbered on behind the backbone: window only, whatever the backbone's layers are."""
    first = cfg.num_hidden_layers
    plain = dict.fromkeys(("owns_kv", "indexes", "builds_candidates", "reads_candidates"), False)
    return tuple(
        LayerRole(layer=first + j, ratio=0, **plain, kv_source=None, index_source=None, rope="swa", side="draft")
        for j in range(cfg.num_nextn_predict_layers)
    )


def draft_config(cfg: ModelConfig) -> ModelConfig:
    """`cfg` as a draft layer reads it: its own expert counts. Cache layout and everything else are the backbone's."""
    return cfg.replace(n_routed_experts=cfg.dspark_n_routed_experts, num_experts_per_tok=cfg.dspark_num_experts_per_tok)


class MarkovHead(nnx.Module):
    """Low-rank correction of the logits by the token before."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.embed = Linear(cfg.dspark_markov_rank, cfg.vocab_size, rngs=rngs)  # [V, rank], looked up by row
        self.head = Linear(cfg.dspark_markov_rank, cfg.vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """float32[..., rank] of tokens int32[...]."""
        return self.embed.weight[jnp.maximum(tokens, 0)].astype(jnp.float32)


class ConfidenceHead(nnx.Module):
    """One number per draft from the hidden state before the final norm and the Markov embedding."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.proj = Linear(cfg.hidden_size + cfg.dspark_markov_rank, 1, rngs=rngs)


def add_draft_parts(layer: nnx.Module, cfg: ModelConfig, role: LayerRole, rngs: nnx.Rngs) -> None:
    """Gives the first draft layer its input projection and the last one its heads, under their released names."""
    number = role.layer - cfg.num_hidden_layers
    if number == 0:
        layer.main_proj = Linear(cfg.hidden_size * len(cfg.dspark_target_layer_ids), cfg.hidden_size, rngs=rngs)
        layer.main_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
    if number == cfg.num_nextn_predict_layers - 1:
        layer.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        layer.markov_head = MarkovHead(cfg, rngs)
        layer.confidence_head = ConfidenceHead(cfg, rngs)


def is_target(cfg: ModelConfig, layer: int) -> bool:
    """Whether the draft layers read what enters backbone layer `layer`."""
    return bool(cfg.num_nextn_predict_layers) and layer in cfg.dspark_target_layer_ids


def target_hidden(streams: jax.Array) -> jax.Array:
    """Mean over the residual streams [..., hc, d] entering a target layer: [..., d]."""
    return jnp.mean(streams, axis=-2)


def project_targets(drafts: nnx.List, main_hidden: jax.Array) -> jax.Array:
    """What every draft layer makes its window rows of: main_hidden [..., targets * d] -> [..., d]."""
    return drafts[0].main_norm(drafts[0].main_proj(main_hidden))


def seed_windows(
    drafts: nnx.List, main_hidden: jax.Array, context: StepContext, cache: ModelCache, cfg: ModelConfig
) -> ModelCache:
    """Writes the window rows of every draft layer for the step's rows: main_hidden [T, targets * d], ascending layers.

    Rows of drafts that are rejected later are written too: a draft step reads committed positions only.
    """
    step, layout = context.step, cache_layout(cfg)
    x = project_targets(drafts, main_hidden)
    inserts = []
    for attn in (layer.attn for layer in drafts):
        rope = context.rope(attn.role.rope, step.positions)
        inserts.append(ring_insert(attn.window_latent(x), rope, step, layout.ring[attn.role.layer]))
    (ring,) = kv_insert((cache.ring,), inserts, **cfg.kernels.options)
    return dataclasses.replace(cache, ring=ring)


def window_positions(step: DraftStep, window: int) -> jax.Array:
    """int32[S, window]: the positions whose window rows a draft block sees, ascending; -1 = none.

    The last `window` committed ones, none below the sequence's `floor`: rows that nobody wrote stay unseen.
    """
    position = step.length[:, None] - window + jnp.arange(window)
    seen = (position >= jnp.maximum(step.floor, 0)[:, None]) & (step.slot >= 0)[:, None]
    return jnp.where(seen, position, -1)


class BlockContext(NamedTuple):
    """What all rows of a block and all draft layers share."""

    rope: Rope  # at the block's positions
    window: jax.Array  # int32[S, w] positions whose window rows are seen, -1 = none
    inside: jax.Array  # bool[S, block]: rows beyond the context end are no keys


def enter_block(model: Transformer, step: DraftStep) -> tuple[jax.Array, jax.Array, BlockContext]:
    """(streams [S, block, hc, d], pre [S, block, hc], context) that enter the first draft layer.

    The next token stands at position `length`, the number of committed tokens, and the noise behind it.
    """
    cfg = model.cfg
    noise = jnp.full((step.tokens.shape[0], cfg.dspark_block_size - 1), cfg.dspark_noise_token_id, jnp.int32)
    tokens = jnp.concatenate([step.tokens[:, None], noise], axis=1)
    position = step.length[:, None] + jnp.arange(cfg.dspark_block_size)
    cos, sin = model.freqs.by_name()["swa"]
    at = jnp.minimum(position, cfg.max_position_embeddings - 1)
    inside = position < cfg.max_position_embeddings
    context = BlockContext((cos[at], sin[at]), window_positions(step, cfg.sliding_window), inside)
    return *initial_streams(model.embed_tokens(tokens, jnp.full_like(tokens, -1)), cfg), context


def draft_block(
    model: Transformer, step: DraftStep, cache: ModelCache, choose: Choose, captures: list[dict] | None = None
) -> DraftOutput:
    """Drafts a block behind each sequence's next token; reads the caches and writes nothing.

    `captures`, when given, receives one dict of intermediate arrays per draft layer.
    """
    entered = enter_block(model, step)

    def attend_block(attn: Attention, x: jax.Array) -> jax.Array:
        return draft_attention(attn, x, entered[2], step, cache)

    return draft_heads(model, block_hidden(model, entered, attend_block, captures), step.tokens, choose)


def block_hidden(
    model: Transformer, entered: tuple, attend_block: Attend, captures: list[dict] | None = None, training: bool = False
) -> jax.Array:
    """Hidden states [S, block, d] before the final norm, from what `enter_block` gives.

    attend_block: attention of a draft layer, on whatever holds its window rows. `training` runs every expert, as `MoE`
    does, so that there is a gradient.
    """
    streams, pre, context = entered
    for layer in model.mtp:
        capture = None if captures is None else {"window_positions": context.window}
        streams, pre = _draft_layer(layer, streams, pre, attend_block, capture, training)
        if captures is not None:
            captures.append(capture)
    return collapse(streams, pre)


def _draft_layer(layer, streams, pre, attend_block: Attend, capture: dict | None, training: bool):
    cfg = layer.attn.cfg

    def attention(x: jax.Array) -> jax.Array:
        x = layer.attn_norm(x)
        out = attend_block(layer.attn, x)
        _record(capture, attn_in=x, attn_out=out)
        return out

    def feed_forward(x: jax.Array) -> jax.Array:
        x = layer.ffn_norm(x)
        out = layer.ffn(x.reshape(-1, x.shape[-1]), capture, training).reshape(x.shape)
        _record(capture, ffn_in=x, ffn_out=out)
        return out

    streams, pre = run_sublayer(streams, pre, layer.hc_attn(), attention, cfg, capture, "attn")
    streams, pre = run_sublayer(streams, pre, layer.hc_ffn(), feed_forward, cfg, capture, "ffn")
    _record(capture, h_out=streams, pre_mix_out=pre)
    return streams, pre


def draft_attention(
    attn: Attention, x: jax.Array, context: BlockContext, step: DraftStep, cache: ModelCache
) -> jax.Array:
    """`block_attention` on the window rows that the ring holds."""
    member = cache_layout(attn.cfg).ring[attn.role.layer]
    index = jnp.where(context.window >= 0, member.ring_row(context.window), -1)
    rows = paged_rows(member, cache.ring, step.slot[:, None], jnp.arange(x.shape[0], dtype=jnp.int32))
    return block_attention(attn, x, context, RowSet(rows, index))


def block_attention(attn: Attention, x: jax.Array, context: BlockContext, window: RowSet) -> jax.Array:
    """x [S, block, d]: every row attends to the window and to all rows of its block, whose keys are not stored.

    window: the rows at `context.window`, rounded as stored, as one list for each sequence.
    """
    cfg, (seqs, block, _), rope = attn.cfg, x.shape, context.rope
    q, _ = attn.query(x, rope)
    member = cache_layout(cfg).ring[attn.role.layer]
    fresh = straight_through(member.format, apply_rope(attn.window_latent(x), *rope)).astype(jnp.float32)
    row = jnp.arange(seqs * block, dtype=jnp.int32).reshape(seqs, block)
    seq = row.reshape(-1) // block

    def each(row_set: RowSet) -> RowSet:
        """The sequences' lists, for every row of their blocks."""
        rows = dataclasses.replace(row_set.rows, seq=row_set.rows.seq[seq])
        return dataclasses.replace(row_set, rows=rows, index=row_set.index[seq])

    inside = jnp.where(context.inside, row - row[:, :1], -1)
    sets = [each(window), each(RowSet(float_rows(fresh), inside))]
    out = sparse_mla(
        q.reshape(-1, *q.shape[2:]), sets, attn.attn_sink[...], scale=attn.scale, scratch_bytes=cfg.scratch_bytes,
        **cfg.kernels.options,
    )  # fmt: skip
    return attn.output(out.reshape(q.shape), rope)


def float_rows(rows: jax.Array) -> PagedRows:
    """Rows float32[S, N, D] that no cache holds, one page of N per sequence."""
    seqs, count, width = rows.shape
    number = jnp.arange(seqs, dtype=jnp.int32)
    return PagedRows(rows.reshape(seqs, -1), number[:, None], number, RowLayout("fp32", width, 0, count))


def draft_heads(model: Transformer, hidden: jax.Array, tokens: jax.Array, choose: Choose) -> DraftOutput:
    """Logits of the shared head, corrected and chosen from left to right; hidden [S, block, d] before the norm."""
    last = model.mtp[-1]
    base = model.to_vocabulary(last.norm(hidden))
    drafted, logits, confidence = [], [], []
    for i in range(base.shape[1]):
        markov = last.markov_head(tokens)
        logits.append(base[:, i] + last.markov_head.head.f32(markov))
        read = jnp.concatenate([hidden[:, i].astype(jnp.float32), markov], axis=-1)
        confidence.append(last.confidence_head.proj.f32(read)[:, 0])
        tokens = choose(i, logits[-1]).astype(jnp.int32)
        drafted.append(tokens)
    return DraftOutput(jnp.stack(drafted, 1), jnp.stack(logits, 1), jnp.stack(confidence, 1))


def _record(capture: dict[str, Any] | None, **arrays: jax.Array) -> None:
    if capture is not None:
        capture |= arrays
