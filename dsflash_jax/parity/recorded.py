"""What a golden file recorded, as this package takes it: the input of every part, and the caches behind a prompt."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax.cache.layout import Member, cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.modules.dspark import draft_roles
from dsflash_jax.numerics.formats import KVFormat
from dsflash_jax.parity.golden import Trace
from dsflash_jax.parity.replay import Rows, empty_cache, page_tables
from dsflash_jax.parity.rules import CACHES, EXACT, FLOATS, SELECTING
from dsflash_jax.roles import layer_roles

STREAMS = ("attn_in", "attn_out", "ffn_in", "ffn_out", "h_out")
MEMORY = "engram_out"  # recorded in Engram layers only
# Of a cut prompt these are left out: they hold its last rows only, or follow from rows that were not recorded.
OF_A_PROMPT = (FLOATS | SELECTING | EXACT | {"topk_idxs"}) - {"engram_hashes"}


def compared_arrays(trace: Trace) -> dict[str, np.ndarray]:
    """The arrays of the file that are compared: all, but those of a prompt that a bfloat16 file cut."""
    if not trace.starts_behind_prompt:
        return trace.arrays
    return {key: array for key, array in trace.arrays.items() if not _of_prompt(key)}


def _of_prompt(key: str) -> bool:
    *_, phase, name = ("", *key.split("/"))
    return phase == "prefill" and name.split("@")[0] in OF_A_PROMPT


def recorded_inputs(trace: Trace, phase: Rows, num_rows: int) -> list[dict[str, np.ndarray]]:
    """Per layer, and finally for the heads, the recorded arrays of one phase as rows [num_rows, ...], zero padded."""
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
    heads = ("final_normed",) + (("main_hidden",) if cfg.num_nextn_predict_layers else ())
    given.append({name: jnp.asarray(rows(f"{prefix}/{name}"), cfg.dtype) for name in heads})
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


def recorded_drafts(trace: Trace, step: int) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Of decode step `step`: per draft layer its recorded arrays [B, block, ...], and int[B, block + 1] its tokens."""
    given = []
    for role in draft_roles(trace.cfg):
        at = f"L{role.layer}/decode/"
        layer = {name: jnp.asarray(trace.arrays[at + name][step], trace.cfg.dtype) for name in STREAMS}
        given.append(layer | {"pre_mix_out": trace.arrays[at + "pre_mix_out"][step]})
    return given, trace.arrays["decode/spec_output_ids"][step].astype(np.int32)


def recorded_cache(trace: Trace) -> ModelCache:
    """The caches behind the prompt, packed from the recorded values: the inverse of `replay.cache_arrays`.

    A recorded value whose group does not pack to itself again (FP4 with a subnormal scale) fails as a cached value.
    """
    cfg, layout, tables, prompt = trace.cfg, cache_layout(trace.cfg), page_tables(trace), trace.prompt
    cache = jax.tree.map(np.array, empty_cache(trace))
    slots = np.arange(trace.batch)[:, None]
    last = np.arange(max(0, prompt - cfg.sliding_window), prompt)
    names = {kind: name for name, kind in CACHES.items()}
    for member in layout.ring:
        rows = trace.arrays[f"L{member.layer}/prefill/{names['window']}"]
        _store(cache.ring, member, slots, last, rows[:, last % cfg.sliding_window])
    for member in layout.members:
        rows = trace.arrays[f"L{member.layer}/prefill/{names[member.kind]}"]
        entry = np.arange(rows.shape[1])
        _store(cache.pages, member, tables[:, entry // member.rows_per_page], entry, rows)
    for owner, layer in enumerate(layout.state_owners):
        ratio = cfg.layer_ratios[layer]
        position = np.arange(prompt - prompt % ratio, prompt)
        parts = [trace.arrays[f"L{layer}/prefill/{name}"] for name in ("comp_kv_state", "comp_score_state")]
        cache.state[: trace.batch, owner, layout.state_row(position)] = np.concatenate(parts, -1)[:, position % ratio]
    cache.length[: trace.batch] = prompt
    return jax.tree.map(jnp.asarray, cache)


def _store(arena: np.ndarray, member: Member, page: np.ndarray, row: np.ndarray, values: np.ndarray) -> None:
    """Packs `values` [B, n, D] into the rows `row` [n] of pages `page` [B, n or 1]."""
    packed = np.asarray(_packed(values.astype(np.float32), member.format))
    place = member.row_offset(row)[:, None] + np.arange(member.row_bytes)
    arena[page[..., None], place] = packed


@functools.partial(jax.jit, static_argnames=("fmt",))
def _packed(values: jax.Array, fmt: KVFormat) -> jax.Array:
    return fmt.pack(values)
