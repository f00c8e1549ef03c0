"""The whole-sequence form for training: the same modules on [B, T] tokens, without caches, differentiable.

Selection is a mask over all entries instead of a gather, so everything is dense; memory grows with T * (T + T / m).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.attention import Attention, Rope
from dsflash_jax.modules.dspark import is_target, target_hidden
from dsflash_jax.modules.hyper_connections import initial_streams, run_sublayer
from dsflash_jax.modules.transformer import Layer, Transformer
from dsflash_jax.numerics.formats import get_format, straight_through
from dsflash_jax.ops.compressor import visible_entries
from dsflash_jax.ops.indexer import block_mask, mask_invisible
from dsflash_jax.ops.linear import einsum_f32
from dsflash_jax.ops.rope import apply_rope
from dsflash_jax.ops.topk import topk_mask
from dsflash_jax.types import NgramRows
from pallas_kernels.candidate_select.api import candidate_select
from pallas_kernels.compress_pool.xla import pool
from pallas_kernels.indexer_scores.xla import block_maxima
from pallas_kernels.sparse_mla.attention import sink_softmax


class ForwardOutput(NamedTuple):
    """Result of the whole-sequence form."""

    logits: jax.Array  # float32[B, T, V]
    indexer_kl: jax.Array  # float32[], mean over index sources and queries that see an entry
    coverage: jax.Array  # float32[global layers], share of the layer's global attention that its selection holds
    main_hidden: jax.Array | None  # [B, T, targets * d] for the draft layers, None in a model without


class Flags(NamedTuple):
    """Traced switches: one compiled function serves warm-up, sparse training and the control without entries."""

    dense: jax.Array  # bool[]: attend to every visible entry, not only the selected
    use_global: jax.Array  # bool[]: False switches the global branch off


class _Carried(NamedTuple):
    """Handed from layer to layer: what the latest KV owner and the latest index source left, and coverage so far."""

    entries: jax.Array | None = None  # [B, E, D]
    keys: jax.Array | None = None  # [B, E, Di]
    scores: jax.Array | None = None  # [B, T, E], differentiable in the indexer only
    visible: jax.Array | None = None  # bool[B, T, E]
    selected: jax.Array | None = None  # bool[B, T, E]
    pool: jax.Array | None = None  # bool[B, T, E], the candidate pool
    targets: tuple[jax.Array, ...] = ()  # attention [B, T, E] of each layer that the selection served so far
    coverage: tuple[jax.Array, ...] = ()  # of every layer with a global branch so far


def whole_sequence(
    model: Transformer,
    tokens: jax.Array,
    flags: Flags,
    indexer_target: str,
    ngram_rows: jax.Array | None = None,
) -> ForwardOutput:
    """Runs tokens int32[B, T] from position 0.

    `indexer_target`: "served" trains each index source on the mean attention of the layers that use its selection,
    "own" on its own layer's. KV is rounded as in the caches only if the config's `qat` is set.
    """
    cfg = model.cfg
    previous = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    streams, pre = initial_streams(model.embed_tokens(tokens, previous), cfg)
    length = tokens.shape[1]
    ropes = {name: (cos[:length], sin[:length]) for name, (cos, sin) in model.freqs.by_name().items()}
    carried, losses, targets = _Carried(), [], []
    for layer in model.layers:
        if layer.attn.role.indexes:
            losses += _indexer_losses(carried, flags, indexer_target)
        if layer.engram is not None:
            streams = layer.engram(streams, NgramRows(ngram_rows))
        if is_target(cfg, layer.attn.role.layer):
            targets.append(target_hidden(streams))
        streams, pre, carried = _layer(layer, streams, pre, ropes, carried, flags)
    losses += _indexer_losses(carried, flags, indexer_target)
    zero = jnp.zeros((), jnp.float32)
    return ForwardOutput(
        model.logits(streams, pre),
        sum(losses, zero) / max(len(losses), 1),
        jnp.stack(carried.coverage) if carried.coverage else jnp.zeros((0,), jnp.float32),
        jnp.concatenate(targets, axis=-1) if targets else None,
    )


def _layer(layer: Layer, streams, pre, ropes: dict[str, Rope], carried: _Carried, flags: Flags):
    cfg = layer.attn.cfg

    def attention(x: jax.Array) -> jax.Array:
        nonlocal carried
        out, carried = _attention(layer.attn, layer.attn_norm(x), ropes[layer.attn.role.rope], carried, flags)
        return out

    def feed_forward(x: jax.Array) -> jax.Array:
        flat = layer.ffn_norm(x).reshape(-1, x.shape[-1])
        return layer.ffn(flat, training=True).reshape(x.shape)

    streams, pre = run_sublayer(streams, pre, layer.hc_attn(), attention, cfg)
    streams, pre = run_sublayer(streams, pre, layer.hc_ffn(), feed_forward, cfg)
    return streams, pre, carried


def _rounded(values: jax.Array, format_name: str, cfg: ModelConfig) -> jax.Array:
    return straight_through(get_format(format_name), values) if cfg.qat else values


def _attention(
    attn: Attention, x: jax.Array, rope: Rope, carried: _Carried, flags: Flags
) -> tuple[jax.Array, _Carried]:
    role, cfg = attn.role, attn.cfg
    q, qr = attn.query(x, rope)
    keys = _rounded(apply_rope(attn.window_latent(x), *rope), cfg.window_format, cfg)
    position = jnp.arange(x.shape[1])
    age = position[:, None] - position[None, :]
    window = jnp.broadcast_to((age >= 0) & (age < cfg.sliding_window), (x.shape[0], *age.shape))
    if role.owns_kv:
        carried = _publish_entries(attn, x, rope, carried)
    if role.indexes:
        carried = _publish_selection(attn, x, qr, rope, carried)
    if not role.ratio:
        return attn.output(_dense(attn, q, keys, window)[0], rope), carried
    entries = (carried.visible & (carried.selected | flags.dense)) & flags.use_global
    both = jnp.concatenate([keys, carried.entries.astype(keys.dtype)], axis=1)
    out, weights = _dense(attn, q, both, jnp.concatenate([window, entries], axis=-1))
    mass = jax.lax.stop_gradient(jnp.sum(weights[..., x.shape[1] :], axis=2))  # [B, T, E], summed over heads
    held, total = jnp.sum(jnp.where(carried.selected, mass, 0.0)), jnp.sum(mass)
    share = jnp.where(total > 0, held / jnp.maximum(total, 1e-20), 1.0)
    carried = carried._replace(targets=(*carried.targets, mass), coverage=(*carried.coverage, share))
    return attn.output(out, rope), carried


def _dense(attn: Attention, q: jax.Array, keys: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(output [B, T, H, D], probabilities [B, T, H, K]) over keys [B, K, D] where valid [B, T, K]."""
    logits = einsum_f32("bthd,bkd->bthk", q, keys) * attn.scale
    weights, denominator = sink_softmax(logits, valid[:, :, None, :], attn.attn_sink[...][:, None])
    out = einsum_f32("bthk,bkd->bthd", weights.astype(q.dtype), keys)
    return (out / denominator).astype(q.dtype), weights / denominator


