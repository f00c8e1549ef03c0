"""The text backbone: embedding, layers on residual streams, final norm and head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsflash_jax.cache.layout import spare_rows
from dsflash_jax.cache.model_cache import ModelCache, Tail
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.attention import Attention
from dsflash_jax.modules.dspark import (
    add_draft_parts,
    draft_config,
    draft_roles,
    is_target,
    seed_windows,
    target_hidden,
)
from dsflash_jax.modules.engram import Engram
from dsflash_jax.modules.hyper_connections import init_hyper_connection, initial_streams, run_sublayer
from dsflash_jax.modules.layer import StepContext, attention_step
from dsflash_jax.modules.linear import Buffer, Linear, RMSNorm
from dsflash_jax.modules.moe import MoE
from dsflash_jax.modules.select_forms import tile_rows
from dsflash_jax.modules.step_index import make_tiles
from dsflash_jax.ops.hyper_connections import collapse
from dsflash_jax.ops.linear import linear_f32
from dsflash_jax.ops.rope import table_buffers
from dsflash_jax.roles import LayerRole, decoder_start, layer_roles
from dsflash_jax.types import Published, StepInfo

State = tuple[jax.Array, jax.Array, ModelCache, Published]  # streams [T, hc, d], pre [T, hc], cache, published


class Table(nnx.Module):
    """A weight matrix looked up by row."""

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (rows, width)))


class RopeTable(nnx.Module):
    """cos and sin of one RoPE policy, float32[max positions, width / 2]."""

    def __init__(self, cos: jax.Array, sin: jax.Array):
        self.cos, self.sin = Buffer(cos), Buffer(sin)


class Freqs(nnx.Module):
    """The two RoPE tables of a model."""

    def __init__(self, cfg: ModelConfig):
        tables = table_buffers(cfg)
        self.swa = RopeTable(**tables["swa"])
        self.compressed = RopeTable(**tables["compressed"])

    def by_name(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Table name -> (cos, sin)."""
        return {name: (t.cos[...], t.sin[...]) for name, t in (("swa", self.swa), ("compressed", self.compressed))}


