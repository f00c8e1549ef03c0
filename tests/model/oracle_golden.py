"""Writes golden files of models that nobody recorded, from the loop-level oracle: other seeds, widths and lengths."""

import json
import pathlib

import numpy as np

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.rope import model_tables
from dsflash_jax.weights.names import released_names
from tests.oracles import draft, engram, model, packed
from tests.oracles.attention import ring_slots, window_positions
from tests.oracles.indexer import candidate_mask

SAME_NAME = (
    "attn_in", "attn_out", "ffn_in", "ffn_out", "h_out", "pre_mix_out", "gate_indices", "gate_weights", "hc_attn_pre",
    "hc_attn_post", "hc_attn_comb", "hc_ffn_pre", "hc_ffn_post", "hc_ffn_comb",
)  # fmt: skip
# What pads the last axis of decode steps that have less than the last one.
PADDING = {"i": -2, "b": False, "f": np.nan}


def write(folder: pathlib.Path, name: str, config: dict, prompt: int, decoded: int, batch: int, seed: int) -> None:
    """`name`.f32.npz and `name`.weights.npz, laid out as the recorded files. `config`: reference model arguments."""
    rng, cfg = np.random.default_rng(seed), ModelConfig.from_json(config)
    weights = _weights(cfg, rng)
    freqs = {f"{table}/{part}": a for table, parts in model_tables(cfg).items() for part, a in parts.items()}
    ids = rng.integers(0, cfg.vocab_size, (batch, prompt + decoded)).astype(np.int32)
    memory, hashes = _memory(cfg, ids) if cfg.engram_layer_ids else ({}, [None] * batch)
    joined = _for_the_oracle(weights)
    runs = [model.run(joined, config, freqs, row, ngram_rows=rows) for row, rows in zip(ids, hashes, strict=True)]
    arrays = {"input_ids": ids} | _split("", "logits_all", [run["logits"] for run in runs], prompt)
    arrays |= _split("", "final_normed", [run["final_normed"] for run in runs], prompt)
    if memory:
        arrays |= _split("", "engram_hashes", hashes, prompt)
    if cfg.num_nextn_predict_layers:
        arrays |= _split("", "main_hidden", [run["main_hidden"] for run in runs], prompt)
    arrays["prefill/logits_last"] = arrays["prefill/logits_all"][:, -1]
    arrays["decode/logits"] = arrays["decode/logits_all"][:, :, 0]
    for phase, logits in (("prefill", "logits_last"), ("decode", "logits")):
        arrays[f"{phase}/output_ids"] = arrays[f"{phase}/{logits}"].argmax(-1)
    for layer in range(cfg.num_hidden_layers):
        arrays |= _layer(cfg, layer, [run["layers"][layer] for run in runs], prompt)
    if cfg.num_nextn_predict_layers:
        arrays |= _drafts(cfg, joined, config, freqs, runs, arrays["decode/output_ids"], prompt)
    meta = {"T": prompt, "ndec": decoded, "weights": f"{name}.weights.npz", "own_index_keys": True}
    header = {"config_json": json.dumps(config), "meta_json": json.dumps(meta)}
    tensors = {f"w/{key}": value for key, value in weights.items()} | {f"freqs/{key}": a for key, a in freqs.items()}
    tensors |= {f"engram/{key}": np.asarray(a, np.int64) for key, a in memory.items()}
    np.savez(folder / f"{name}.f32.npz", **arrays, **header)
    np.savez(folder / f"{name}.weights.npz", **tensors, **header)


