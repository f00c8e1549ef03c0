"""Names, shapes and counts of all tensors that a configuration asks for, from shapes alone: nothing is allocated.

The backbone comes from the parameter tree. N-gram memory and draft layers are written out here, from the released
reference, and give way to the tree where it holds them.
"""

from __future__ import annotations

import math
from typing import Any

from dsflash_jax.config import ModelConfig
from dsflash_jax.config_rules import QUANT_BLOCK
from dsflash_jax.weights.load import abstract_params
from dsflash_jax.weights.names import released_shapes, role_of

HYPER = "hyper-connections"  # their part
Shapes = dict[str, tuple[int, ...]]
# Linear maps outside the backbone of which no recorded model says whether the release packs them.
MAYBE_PACKED = (".engram.wkv.scale", ".main_proj.scale")


def expected_shapes(cfg: ModelConfig) -> Shapes:
    """Released name -> shape of every tensor of a checkpoint of `cfg`, vision tower aside."""
    return engram_shapes(cfg) | draft_shapes(cfg) | released_shapes(abstract_params(cfg))


def engram_shapes(cfg: ModelConfig) -> Shapes:
    """Tensors of the n-gram memory: a table of E4M3 rows with scales, its projection, and two gate weights."""
    width = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads * cfg.engram_head_dim
    shapes: Shapes = {}
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        shapes |= {
            f"layers.{layer}.engram.{name}": shape
            for name, shape in {
                "embed.weight": (rows, cfg.engram_head_dim),
                "embed.scale": (rows, cfg.engram_head_dim // QUANT_BLOCK),
                "wkv.weight": ((cfg.hc_mult + 1) * cfg.hidden_size, width),
                "q_weight": (cfg.hc_mult, cfg.hidden_size),
                "k_weight": (cfg.hc_mult, cfg.hidden_size),
            }.items()
        }
    return shapes


def draft_shapes(cfg: ModelConfig) -> Shapes:
    """Tensors of the draft layers: window layers with their own experts; input map in the first, heads in the last."""
    count, d, rank = cfg.num_nextn_predict_layers, cfg.hidden_size, cfg.dspark_markov_rank
    if not count:
        return {}
    layer = cfg.replace(
        num_hidden_layers=1, compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=(),
        candidate_source_layer_id=-1, engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0,
        dspark_target_layer_ids=(), n_routed_experts=cfg.dspark_n_routed_experts,
        num_experts_per_tok=cfg.dspark_num_experts_per_tok,
    )  # fmt: skip
    names = {n: s for n, s in released_shapes(abstract_params(layer)).items() if n.startswith("layers.0.")}
    shapes = {n.replace("layers.0.", f"mtp.{j}.", 1): s for j in range(count) for n, s in names.items()}
    shapes |= {"mtp.0.main_proj.weight": (d, len(cfg.dspark_target_layer_ids) * d), "mtp.0.main_norm.weight": (d,)}
    last = f"mtp.{count - 1}."
    return shapes | {
        f"{last}norm.weight": (d,),
        f"{last}markov_head.embed.weight": (cfg.vocab_size, rank),
        f"{last}markov_head.head.weight": (cfg.vocab_size, rank),
        f"{last}confidence_head.proj.weight": (1, d + rank),
    }


def part_of(name: str) -> str:
    """The part of the model that a backbone tensor belongs to; the role of any other."""
    if role_of(name) != "backbone":
        return role_of(name)
    parts = name.split(".")
    for part in ("compressor", "indexer", "shared_experts", "experts", "gate"):
        if part in parts:
            return {"experts": "routed experts", "shared_experts": "shared expert", "gate": "router"}.get(part, part)
    if "attn" in parts:
        return "attention"
    if parts[-1].startswith("hc_"):
        return HYPER
    return {"embed": "embedding", "head": "head"}.get(parts[0], "norms")


def parameter_counts(cfg: ModelConfig) -> dict[str, Any]:
    """Parameters of `cfg`, scales not counted.

    backbone (without the hyper-connections, which stand beside it), engram_tables, engram_other, drafts, total.
    active_decode: what one decoded token meets of backbone and hyper-connections (all layers, the chosen experts, the
    head, one embedding row). active_encoder: the same without the head in the layers below the last KV source, which
    is what a prompt token needs. parts: rows {part, parameters, active_decode}.
    """
    shapes = expected_shapes(cfg.replace(quant_method="", expert_dtype=""))
    decoder = max(cfg.kv_source_layer_ids, default=cfg.num_hidden_layers)
    totals: dict[str, int] = {}
    active: dict[str, int] = {}
    encoder = 0
    for name, shape in shapes.items():
        if name.endswith(".scale"):
            continue
        part, size = part_of(name), math.prod(shape)
        if part == "engram":
            part = "engram tables" if name.endswith(".embed.weight") else "engram other"
        totals[part] = totals.get(part, 0) + size
        if role_of(name) != "backbone":
            continue
        met = {"routed experts": 0, "embedding": cfg.hidden_size}.get(part, size)
        active[part] = active.get(part, 0) + met
        parts = name.split(".")
        if parts[0] == "layers" and int(parts[1]) < decoder:
            encoder += met
    chosen = totals["routed experts"] * cfg.num_experts_per_tok // cfg.n_routed_experts
    active["routed experts"] = chosen
    encoder += chosen * decoder // cfg.num_hidden_layers + cfg.hidden_size  # layers have equal experts
    if cfg.tie_word_embeddings:  # the whole table is the head
        active["embedding"] = totals["embedding"]
    return {
        "backbone": sum(totals[part] for part in active if part != HYPER),
        "hyper_connections": totals[HYPER],
        "engram_tables": totals.get("engram tables", 0),
        "engram_other": totals.get("engram other", 0),
        "drafts": totals.get("drafts", 0),
        "total": sum(totals.values()),
        "active_decode": sum(active.values()),
        "active_encoder": encoder,
        "parts": [{"part": p, "parameters": totals[p], "active_decode": active[p]} for p in active],
    }