class Layer(nnx.Module):
    """Attention and feed-forward around the residual streams. Names are the released tensor names."""

    def __init__(self, cfg: ModelConfig, role: LayerRole, rngs: nnx.Rngs):
        self.engram = Engram(cfg, role.layer, rngs) if role.layer in cfg.engram_layer_ids else None
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = Attention(cfg, role, rngs)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.ffn = MoE(cfg, rngs)
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = init_hyper_connection(cfg, rngs)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = init_hyper_connection(cfg, rngs)

    def hc_attn(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(fn, base, scale) of the attention sub-layer."""
        return self.hc_attn_fn[...], self.hc_attn_base[...], self.hc_attn_scale[...]

    def hc_ffn(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(fn, base, scale) of the feed-forward sub-layer."""
        return self.hc_ffn_fn[...], self.hc_ffn_base[...], self.hc_ffn_scale[...]


class DraftLayer(Layer):
    """A draft layer: its own expert counts, plus the parts that only the first or the last one has."""

    def __init__(self, cfg: ModelConfig, role: LayerRole, rngs: nnx.Rngs):
        super().__init__(draft_config(cfg), role, rngs)
        add_draft_parts(self, cfg, role, rngs)


class Transformer(nnx.Module):
    """All parameters of the backbone and of its draft layers, if any.

    `__call__` is the ragged step; training uses `whole_sequence.py`.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = Table(cfg.vocab_size, cfg.hidden_size, rngs)
        self.layers = nnx.List([Layer(cfg, role, rngs) for role in layer_roles(cfg)])
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.head = Linear(cfg.hidden_size, cfg.vocab_size, rngs=rngs)
        self.freqs = Freqs(cfg)
        if cfg.token_shift:
            # Every other channel also carries the previous token: the channels that do not tell the two apart. From
            # zero, or from one share everywhere, recall appears after more than twice as many steps.
            self.token_shift = nnx.Param((jnp.arange(cfg.hidden_size) % 2).astype(jnp.float32))
        if cfg.num_nextn_predict_layers:  # last, so that the backbone's draws are those of a model without drafts
            self.mtp = nnx.List([DraftLayer(cfg, role, rngs) for role in draft_roles(cfg)])

    def embed_tokens(self, tokens: jax.Array, previous: jax.Array) -> jax.Array:
        """Embeddings [..., d] in the compute dtype; `previous` [...] (-1 = none) is used by the token shift only."""
        x = self.embed.weight[jnp.maximum(tokens, 0)]
        if self.cfg.token_shift:
            shifted = jnp.where((previous >= 0)[..., None], self.embed.weight[jnp.maximum(previous, 0)], 0.0)
            x = x + self.token_shift[...] * shifted
        return x.astype(self.cfg.dtype)

    def logits(self, streams: jax.Array, pre: jax.Array, capture: dict | None = None) -> jax.Array:
        """Float32 logits [..., V]: the streams are collapsed with the last sub-layer's `pre`."""
        hidden = self.norm(collapse(streams, pre))
        if capture is not None:
            capture["final_normed"] = hidden
        return self.to_vocabulary(hidden)

    def to_vocabulary(self, hidden: jax.Array) -> jax.Array:
        """Normed hidden rows [..., d] -> float32 logits [..., V], by the head or by the embedding tied to it."""
        if not self.cfg.tie_word_embeddings:
            return self.head.f32(hidden)
        return linear_f32(hidden.astype(jnp.float32), self.embed.weight[...].astype(jnp.float32))

    def context(self, step: StepInfo, in_ring: bool = False) -> StepContext:
        """What all layers of a step share. in_ring: a promise about its rows, see `window_rows`; few rows keep it."""
        in_ring = in_ring or step.num_rows <= spare_rows(self.cfg)
        return StepContext(step, make_tiles(step, tile_rows(step, self.cfg)), self.freqs.by_name(), in_ring)

    def embed_step(self, step: StepInfo) -> tuple[jax.Array, jax.Array]:
        """(streams [T, hc, d], pre [T, hc]) that enter the first layer."""
        before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), step.tokens[:-1]])
        at_start = step.positions == step.start[step.row_to_seq]
        previous = jnp.where(at_start, step.previous_token[step.row_to_seq], before)
        return initial_streams(self.embed_tokens(step.tokens, previous), self.cfg)

    def run_layers(
        self,
        layers: slice,
        context: StepContext,
        state: State,
        captures: list[dict] | None,
        targets: list[jax.Array],
        entries: bool = True,
    ) -> State:
        """Some layers in turn; what enters target layers, [T, d], is added to `targets`. entries: `attention_step`."""
        for layer in list(self.layers)[layers]:
            capture = None if captures is None else {}
            # Compiled programs and profiles then say which layer a kernel belongs to.
            with jax.named_scope(f"layers.{layer.attn.role.layer}"):
                state = _run_layer(layer, context, state, capture, targets, entries)
            if captures is not None:
                captures.append(capture)
        return state

    def seed_drafts(
        self,
        targets: list[jax.Array],
        streams: jax.Array,
        context: StepContext,
        cache: ModelCache,
        capture: dict | None,
    ) -> ModelCache:
        """Writes the draft layers' window rows from what entered the target layers; nothing without draft layers.

        streams: what the last layer gave.
        """
        if not targets:
            return cache
        # The last layer reads the ring: a write that does not wait for it may be put first, on a copy of the ring.
        main_hidden, _ = lax.optimization_barrier((jnp.concatenate(targets, axis=-1), streams))
        _record(capture, main_hidden=main_hidden)
        return seed_windows(self.mtp, main_hidden, context, cache, self.cfg)

    def __call__(
        self, step: StepInfo, cache: ModelCache, logits: str, in_ring: bool = False, captures: list[dict] | None = None
    ):
        """Runs the step: (float32 logits, cache).

        `logits`: "last" -> [S, V] of each sequence's last row, "all" -> [T, V]; ValueError for anything else.
        `in_ring`: as of `context`.
        `captures`, when given, receives one dict of intermediate arrays per layer and a final one.
        """
        if logits not in ("last", "all"):
            raise ValueError(f'logits={logits!r} must be "last" or "all".')
        context, start = self.context(step, in_ring), decoder_start(self.cfg)
        streams, pre = self.embed_step(step)
        state, targets = (streams, pre, cache, Published()), []
        streams, pre, cache, published = self.run_layers(slice(0, start), context, state, captures, targets)
        cache = keep_tail(cache, step, streams, pre)
        state = streams, pre, cache, published
        streams, pre, cache, _ = self.run_layers(slice(start, None), context, state, captures, targets)
        final = None if captures is None else {}
        cache = self.seed_drafts(targets, streams, context, cache, final)
        if logits == "last":
            row = jnp.maximum(step.last_row, 0)
            streams, pre = streams[row], pre[row]
        out = self.logits(streams, pre, final)
        if captures is not None:
            captures.append(final)
        return out, cache