def _weights(cfg: ModelConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tensors under released names; nothing stays at a neutral value."""
    abstract, tensors = steps.abstract_params(cfg), {}
    for name, (path, expert) in released_names(abstract).items():
        leaf = abstract
        for key in path:
            leaf = leaf[key]
        if path[-2] == "embed" and "engram" in path:
            codes = rng.integers(0, 127, leaf.shape) + rng.choice([0, 128], leaf.shape)  # 127 and 255 would be NaN
            tensors[name] = (codes if path[-1] == "weight" else rng.integers(119, 123, leaf.shape)).astype(np.uint8)
            continue
        shape = leaf.shape if expert is None else leaf.shape[1:]
        if leaf.dtype == np.uint8:
            tensors[name] = _codes(name, shape, rng)
            continue
        draw = rng.normal(size=shape)
        if name.endswith(("norm.weight", "q_weight", "k_weight")):
            draw = 1 + 0.2 * draw
        elif len(shape) == 2:
            draw = draw * shape[1] ** -0.5 if name != "embed.weight" else draw
        else:
            draw = 0.5 * draw
        tensors[name] = draw.astype(np.float32)
    return tensors


def _memory(cfg: ModelConfig, ids: np.ndarray) -> tuple[dict[str, object], list]:
    """(hash constants under the names of the recorded files, row numbers [B][T][L][C]); the map is a permuted third."""
    draws = np.random.default_rng(5)
    token_map = draws.permutation(np.arange(cfg.vocab_size) % cfg.engram_compressed_vocab_size)
    sizes, heads = cfg.engram_max_ngram_size - 1, cfg.engram_n_heads
    moduli = engram.primes(len(cfg.engram_layer_ids), sizes, heads, cfg.engram_vocab_size)
    bound = (2**63 - 1) // cfg.engram_compressed_vocab_size // 2
    drawn = [np.random.default_rng(10007 * layer).integers(0, bound, sizes + 1) for layer in cfg.engram_layer_ids]
    factors, pad = [[2 * int(n) + 1 for n in row] for row in drawn], int(token_map[cfg.engram_pad_token_id])
    flat = [[n for size in layer for n in size] for layer in moduli]
    constants = {"primes": moduli, "multipliers": factors, "token_map": token_map, "pad_id": pad}
    constants["offsets"] = [[sum(row[:i]) for i in range(len(row))] for row in flat]
    return constants, [engram.row_numbers(row.tolist(), set(), token_map, factors, moduli, pad) for row in ids]


def _codes(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Packed weights of about unit gain: any finite code, scales of three neighbouring powers of two."""
    if not name.endswith(".scale"):
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        return np.where((codes & 127) == 127, 0, codes) if ".experts." not in name else codes
    least = 124 - int(np.log2(shape[1] * 32) / 2) - (0 if ".experts." in name else 6)
    return rng.integers(least, least + 3, shape, dtype=np.uint8)


def _for_the_oracle(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray | packed.Matrix]:
    """Codes joined with their scales."""
    joined = {name: value for name, value in weights.items() if not name.endswith(".scale") or ".engram." in name}
    for name in (name.removesuffix("scale") + "weight" for name in weights.keys() - joined.keys()):
        kind = "fp4" if ".experts." in name else "fp8"
        joined[name] = packed.Matrix(kind, weights[name], weights[name.removesuffix("weight") + "scale"])
    return joined


def _split(at: str, name: str, per_sequence: list, prompt: int) -> dict[str, np.ndarray]:
    """[B][T + N, ...] -> prefill [B, T, ...] and decode [N, B, 1, ...]."""
    rows = np.stack(per_sequence)
    return {f"{at}prefill/{name}": rows[:, :prompt], f"{at}decode/{name}": np.moveaxis(rows[:, prompt:, None], 1, 0)}


def _layer(cfg: ModelConfig, layer: int, records: list[dict], prompt: int) -> dict[str, np.ndarray]:
    at, out = f"L{layer}/", {}
    for name in SAME_NAME + (("engram_out",) if layer in cfg.engram_layer_ids else ()):
        out |= _split(at, name, [record[name] for record in records], prompt)
    for name in ("gate_indices", "gate_weights"):
        prefill, decode = out[f"{at}prefill/{name}"], out[f"{at}decode/{name}"]
        out[f"{at}prefill/{name}"], out[f"{at}decode/{name}"] = prefill.reshape(-1, prefill.shape[-1]), decode[:, :, 0]
    for phase, end in (("prefill", prompt), ("final", len(records[0]["window_rows"]))):
        out |= {f"{at}{phase}/{key}": value for key, value in _caches(cfg, layer, records, end).items()}
    if layer in cfg.index_source_layer_ids:
        out |= _selecting(cfg, layer, records, prompt)
    return out | _attended(cfg, layer, records, prompt)


def _caches(cfg: ModelConfig, layer: int, records: list[dict], end: int) -> dict[str, np.ndarray]:
    """Rings, entries and the open group's rows after `end` tokens."""
    ratio = cfg.layer_ratios[layer]
    out = {"window_kv_cache": _ring(cfg, np.stack([record["window_rows"] for record in records]), end)}
    if layer in cfg.kv_source_layer_ids:
        for name, rows in (("compress_kv_cache", "main_rows"), ("index_k_cache", "index_rows")):
            out[name] = np.stack([record[rows][: end // ratio] for record in records])
        if ratio > 1:
            state = np.full((2, len(records), ratio, cfg.head_dim), -np.inf, np.float32)
            for b, record in enumerate(records):
                for position, *rows in record["open_groups"][end - 1]:
                    state[:, b, position % ratio] = rows
            out |= {"comp_kv_state": state[0], "comp_score_state": state[1]}
    return out


def _ring(cfg: ModelConfig, rows: np.ndarray, end: int) -> np.ndarray:
    """[B, window, D] of rows [B, T, D] by position after `end` tokens: slot = position modulo the window."""
    window, last = cfg.sliding_window, np.arange(max(0, end - cfg.sliding_window), end)
    ring = np.zeros((len(rows), window, cfg.head_dim), np.float32)
    ring[:, last % window] = rows[:, last]
    return ring


def _drafts(cfg: ModelConfig, weights, config: dict, freqs: dict, runs: list[dict], next_ids: np.ndarray, prompt: int):
    """A block behind every decode step, next_ids [N, B], and the draft layers' rings."""
    lengths, out = prompt + 1 + np.arange(len(next_ids)), {}
    found = [
        draft.run(weights, config, freqs, run["main_hidden"], list(zip(lengths.tolist(), ids.tolist(), strict=True)))
        for run, ids in zip(runs, next_ids.T, strict=True)
    ]
    blocks = [list(step) for step in zip(*(one["blocks"] for one in found), strict=True)]  # [N][B]
    for name, key in (("logits", "spec_logits"), ("confidence", "spec_confidence"), ("tokens", "spec_output_ids")):
        out[f"decode/{key}"] = np.array([[block[name] for block in step] for step in blocks])
    out["decode/spec_output_ids"] = np.concatenate([next_ids[..., None], out["decode/spec_output_ids"]], axis=-1)
    for j in range(cfg.num_nextn_predict_layers):
        at = f"L{cfg.num_hidden_layers + j}/"
        for name in SAME_NAME:
            rows = np.array([[block["layers"][j][name] for block in step] for step in blocks])  # [N, B, block, ...]
            flat = rows.reshape(len(rows), -1, rows.shape[-1]) if name.startswith("gate_") else rows
            out[f"{at}decode/{name}"] = flat
        out[f"{at}decode/topk_idxs"] = _padded_stack([_drafted_list(cfg, int(length), len(runs)) for length in lengths])
        for phase, end in (("prefill", prompt), ("final", prompt + len(next_ids))):
            rows = np.stack([one["window_rows"][j] for one in found])
            out[f"{at}{phase}/window_kv_cache"] = _ring(cfg, rows, end)
    return out


def _drafted_list(cfg: ModelConfig, length: int, batch: int) -> np.ndarray:
    """[B, block, written slots + block]: the ring's slots that hold a committed row, then the block's own rows."""
    window, block = cfg.sliding_window, cfg.dspark_block_size
    seen = [*range(min(window, length)), *range(window, window + block)]
    return np.broadcast_to(np.array(seen, np.int32), (batch, block, len(seen)))


def _selecting(cfg: ModelConfig, layer: int, records: list[dict], prompt: int) -> dict[str, np.ndarray]:
    """Scores, selection, margin and candidate masks of an index source, as wide as the entries that exist."""
    ratio, length = cfg.layer_ratios[layer], len(records[0]["index_scores"])
    phases = {"prefill": [(slice(0, prompt), prompt // ratio)]}
    phases["decode"] = [(slice(t, t + 1), (t + 1) // ratio) for t in range(prompt, length)]
    out = {}
    for phase, parts in phases.items():
        found: dict[str, dict[int, np.ndarray]] = {}
        for step, (rows, entries) in enumerate(parts):
            one = _selecting_rows(cfg, [record["index_scores"][rows] for record in records], entries, records, rows)
            for name, values in one.items():
                found.setdefault(name, {})[step] = values
        for name, by_step in found.items():
            key = f"L{layer}/{phase}/{name}"
            out[key] = by_step[0] if phase == "prefill" else _padded_stack(list(by_step.values()))
            if phase == "decode" and len(by_step) < len(parts):
                out[f"{key}@steps"] = np.array(list(by_step))
    return out


def _selecting_rows(cfg: ModelConfig, scores: list, entries: int, records: list[dict], rows: slice) -> dict:
    """The arrays of some rows of all sequences [B, rows, ...]; nothing without an entry, no margin without a rest."""
    if not entries:
        return {}
    values, k = np.stack(scores)[..., :entries], cfg.index_topk
    picked = np.stack([record["selections"][rows] for record in records])
    out = {"index_score": values, "compress_idxs": picked[..., : min(k, entries)]}
    if entries > k:
        best = -np.sort(-values, axis=-1)
        known = np.isfinite(best[..., k - 1]) & np.isfinite(best[..., k])
        with np.errstate(invalid="ignore"):
            out["index_gap"] = np.where(known, best[..., k - 1] - best[..., k], np.inf).astype(np.float32)
    if "candidates" in records[0]:
        blocks = np.stack([record["candidates"][rows] for record in records])
        masks = [candidate_mask(row, entries, cfg.candidate_block_size) for row in blocks.reshape(-1, blocks.shape[-1])]
        out["candidates"] = np.array(masks).reshape(*blocks.shape[:-1], entries)
    return out


def _attended(cfg: ModelConfig, layer: int, records: list[dict], prompt: int) -> dict[str, np.ndarray]:
    """The lists given to attention: positions and entries from T on, or ring slots and entries from the window on."""
    window, ratio, length = cfg.sliding_window, cfg.layer_ratios[layer], len(records[0]["attn_in"])
    near = np.array([window_positions(t, window)[: min(window, prompt)] for t in range(prompt)])
    prefill = _with_entries(cfg, records, slice(0, prompt), near, prompt, prompt // ratio if ratio else 0)
    decode = []
    for t in range(prompt, length):
        slots, entries = ring_slots(t, window)[None], (t + 1) // ratio if ratio else 0
        decode.append(_with_entries(cfg, records, slice(t, t + 1), slots, window, entries))
    return {f"L{layer}/prefill/topk_idxs": prefill, f"L{layer}/decode/topk_idxs": _padded_stack(decode)}


def _with_entries(cfg: ModelConfig, records: list[dict], rows: slice, near: np.ndarray, offset: int, entries: int):
    """[B, rows, window part + entry part]: int32, entries moved by `offset`, -1 where there is none."""
    near = np.broadcast_to(near, (len(records), *near.shape))
    if not entries:
        return near.astype(np.int32)
    far = np.stack([record["attended"][rows] for record in records])[..., : min(cfg.index_topk, entries)]
    return np.concatenate([near, np.where(far >= 0, far + offset, -1)], axis=-1).astype(np.int32)


def _padded_stack(parts: list[np.ndarray]) -> np.ndarray:
    """Decode steps [N, ...], right-padded along the last axis."""
    width, fill = max(part.shape[-1] for part in parts), PADDING[parts[0].dtype.kind]
    pads = [[(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])] for part in parts]
    return np.stack([np.pad(part, pad, constant_values=fill) for part, pad in zip(parts, pads, strict=True)])