def _publish_entries(attn: Attention, x: jax.Array, rope: Rope, carried: _Carried) -> _Carried:
    """Entries and index keys of every complete group. The indexer sees a detached latent.

    Rows shorter than a group are padded to one entry, which no query sees: an axis of length 0 has no maximum.
    """
    role, cfg = attn.role, attn.cfg
    groups = max(1, x.shape[1] // role.ratio)
    if x.shape[1] < role.ratio:
        x = jnp.pad(x, ((0, 0), (0, role.ratio - x.shape[1]), (0, 0)))
    if role.ratio == 1:
        latent = attn.compressor.wkv(x)
    else:
        rows = attn.compressor.rows(x[:, : groups * role.ratio])
        values, gate = jnp.split(rows.reshape(x.shape[0], groups, role.ratio, -1), 2, axis=-1)
        latent = pool(values, gate).astype(x.dtype)
    latent = attn.compressor.norm(latent)
    first = tuple(table[: groups * role.ratio : role.ratio] for table in rope)
    entries = _rounded(apply_rope(latent, *first), cfg.main_format, cfg)
    keys = _rounded(apply_rope(attn.indexer.key(jax.lax.stop_gradient(latent)), *first), cfg.index_format, cfg)
    return carried._replace(entries=entries, keys=keys)


def _publish_selection(attn: Attention, x: jax.Array, qr: jax.Array, rope: Rope, carried: _Carried) -> _Carried:
    """Scores and the selected set. Hidden state and query latent are detached: only the KL trains the indexer."""
    role, cfg = attn.role, attn.cfg
    query = attn.indexer.query(jax.lax.stop_gradient(x), jax.lax.stop_gradient(qr), rope, rounded=cfg.qat)
    dots = einsum_f32("bthd,bed->bthe", query.q, carried.keys.astype(query.q.dtype))
    scores = jnp.sum(jnp.maximum(dots, 0) * query.weights[..., None], axis=2)
    batch, length, width = scores.shape
    visible = jnp.tile(visible_entries(jnp.arange(length), role.ratio), batch)
    flat = mask_invisible(jax.lax.stop_gradient(scores).reshape(-1, width), visible)
    pool_BxTxE = carried.pool
    if role.reads_candidates:
        flat = jnp.where(pool_BxTxE.reshape(flat.shape), flat, -jnp.inf)
    if role.builds_candidates:
        size = cfg.candidate_block_size
        blocks = candidate_select(
            block_maxima(flat, size), visible, block_size=size, topk_blocks=cfg.candidate_topk_blocks,
            implementation="xla",
        )  # fmt: skip
        pool_BxTxE = block_mask(blocks, width, size).reshape(scores.shape)
    return carried._replace(
        scores=scores,
        visible=(jnp.arange(width) < visible[:, None]).reshape(scores.shape),
        selected=topk_mask(flat, cfg.index_topk).reshape(scores.shape),
        pool=pool_BxTxE,
        targets=(),
    )


def _indexer_losses(carried: _Carried, flags: Flags, indexer_target: str) -> list[jax.Array]:
    """KL(attention of the served layers || softmax of the index scores) of the latest index source, if there is one.

    Over all visible entries while dense, else over the selected ones (report §2.3.1); window keys take no part.
    """
    if carried.scores is None or not carried.targets:
        return []
    targets = carried.targets if indexer_target == "served" else carried.targets[:1]
    within = carried.visible & (carried.selected | flags.dense)
    target = jnp.where(within, sum(t / jnp.maximum(jnp.sum(t, -1, keepdims=True), 1e-20) for t in targets), 0.0)
    target = target / jnp.maximum(jnp.sum(target, axis=-1, keepdims=True), 1e-20)
    any_entry = jnp.any(within, axis=-1)
    scores = jnp.where(within, carried.scores, -jnp.inf)
    scores = jnp.where(any_entry[..., None], scores, 0.0)
    log_q = jnp.where(within, jax.nn.log_softmax(scores, axis=-1), 0.0)
    log_p = jnp.log(jnp.maximum(target, 1e-20))
    kl = jnp.sum(jnp.where(within, target * (log_p - log_q), 0.0), axis=-1)
    return [jnp.sum(kl * any_entry) / jnp.maximum(jnp.sum(any_entry), 1)]
