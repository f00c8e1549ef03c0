"""Runs a recorded trace through the real step functions and names the results as the golden file does.

Twice: `replay` through the traced step, which yields every intermediate array, and `replay_served` through `prefill`
and `decode` as callers use them, which yields logits and caches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, bucket, make_step
from dsflash_jax.cache.layout import cache_layout, pages_for
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.draft_step import Anchor, make_draft_step, trace_draft
from dsflash_jax.modules.dspark import DraftOutput, draft_roles
from dsflash_jax.ops.ngram_hash import EXCLUDED
from dsflash_jax.parity.golden import Trace
from dsflash_jax.parity.verdicts import CachedRows
from dsflash_jax.roles import layer_roles
from dsflash_jax.types import DraftStep

# Prompts are padded to at least this many rows, so that cases of one model share a compiled prefill.
PREFILL_ROWS = 64
# Tokens per page of the replay whose sequences cross page borders: the recorded ones fit one page of the default size.
SMALL_PAGE = 8


@dataclasses.dataclass(frozen=True)
class Rows:
    """Shape facts of one phase: B sequences of n rows from position `start`."""

    batch: int
    count: int
    start: int

    @property
    def positions(self) -> np.ndarray:
        """int[n] positions of the rows."""
        return np.arange(self.start, self.start + self.count)


# (cache, tokens [B, n], phase) -> (one dict of arrays per layer and a final one, cache).
RunPhase = Callable[[ModelCache, np.ndarray, Rows], tuple[list[dict[str, Any]], ModelCache]]
# (cache, anchors) -> (drafted blocks, one dict of arrays per draft layer).
RunDraft = Callable[[ModelCache, DraftStep], tuple[DraftOutput, list[dict[str, Any]]]]


def replay(trace: Trace) -> dict[str, Any]:
    """All arrays of a golden file as this package computes them: one prefill of T tokens, then N decode steps."""

    def run(cache: ModelCache, tokens: np.ndarray, phase: Rows):
        step = batch_step(trace, tokens, phase.start, page_tables(trace))
        logits, cache, captured = steps.trace_step(trace.params, cache, step, trace.cfg)
        captured[-1]["logits_all"] = logits
        return captured, cache

    def draft(cache: ModelCache, step: DraftStep):
        return trace_draft(trace.params, cache, step, trace.cfg)

    return replay_with(trace, run, draft)


def in_small_pages(trace: Trace) -> Trace:
    """The trace with pages of SMALL_PAGE tokens, or of the next number that every compress ratio divides."""
    unit = math.lcm(*(ratio for ratio in trace.cfg.layer_ratios if ratio))
    return dataclasses.replace(trace, cfg=trace.cfg.replace(page_size=-(-SMALL_PAGE // unit) * unit))


def replay_served(trace: Trace, shuffled: bool = False) -> dict[str, Any]:
    """Golden names -> logits of last rows, output ids and caches, from one `prefill` and N `decode` calls.

    `shuffled`: the pages of all sequences lie in a random order in the pool.
    """
    cfg, ids, batch, prompt = trace.cfg, trace.arrays["input_ids"], trace.batch, trace.prompt
    cache, tables = empty_cache(trace), page_tables(trace, shuffled)
    logits, cache = steps.prefill(trace.params, cache, batch_step(trace, ids[:, :prompt], 0, tables), cfg)
    ours = {"prefill/logits_last": np.asarray(logits)[:batch]} | cache_arrays(cfg, cache, tables, prompt, "prefill")
    decoded = []
    for at in range(prompt, prompt + trace.decoded):
        step = batch_step(trace, ids[:, at : at + 1], at, tables)
        logits, cache = steps.decode(trace.params, cache, step, cfg)
        decoded.append(np.asarray(logits)[:batch])
    if decoded:
        ours["decode/logits"] = np.stack(decoded)
    for phase, name in (("prefill", "logits_last"), ("decode", "logits")):
        if f"{phase}/{name}" in ours:
            ours[f"{phase}/output_ids"] = ours[f"{phase}/{name}"].argmax(-1)
    return ours | cache_arrays(cfg, cache, tables, prompt + trace.decoded, "final")


def replay_with(trace: Trace, run: RunPhase, draft: RunDraft, cache: ModelCache | None = None) -> dict[str, Any]:
    """Golden names -> arrays, from a `run` that gives per phase one dict of arrays per layer and a final one.

    cache: the caches behind the prompt, from which only the decode steps are run; without it the prompt is run too.
    """
    cfg, tables = trace.cfg, page_tables(trace)
    if cache is None:
        ours, cache = _prefill_arrays(trace, run)
    else:
        ours = {}
        if trace.ngram_hash is not None:
            ours["prefill/engram_hashes"] = ngram_rows(trace, Rows(trace.batch, trace.prompt, 0))
    ours |= cache_arrays(cfg, cache, tables, trace.prompt, "prefill")
    decoded: list[dict[str, Any]] = []
    for n in range(trace.decoded):
        phase = Rows(trace.batch, 1, trace.prompt + n)
        captured, cache = run(cache, trace.arrays["input_ids"][:, phase.start : phase.start + 1], phase)
        decoded.append(_phase_arrays(trace, captured, phase, "decode"))
        decoded[-1]["decode/logits"] = decoded[-1]["decode/logits_all"][:, 0]
        decoded[-1]["decode/output_ids"] = decoded[-1]["decode/logits"].argmax(-1)
        decoded[-1] |= draft_arrays(trace, cache, phase, decoded[-1]["decode/output_ids"], draft)
    ours |= {key: stack_padded([arrays[key] for arrays in decoded]) for key in (decoded[0] if decoded else ())}
    return ours | cache_arrays(cfg, cache, tables, trace.prompt + trace.decoded, "final")


def _prefill_arrays(trace: Trace, run: RunPhase) -> tuple[dict[str, Any], ModelCache]:
    phase = Rows(trace.batch, trace.prompt, 0)
    captured, cache = run(empty_cache(trace), trace.arrays["input_ids"][:, : trace.prompt], phase)
    ours = _phase_arrays(trace, captured, phase, "prefill")
    ours["prefill/logits_last"] = ours["prefill/logits_all"][:, -1]
    ours["prefill/output_ids"] = ours["prefill/logits_last"].argmax(-1)
    return ours, cache


def _phase_arrays(trace: Trace, captured: list[dict], phase: Rows, name: str) -> dict[str, Any]:
    cfg, captured = trace.cfg, jax.device_get(captured)
    out = {f"{name}/{key}": _rows(value, phase) for key, value in captured[-1].items()}
    if trace.ngram_hash is not None:
        out[f"{name}/engram_hashes"] = ngram_rows(trace, phase)
    for layer, arrays in enumerate(captured[:-1]):
        out |= {f"L{layer}/{name}/{key}": value for key, value in layer_arrays(cfg, layer, arrays, phase).items()}
    return out


def draft_arrays(trace: Trace, cache: ModelCache, phase: Rows, next_ids: np.ndarray, draft: RunDraft) -> dict[str, Any]:
    """Golden names -> arrays of the greedy draft step behind a decode step, whose best tokens are `next_ids` [B]."""
    cfg, length = trace.cfg, phase.start + phase.count
    if not cfg.num_nextn_predict_layers or length >= cfg.max_position_embeddings:
        return {}
    anchors = [Anchor(slot, int(token), length) for slot, token in enumerate(next_ids)]
    step = make_draft_step(anchors, cfg, seqs=phase.batch)
    drafted, captured = jax.device_get(draft(cache, step))
    out = {"decode/spec_logits": drafted.logits, "decode/spec_confidence": drafted.confidence}
    out["decode/spec_output_ids"] = np.concatenate([next_ids[:, None], drafted.tokens], axis=1)
    for role, arrays in zip(draft_roles(cfg), captured, strict=True):
        window = np.repeat(arrays.pop("window_positions")[:, None], cfg.dspark_block_size, axis=1)
        named = {key: _float32(value) for key, value in arrays.items()} | {"topk_idxs": {"window": window}}
        out |= {f"L{role.layer}/decode/{key}": value for key, value in named.items()}
    return out


def pages_per_sequence(cfg: ModelConfig) -> int:
    """Pages that hold the longest context of `cfg`."""
    return pages_for(cfg, cfg.max_position_embeddings)


def empty_cache(trace: Trace) -> ModelCache:
    """A fresh cache with one slot and its own pages per sequence."""
    return ModelCache.empty(trace.cfg, trace.batch * pages_per_sequence(trace.cfg), trace.batch)


def page_tables(trace: Trace, shuffled: bool = False) -> np.ndarray:
    """int[B, pages per sequence]: the pages of each sequence in order of its tokens."""
    pages = np.arange(trace.batch * pages_per_sequence(trace.cfg))
    order = np.random.default_rng(0).permutation(pages) if shuffled else pages
    return order.reshape(trace.batch, -1)


def batch_step(trace: Trace, tokens: np.ndarray, start: int, tables: np.ndarray):
    """The ragged step of tokens [B, n] at `start` for all sequences."""
    alive = trace.alive
    before, here = np.where(alive, trace.arrays["input_ids"], EXCLUDED)[:, :start], alive[:, start:]
    chunks = [
        Chunk(
            b, tokens[b].tolist(), start, tables[b].tolist(),
            context=before[b].tolist(), alive=here[b, : tokens.shape[1]].tolist(),
        )
        for b in range(trace.batch)
    ]  # fmt: skip
    rows = bucket(tokens.size, PREFILL_ROWS if start == 0 else 1)
    return make_step(chunks, trace.cfg, rows=rows, ngram_hash=trace.ngram_hash)


def ngram_rows(trace: Trace, phase: Rows) -> np.ndarray:
    """int64[B, n, L, C]: the row numbers that the tokens of a phase hash to, image positions (which read none) too."""
    ids = np.where(trace.alive, trace.arrays["input_ids"], EXCLUDED)
    rows = [trace.ngram_hash.rows(row[phase.start : phase.start + phase.count], row[: phase.start]) for row in ids]
    return np.stack(rows).astype(np.int64)


def layer_arrays(cfg: ModelConfig, layer: int, captured: dict, phase: Rows) -> dict[str, np.ndarray]:
    """One layer's arrays under golden names; selections as positions and entries."""
    role = layer_roles(cfg)[layer]
    entries = (phase.start + phase.count) // role.ratio if role.ratio else 0
    out = {}
    for key, value in captured.items():
        if value is not None and key not in ("selection", "attended", "candidates", "window_positions"):
            out[key] = _rows(value, phase)
    for key in ("gate_weights", "gate_indices"):
        if key in out:
            out[key] = out[key].reshape(-1, out[key].shape[-1])
    out["topk_idxs"] = {"window": _rows(captured["window_positions"], phase)}
    if role.ratio:
        out["topk_idxs"]["entries"] = _rows(captured.get("attended", captured["selection"]), phase)
    if role.indexes:
        out["index_score"] = out["index_score"][..., :entries]
        out["compress_idxs"] = _rows(captured["selection"], phase)
        out["index_gap"] = _gap(out["index_score"], min(cfg.index_topk, entries))
    if role.builds_candidates:
        blocks = _rows(captured["candidates"], phase)
        out["candidates"] = (np.arange(entries)[:, None] // cfg.candidate_block_size == blocks[..., None, :]).any(-1)
    return out


def _gap(scores: np.ndarray, k: int) -> np.ndarray:
    """k-th minus (k+1)-th best score, inf where either is missing or masked."""
    if scores.shape[-1] <= k or k == 0:
        return np.full(scores.shape[:-1], np.inf, np.float32)
    best = -np.sort(-scores, axis=-1)
    with np.errstate(invalid="ignore"):
        gap = best[..., k - 1] - best[..., k]
    return np.where(np.isfinite(best[..., k - 1]) & np.isfinite(best[..., k]), gap, np.inf)


def _rows(value, phase: Rows) -> np.ndarray:
    value = _float32(np.asarray(value)[: phase.batch * phase.count])
    return value.reshape(phase.batch, phase.count, *value.shape[1:])


def _float32(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32) if value.dtype.kind == "V" or value.dtype.name == "bfloat16" else value


@functools.partial(jax.jit, static_argnames=("cfg",))
def _unpacked(cache: ModelCache, cfg: ModelConfig) -> dict[tuple[int, str], CachedRows]:
    """Every stored row by (layer, kind): [slots, ring rows, D] of windows, [pages, rows per page, D] of the others."""
    layout, rows = cache_layout(cfg), {}
    for member in (*layout.ring, *layout.members):
        arena = cache.ring if member.kind == "window" else cache.pages
        packed = arena[:, member.offset : member.offset + member.nbytes]
        packed = packed.reshape(arena.shape[0], member.rows_per_page, member.row_bytes)
        bits = member.format.element.bits
        one = member.format.element.encode(jnp.float32(1)).astype(jnp.uint8)
        ones = jnp.broadcast_to(one | one << 4 if bits == 4 else one, (*packed.shape[:-1], member.width * bits // 8))
        # The same scales over codes of 1.0 unpack to the scales themselves.
        scales = jnp.concatenate([ones, packed[..., ones.shape[-1] :]], axis=-1)
        rows[member.layer, member.kind] = CachedRows(*(member.format.unpack(r, member.width) for r in (packed, scales)))
    return rows


def cache_arrays(cfg: ModelConfig, cache: ModelCache, tables: np.ndarray, length: int, phase: str) -> dict[str, Any]:
    """Stored rows, unpacked, at the reference's addresses: ring slot = position mod window, entries in order.

    `tables`: pages of each sequence, int[B, n]; sequence b has slot b.
    """
    layout, state, batch = cache_layout(cfg), np.asarray(cache.state), len(tables)
    stored = jax.tree.map(np.asarray, _unpacked(cache, cfg))
    last = np.arange(max(0, length - cfg.sliding_window), length)
    out: dict[str, Any] = {}
    for role in (*layer_roles(cfg), *draft_roles(cfg)):
        prefix = f"L{role.layer}/{phase}/"

        def window(rows: np.ndarray) -> np.ndarray:
            slots = np.zeros((batch, cfg.sliding_window, rows.shape[-1]), np.float32)
            slots[:, last % cfg.sliding_window] = rows[:batch, last % layout.ring_rows]
            return slots

        out[prefix + "window_kv_cache"] = jax.tree.map(window, stored[role.layer, "window"])
        if not role.owns_kv:
            continue

        def entries(rows: np.ndarray, count: int = length // role.ratio) -> np.ndarray:
            return rows[tables].reshape(batch, -1, rows.shape[-1])[:, :count]

        for kind, name in (("main", "compress_kv_cache"), ("index", "index_k_cache")):
            out[prefix + name] = jax.tree.map(entries, stored[role.layer, kind])
        if role.ratio > 1:
            owner, first = layout.state_owners.index(role.layer), length - length % role.ratio
            open_rows = state[:batch, owner][:, np.arange(first, length) % layout.state_rows]
            out[prefix + "comp_kv_state"], out[prefix + "comp_score_state"] = np.split(open_rows, 2, axis=-1)
    return out


def stack_padded(arrays: list) -> np.ndarray | dict:
    """Stacks decode steps, right-padding the last axis as the golden files do (-2, False, NaN)."""
    if isinstance(arrays[0], dict):
        return {key: stack_padded([a[key] for a in arrays]) for key in arrays[0]}
    fill = {"i": -2, "u": -2, "b": False}.get(arrays[0].dtype.kind, np.nan)
    width = max(a.shape[-1] for a in arrays) if arrays[0].ndim else 0
    padded = [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, width - a.shape[-1])], constant_values=fill) for a in arrays]
    return np.stack(padded)
