"""bfloat16 goldens, layer by layer: every sub-layer is fed the recorded input and compared with the recorded output.

End to end a random bfloat16 model is chaotic: one selection that falls the other way changes everything behind it. So
nothing computed here feeds anything but the caches, which thereby hold what the recorded inputs put there. Attention
uses the recorded selection; an index source's own selection is computed beside it from the same caches. A draft block
is corrected by the recorded tokens; the tokens that it would have chosen itself are what is compared.

Of a long prompt the files hold the last rows only: there the decode steps start from the recorded caches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.dspark import (
    DraftOutput,
    draft_attention,
    draft_heads,
    enter_block,
    is_target,
    seed_windows,
    target_hidden,
)
from dsflash_jax.modules.hyper_connections import run_sublayer
from dsflash_jax.modules.layer import StepContext, attention_step
from dsflash_jax.modules.selection import select
from dsflash_jax.modules.transformer import Layer, Transformer, commit_lengths
from dsflash_jax.ops.hyper_connections import collapse
from dsflash_jax.parity.golden import Trace
from dsflash_jax.parity.recorded import MEMORY, recorded_cache, recorded_drafts, recorded_inputs
from dsflash_jax.parity.replay import Rows, batch_step, page_tables, replay_with
from dsflash_jax.roles import LayerRole
from dsflash_jax.sampling import greedy
from dsflash_jax.types import DraftStep, Published, StepInfo


def replay_layers(trace: Trace) -> dict[str, Any]:
    """All arrays of a golden file as each part of this package computes them from its recorded inputs."""

    def run(cache: ModelCache, tokens: np.ndarray, phase: Rows):
        step = batch_step(trace, tokens, phase.start, page_tables(trace))
        given = recorded_inputs(trace, phase, step.num_rows)
        logits, cache, captured = forced_step(trace.params, cache, step, given, trace.cfg)
        captured[-1]["logits_all"] = logits
        return captured, cache

    def draft(cache: ModelCache, step: DraftStep):
        given, tokens = recorded_drafts(trace, int(step.length[0]) - trace.prompt - 1)
        step = dataclasses.replace(step, tokens=tokens[:, 0])
        return forced_draft(trace.params, cache, step, given, tokens[:, 1:], trace.cfg)

    return replay_with(trace, run, draft, recorded_cache(trace) if trace.starts_behind_prompt else None)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache",), compiler_options=steps.EXACT_ROUNDING)
def forced_step(params: steps.Params, cache: ModelCache, step: StepInfo, given: list[dict], cfg: ModelConfig):
    """As `steps.trace_step`, but every part takes the recorded rows `given` of `recorded_inputs` as its input."""
    model = steps.bind(params, cfg)
    context = model.context(step)
    streams, pre = model.embed_step(step)
    published, captures, targets = Published(), [], []
    for layer, inputs in zip(model.layers, given[:-1], strict=True):
        if is_target(cfg, layer.attn.role.layer):
            targets.append(target_hidden(inputs.get(MEMORY, streams)))
        capture, cache, published = _forced_layer(layer, streams, pre, context, cache, published, inputs)
        captures.append(capture)
        streams, pre = inputs["h_out"], inputs["pre_mix_out"]
    final, logits = _forced_head(model, streams, pre, given[-1])
    if targets:
        final["main_hidden"] = jnp.concatenate(targets, axis=-1)
        cache = seed_windows(model.mtp, given[-1]["main_hidden"], context, cache, cfg)
    captures.append(final)
    return logits, commit_lengths(cache, step.slot, step.length), captures


@functools.partial(jax.jit, static_argnames=("cfg",), compiler_options=steps.EXACT_ROUNDING)
def forced_draft(
    params: steps.Params, cache: ModelCache, step: DraftStep, given: list[dict], tokens: jax.Array, cfg: ModelConfig
) -> tuple[DraftOutput, list[dict]]:
    """As `draft_step.trace_draft`, but every part takes its recorded input: `given`, `tokens` of `recorded_drafts`."""
    model = steps.bind(params, cfg)
    streams, pre, context = enter_block(model, step)
    captures, own = [], []
    for layer, inputs in zip(model.mtp, given, strict=True):
        attention = functools.partial(draft_attention, layer.attn, context=context, step=step, cache=cache)
        captures.append(
            {"window_positions": context.window} | _forced_sublayers(layer, streams, pre, inputs, attention)
        )
        streams, pre = inputs["h_out"], inputs["pre_mix_out"]

    def choose(i: int, logits: jax.Array) -> jax.Array:
        own.append(greedy(logits))
        return tokens[:, i]

    drafted = draft_heads(model, collapse(streams, pre), step.tokens, choose)
    return drafted._replace(tokens=jnp.stack(own, axis=1)), captures


def _forced_layer(layer: Layer, streams, pre, context: StepContext, cache: ModelCache, published: Published, given):
    """(captured arrays, cache, what is published next) of one layer between recorded arrays."""
    capture: dict[str, Any] = {}

    def attention(x: jax.Array) -> jax.Array:
        nonlocal cache, published
        out, cache, published = _forced_attention(layer, x, context, cache, published, given, capture)
        return out

    if layer.engram is not None:
        capture[MEMORY] = layer.engram(streams, context.step.ngrams)
        streams = given[MEMORY]
    capture |= _forced_sublayers(layer, streams, pre, given, attention)
    return capture, cache, published


def _forced_sublayers(
    layer: Layer, streams: jax.Array, pre: jax.Array, given: dict, attend: Callable[[jax.Array], jax.Array]
) -> dict[str, Any]:
    """Captured arrays of both sub-layers, each between recorded arrays; attend: attn_in -> attn_out."""
    capture: dict[str, Any] = {}

    def attention(x: jax.Array) -> jax.Array:
        capture["attn_in"] = layer.attn_norm(x)
        capture["attn_out"] = attend(given["attn_in"])
        return given["attn_out"]

    def feed_forward(x: jax.Array) -> jax.Array:
        capture["ffn_in"], rows = layer.ffn_norm(x), given["ffn_in"]
        capture["ffn_out"] = layer.ffn(rows.reshape(-1, rows.shape[-1]), capture).reshape(rows.shape)
        return given["ffn_out"]

    cfg = layer.attn.cfg
    streams, pre = run_sublayer(streams, pre, layer.hc_attn(), attention, cfg, capture, "attn")
    streams, pre = run_sublayer(streams, pre, layer.hc_ffn(), feed_forward, cfg, capture, "ffn")
    return capture | {"h_out": streams, "pre_mix_out": pre}


def _forced_attention(
    layer: Layer, x: jax.Array, context: StepContext, cache: ModelCache, published: Published, given, capture
):
    """(attention output, cache, what is published next), with the recorded selection in every role."""
    attn = layer.attn
    role: LayerRole = attn.role
    pool = published
    if role.indexes:
        published = Published(given["selection"], given.get("blocks", published.candidates_TxC))
    # The real layer in the role of one that reuses a selection; it still owns and writes what it owns.
    reuse = dataclasses.replace(role, indexes=False)
    out, cache, _ = attention_step(attn, x, context, cache, published, capture, reuse)
    if role.ratio:
        capture["attended"] = published.selection_TxK
    if role.indexes:
        rope = context.rope(role.rope, context.step.positions)
        query = attn.indexer.query(x, attn.query(x, rope)[1], rope)
        fresh = select(query, pool, context.step, context.tiles, cache.pages, role, attn.cfg, capture)
        capture |= {"selection": fresh.selection_TxK, "candidates": fresh.candidates_TxC}
    return out, cache, published


def _forced_head(model: Transformer, streams: jax.Array, pre: jax.Array, given: dict) -> tuple[dict, jax.Array]:
    return {"final_normed": model.norm(collapse(streams, pre))}, model.to_vocabulary(given["final_normed"])