def _run_layer(
    layer: Layer, context: StepContext, state: State, capture: dict | None, targets: list[jax.Array], entries: bool
) -> State:
    cfg = layer.attn.cfg
    streams, pre, cache, published = state

    @jax.named_scope("attn")
    def attention(x: jax.Array) -> jax.Array:
        nonlocal cache, published
        x = layer.attn_norm(x)
        out, cache, published = attention_step(layer.attn, x, context, cache, published, capture, entries=entries)
        _record(capture, attn_in=x, attn_out=out)
        return out

    @jax.named_scope("ffn")
    def feed_forward(x: jax.Array) -> jax.Array:
        x = layer.ffn_norm(x)
        out = layer.ffn(x, capture)
        _record(capture, ffn_in=x, ffn_out=out)
        return out

    if layer.engram is not None:
        streams = layer.engram(streams, context.step.ngrams)
        _record(capture, engram_out=streams)
    if is_target(cfg, layer.attn.role.layer):
        targets.append(target_hidden(streams))
    streams, pre = run_sublayer(streams, pre, layer.hc_attn(), attention, cfg, capture, "attn")
    streams, pre = run_sublayer(streams, pre, layer.hc_ffn(), feed_forward, cfg, capture, "ffn")
    _record(capture, h_out=streams, pre_mix_out=pre)
    return streams, pre, cache, published


def _record(capture: dict | None, **arrays: jax.Array) -> None:
    if capture is not None:
        capture |= arrays


def keep_tail(cache: ModelCache, step: StepInfo, streams: jax.Array, pre: jax.Array) -> ModelCache:
    """Stores the encoder states of the step's rows where the cache has a tail; the last rows of a slot win."""
    tail = cache.tail
    if tail is None:
        return cache
    slots, rows = tail.pre.shape[:2]
    keep = (step.positions >= 0) & (step.positions >= step.length[step.row_to_seq] - rows)
    slot = step.slot[step.row_to_seq]
    index = jnp.where(keep & (slot >= 0), slot, slots)
    place = jnp.maximum(step.positions, 0) % rows
    stored = [old.at[index, place].set(new, mode="drop") for old, new in ((tail.streams, streams), (tail.pre, pre))]
    return dataclasses.replace(cache, tail=Tail(*stored))


def commit_lengths(cache: ModelCache, slot: jax.Array, length: jax.Array) -> ModelCache:
    """Sets committed lengths [S] of slots [S]; slot -1 writes nothing."""
    index = jnp.where(slot < 0, cache.length.shape[0], slot)
    return dataclasses.replace(cache, length=cache.length.at[index].set(length, mode="drop"))
