"""Writes golden files of models that nobody recorded, from the loop-level oracle: other seeds, widths and lengths."""

import json
import pathlib

import numpy as np

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.rope import model_tables
from dsflash_jax.weights.names import released_names
from tests.oracles import model

SAME_NAME = ("attn_in", "attn_out", "ffn_in", "ffn_out", "h_out", "pre_mix_out", "gate_indices", "gate_weights")


def write(folder: pathlib.Path, name: str, config: dict, prompt: int, decoded: int, batch: int, seed: int) -> None:
    """`name`.f32.npz and `name`.weights.npz, laid out as the recorded files. `config`: reference model arguments."""
    rng, cfg = np.random.default_rng(seed), ModelConfig.from_json(config)
    weights = _weights(cfg, rng)
    freqs = {f"{table}/{part}": a for table, parts in model_tables(cfg).items() for part, a in parts.items()}
    ids = rng.integers(0, cfg.vocab_size, (batch, prompt + decoded)).astype(np.int32)
    runs = [model.run(weights, config, freqs, row) for row in ids]
    arrays = {"input_ids": ids} | _split("", "logits", [run["logits"] for run in runs], prompt)
    arrays |= _split("", "final_normed", [run["final_normed"] for run in runs], prompt)
    arrays["prefill/logits_all"] = arrays.pop("prefill/logits")
    arrays["decode/logits"] = arrays["decode/logits"][:, :, 0]
    for layer in range(cfg.num_hidden_layers):
        arrays |= _layer(cfg, layer, [run["layers"][layer] for run in runs], prompt)
    meta = {"T": prompt, "ndec": decoded, "weights": f"{name}.weights.npz", "own_index_keys": True}
    header = {"config_json": json.dumps(config), "meta_json": json.dumps(meta)}
    tensors = {f"w/{key}": value for key, value in weights.items()} | {f"freqs/{key}": a for key, a in freqs.items()}
    np.savez(folder / f"{name}.f32.npz", **arrays, **header)
    np.savez(folder / f"{name}.weights.npz", **tensors, **header)


def _weights(cfg: ModelConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tensors under released names; nothing stays at a neutral value."""
    abstract, tensors = steps.abstract_params(cfg), {}
    for name, (path, expert) in released_names(abstract).items():
        leaf = abstract
        for key in path:
            leaf = leaf[key]
        shape = leaf.shape if expert is None else leaf.shape[1:]
        draw = rng.normal(size=shape)
        if name.endswith("norm.weight"):
            draw = 1 + 0.2 * draw
        elif len(shape) == 2:
            draw = draw * shape[1] ** -0.5 if name != "embed.weight" else draw
        else:
            draw = 0.5 * draw
        tensors[name] = draw.astype(np.float32)
    return tensors


def _split(at: str, name: str, per_sequence: list, prompt: int) -> dict[str, np.ndarray]:
    """[B][T + N, ...] -> prefill [B, T, ...] and decode [N, B, 1, ...]."""
    rows = np.stack(per_sequence)
    return {f"{at}prefill/{name}": rows[:, :prompt], f"{at}decode/{name}": np.moveaxis(rows[:, prompt:, None], 1, 0)}


def _layer(cfg: ModelConfig, layer: int, records: list[dict], prompt: int) -> dict[str, np.ndarray]:
    at, out = f"L{layer}/", {}
    for name in SAME_NAME:
        out |= _split(at, name, [record[name] for record in records], prompt)
    for name in ("gate_indices", "gate_weights"):
        prefill, decode = out[f"{at}prefill/{name}"], out[f"{at}decode/{name}"]
        out[f"{at}prefill/{name}"], out[f"{at}decode/{name}"] = prefill.reshape(-1, prefill.shape[-1]), decode[:, :, 0]
    windows = np.stack([record["window_rows"] for record in records])
    length, window = windows.shape[1], cfg.sliding_window
    for phase, end in (("prefill", prompt), ("final", length)):
        ring = np.zeros((len(records), window, cfg.head_dim), np.float32)
        last = np.arange(max(0, end - window), end)
        ring[:, last % window] = windows[:, last]
        out[f"{at}{phase}/window_kv_cache"] = ring
        if layer in cfg.kv_source_layer_ids:
            entries = end // cfg.compress_ratios[layer]
            for name, rows in (("compress_kv_cache", "main_rows"), ("index_k_cache", "index_rows")):
                out[f"{at}{phase}/{name}"] = np.stack([record[rows][:entries] for record in records])
    if layer in cfg.index_source_layer_ids:
        scores = np.stack([record["index_scores"] for record in records])
        out[f"{at}prefill/index_score"] = scores[:, :prompt, : prompt // cfg.compress_ratios[layer]]
        out |= _split(at, "compress_idxs", [record["selections"] for record in records], prompt)
    return out
