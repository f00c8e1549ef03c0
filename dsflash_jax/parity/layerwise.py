"""bfloat16 goldens, layer by layer: every sub-layer is fed the recorded input and compared with the recorded output.

End to end a random bfloat16 model is chaotic: one selection that falls the other way changes everything behind it. So
nothing computed here feeds anything but the caches, which thereby hold what the recorded inputs put there. Attention
uses the recorded selection; an index source's own selection is computed beside it from the same caches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.hyper_connections import initial_streams, run_sublayer
from dsflash_jax.modules.layer import StepContext, attention_step
from dsflash_jax.modules.selection import select, tile_rows
from dsflash_jax.modules.step_index import make_tiles
from dsflash_jax.modules.transformer import Layer, Transformer, commit_lengths
from dsflash_jax.ops.hyper_connections import collapse
from dsflash_jax.parity.golden import Trace
from dsflash_jax.parity.replay import Rows, batch_step, page_tables, replay_with
from dsflash_jax.roles import LayerRole, layer_roles
from dsflash_jax.types import Published, StepInfo

STREAMS = ("attn_in", "attn_out", "ffn_in", "ffn_out", "h_out")
MEMORY = "engram_out"  # recorded in Engram layers only


def replay_layers(trace: Trace) -> dict[str, Any]:
    """All arrays of a golden file as each part of this package computes them from its recorded inputs."""

    def run(cache: ModelCache, tokens: np.ndarray, phase: Rows):
        step = batch_step(trace, tokens, phase.start, page_tables(trace))
        given = recorded_inputs(trace, phase, step.num_rows)
        logits, cache, captured = forced_step(trace.params, cache, step, given, trace.cfg)
        captured[-1]["logits_all"] = logits
        return captured, cache

    return replay_with(trace, run)


def recorded_inputs(trace: Trace, phase: Rows, num_rows: int) -> list[dict[str, np.ndarray]]:
    """Per layer, and finally for the head, the recorded arrays of one phase as rows [num_rows, ...], zero padded."""
    cfg, given = trace.cfg, []
    prefix, step = ("prefill", None) if phase.start == 0 else ("decode", phase.start - trace.prompt)

    def rows(key: str) -> np.ndarray:
        array = trace.arrays[key] if step is None else trace.arrays[key][step]
        flat = array.reshape(phase.batch * phase.count, *array.shape[2:])
        return np.pad(flat, [(0, num_rows - len(flat))] + [(0, 0)] * (flat.ndim - 1))

    for role in layer_roles(cfg):
        at = f"L{role.layer}/{prefix}/"
        names = STREAMS + ((MEMORY,) if role.layer in cfg.engram_layer_ids else ())
        layer = {name: jnp.asarray(rows(at + name), cfg.dtype) for name in names}
        layer["pre_mix_out"] = rows(at + "pre_mix_out")
        if role.indexes:
            layer["selection"] = np.full((num_rows, cfg.index_topk), -1, np.int32)
            if _recorded(trace, at + "compress_idxs", step):
                picked = _at_step(trace, at + "compress_idxs", step).reshape(phase.batch * phase.count, -1)
                layer["selection"][: len(picked), : picked.shape[1]] = np.maximum(picked, -1)
        if role.builds_candidates:
            layer["blocks"] = np.full((num_rows, cfg.candidate_topk_blocks), -1, np.int32)
            if _recorded(trace, at + "candidates", step):
                masks = _at_step(trace, at + "candidates", step).reshape(phase.batch * phase.count, -1)
                for row, mask in enumerate(masks):
                    blocks = np.flatnonzero(mask[:: cfg.candidate_block_size])
                    layer["blocks"][row, : len(blocks)] = blocks
        given.append(layer)
    given.append({"final_normed": jnp.asarray(rows(f"{prefix}/final_normed"), cfg.dtype)})
    return given


def _recorded(trace: Trace, key: str, step: int | None) -> bool:
    if key not in trace.arrays:
        return False
    return step is None or f"{key}@steps" not in trace.arrays or step in trace.arrays[f"{key}@steps"]


def _at_step(trace: Trace, key: str, step: int | None) -> np.ndarray:
    array = trace.arrays[key]
    if step is None:
        return array
    steps_of = trace.arrays.get(f"{key}@steps", np.arange(len(array)))
    return array[int(np.flatnonzero(steps_of == step)[0])]


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache",), compiler_options=steps.EXACT_ROUNDING)
def forced_step(params: steps.Params, cache: ModelCache, step: StepInfo, given: list[dict], cfg: ModelConfig):
    """As `steps.trace_step`, but every part takes the recorded rows `given` of `recorded_inputs` as its input."""
    model = steps.bind(params, cfg)
    context = StepContext(step, make_tiles(step, tile_rows(step, cfg)), model.freqs.by_name())
    before = jnp.full_like(step.tokens, -1)
    streams, pre = initial_streams(model.embed_tokens(step.tokens, before), cfg)
    published, captures = Published(None, None), []
    for layer, inputs in zip(model.layers, given[:-1], strict=True):
        capture, cache, published = _forced_layer(layer, streams, pre, context, cache, published, inputs)
        captures.append(capture)
        streams, pre = inputs["h_out"], inputs["pre_mix_out"]
    final, logits = _forced_head(model, streams, pre, given[-1])
    captures.append(final)
    return logits, commit_lengths(cache, step.slot, step.length), captures


def _forced_layer(layer: Layer, streams, pre, context: StepContext, cache: ModelCache, published: Published, given):
    """(captured arrays, cache, what is published next) of one layer between recorded arrays."""
    capture: dict[str, Any] = {}

    def attention(x: jax.Array) -> jax.Array:
        nonlocal cache, published
        capture["attn_in"] = layer.attn_norm(x)
        capture["attn_out"], cache, published = _forced_attention(layer, context, cache, published, given, capture)
        return given["attn_out"]

    def feed_forward(x: jax.Array) -> jax.Array:
        capture["ffn_in"] = layer.ffn_norm(x)
        capture["ffn_out"] = layer.ffn(given["ffn_in"], capture)
        return given["ffn_out"]

    cfg = layer.attn.cfg
    if layer.engram is not None:
        capture[MEMORY] = layer.engram(streams, context.step.ngrams)
        streams = given[MEMORY]
    streams, pre = run_sublayer(streams, pre, layer.hc_attn(), attention, cfg, capture, "attn")
    streams, pre = run_sublayer(streams, pre, layer.hc_ffn(), feed_forward, cfg, capture, "ffn")
    capture |= {"h_out": streams, "pre_mix_out": pre}
    return capture, cache, published


def _forced_attention(layer: Layer, context: StepContext, cache: ModelCache, published: Published, given, capture):
    """(attention output, cache, what is published next), with the recorded selection in every role."""
    attn, x = layer.attn, given["attn_in"]
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
