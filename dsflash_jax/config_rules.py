"""The rules that a `ModelConfig` keeps, each refused with one sentence that names field, value and rule."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dsflash_jax.numerics.format_table import FORMAT_NAMES, format_facts

if TYPE_CHECKING:
    from dsflash_jax.config import ModelConfig

SCORING_FUNCS = ("sqrtsoftplus", "sigmoid", "softmax")
DTYPES = ("float32", "bfloat16")
CACHES = ("main", "index", "window")  # each has a key `<cache>_format`
QUANT_METHODS, EXPERT_DTYPES = ("", "fp8"), ("", "fp4")
IMPLEMENTATIONS = ("", "xla", "pallas_triton")  # those that every op of `pallas_kernels` has; "" = the best
QUANT_BLOCK = 32  # rows and columns that share a scale in packed weights
_OPTIONAL = (
    "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_pad_token_id", "engram_compressed_vocab_size",
    "dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)  # fmt: skip


def check_config(cfg: ModelConfig) -> None:
    """Raises ValueError with one sentence naming field, value and rule."""
    _check_types(cfg)
    _check_sizes(cfg)
    _check_rope(cfg)
    _check_layers(cfg)
    _check_candidates(cfg)
    _check_formats(cfg)
    _check_engram(cfg)
    _check_drafts(cfg)
    _check_packed_weights(cfg)
    _check_kernels(cfg)


def refuse(name: str, value: Any, rule: str) -> None:
    """Raises the one sentence of a broken rule."""
    raise ValueError(f"{name}={value!r} {rule}.")


def _check_types(record: Any, prefix: str = "") -> None:
    for field in dataclasses.fields(record):
        name, value = prefix + field.name, getattr(record, field.name)
        if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            refuse(name, value, "must be an integer")
        if field.type == "float" and not (isinstance(value, float) and math.isfinite(value)):
            refuse(name, value, "must be a finite number")
        if field.type == "bool" and not isinstance(value, bool):
            refuse(name, value, "must be true or false")
        if field.type == "str" and not isinstance(value, str):
            refuse(name, value, "must be text")
        if field.type == "tuple[int, ...]" and any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            refuse(name, list(value), "must be a list of integers")
        if field.type == "RopeScaling | None" and value is not None:
            if not dataclasses.is_dataclass(value):
                refuse(name, value, "must be a RopeScaling or nothing")
            _check_types(value, f"{name}.")


_AT_LEAST = {
    **dict.fromkeys(_OPTIONAL, 0),
    "num_nextn_predict_layers": 0,
    "num_draft_tokens": 0,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
    "candidate_source_layer_id": -1,
}


def _check_sizes(cfg: ModelConfig) -> None:
    for field in dataclasses.fields(cfg):
        least = _AT_LEAST.get(field.name, 1)
        if field.type == "int" and getattr(cfg, field.name) < least:
            refuse(field.name, getattr(cfg, field.name), f"must be at least {least}")
    if cfg.n_shared_experts != 1:
        refuse("n_shared_experts", cfg.n_shared_experts, "must be 1: the released model has exactly one shared expert")
    if cfg.num_attention_heads % cfg.o_groups:
        refuse("o_groups", cfg.o_groups, f"must divide num_attention_heads={cfg.num_attention_heads}")
    if cfg.num_experts_per_tok > cfg.n_routed_experts:
        refuse("num_experts_per_tok", cfg.num_experts_per_tok, f"exceeds n_routed_experts={cfg.n_routed_experts}")
    if cfg.scoring_func not in SCORING_FUNCS:
        refuse("scoring_func", cfg.scoring_func, f"must be one of {', '.join(SCORING_FUNCS)}")
    for name, known in (("dtype", DTYPES), ("score_dtype", DTYPES), ("quant_method", QUANT_METHODS),
                        ("expert_dtype", EXPERT_DTYPES)):  # fmt: skip
        if getattr(cfg, name) not in known:
            refuse(name, getattr(cfg, name), f"must be one of {', '.join(k or 'nothing' for k in known)}")
    for name in ("gate_temp", "routed_scaling_factor", "rope_theta", "compress_rope_theta", "rms_norm_eps", "hc_eps"):
        if not getattr(cfg, name) > 0:
            refuse(name, getattr(cfg, name), "must be positive")
    if cfg.swiglu_limit < 0:
        refuse("swiglu_limit", cfg.swiglu_limit, "must be 0 (no clamp) or positive")


def _check_rope(cfg: ModelConfig) -> None:
    width = cfg.qk_rope_head_dim
    if width % 2:
        refuse("qk_rope_head_dim", width, "must be even: RoPE rotates adjacent pairs")
    heads = ["head_dim"] + (["index_head_dim"] if cfg.index_source_layer_ids else [])
    for name in heads:
        if width > getattr(cfg, name):
            refuse("qk_rope_head_dim", width, f"exceeds {name}={getattr(cfg, name)}")
    scaling = cfg.rope_scaling
    if scaling is None:
        return
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        if not getattr(scaling, name) > 0:
            refuse(f"rope_scaling.{name}", getattr(scaling, name), "must be positive")
    if scaling.beta_fast < scaling.beta_slow:
        refuse("rope_scaling.beta_fast", scaling.beta_fast, f"must not be below beta_slow={scaling.beta_slow}")


def _check_layer_list(cfg: ModelConfig, name: str) -> None:
    ids = getattr(cfg, name)
    if list(ids) != sorted(set(ids)):
        refuse(name, list(ids), "must be ascending without repeats")
    for layer in ids:
        if not 0 <= layer < cfg.num_hidden_layers:
            refuse(name, list(ids), f"names layer {layer} outside 0..{cfg.num_hidden_layers - 1}")


def _check_layers(cfg: ModelConfig) -> None:
    n, drafts = cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    if len(cfg.compress_ratios) not in (n, n + drafts):
        allowed = f"{n}" if not drafts else f"{n} or {n + drafts} (with {drafts} draft layers)"
        rule = f"has {len(cfg.compress_ratios)} entries, must have {allowed}"
        refuse("compress_ratios", list(cfg.compress_ratios), rule)
    if any(r != 0 for r in cfg.compress_ratios[n:]):
        refuse("compress_ratios", list(cfg.compress_ratios), "must be 0 in the draft layers")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        _check_layer_list(cfg, name)
    kv_source = None
    for layer, ratio in enumerate(cfg.layer_ratios):
        where = f"at layer {layer}"
        if ratio < 0 or (ratio and cfg.page_size % ratio):
            refuse("compress_ratios", ratio, f"{where} must be 0 or divide page_size={cfg.page_size}")
        if layer in cfg.kv_source_layer_ids:
            kv_source = layer
            if layer not in cfg.index_source_layer_ids:
                rule = "must also be in index_source_layer_ids: new KV needs a new selection"
                refuse("kv_source_layer_ids", layer, rule)
        if layer in cfg.index_source_layer_ids:
            if ratio == 0:
                refuse("index_source_layer_ids", layer, "names a layer whose compress ratio is 0")
        if ratio == 0:
            continue
        if kv_source is None:  # a KV source is an index source too, so this finds a missing selection as well
            rule = f"{where} makes the layer a consumer before its source: no KV source at or below it"
            refuse("compress_ratios", ratio, rule)
        if cfg.layer_ratios[kv_source] != ratio:
            rule = f"{where} differs from ratio {cfg.layer_ratios[kv_source]} of its KV source, layer {kv_source}"
            refuse("compress_ratios", ratio, rule)


def _check_candidates(cfg: ModelConfig) -> None:
    source = cfg.candidate_source_layer_id
    if source < 0:
        return
    if source not in cfg.index_source_layer_ids:
        sources = list(cfg.index_source_layer_ids)
        refuse("candidate_source_layer_id", source, f"must be -1 (no pool) or in index_source_layer_ids={sources}")
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(cfg, name) < 1:
            refuse(name, getattr(cfg, name), "must be at least 1 when candidate_source_layer_id is set")
    later = [k for k in cfg.kv_source_layer_ids if k > source]
    if later and any(i >= later[0] for i in cfg.index_source_layer_ids):
        rule = f"precedes KV source {later[0]}: its pool would name foreign entries"
        refuse("candidate_source_layer_id", source, rule)
    smallest = (cfg.candidate_topk_blocks - 1) * cfg.candidate_block_size + 1
    if cfg.index_topk > smallest:
        raise ValueError(
            f"index_topk={cfg.index_topk} exceeds the smallest candidate pool {smallest} = (candidate_topk_blocks "
            f"{cfg.candidate_topk_blocks} - 1) * candidate_block_size {cfg.candidate_block_size} + 1. "
            "Raise candidate_topk_blocks or lower index_topk."
        )


def _check_formats(cfg: ModelConfig) -> None:
    widths = {"window_format": "head_dim"}
    if cfg.kv_source_layer_ids:
        widths |= {"main_format": "head_dim", "index_format": "index_head_dim"}
    for name in (f"{cache}_format" for cache in CACHES):
        if getattr(cfg, name) not in FORMAT_NAMES:
            refuse(name, getattr(cfg, name), f"must be one of {', '.join(FORMAT_NAMES)}")
    for name, width_name in widths.items():
        try:
            format_facts(getattr(cfg, name)).check_width(getattr(cfg, width_name))
        except ValueError as error:
            refuse(name, getattr(cfg, name), f"does not fit {width_name}={getattr(cfg, width_name)}: {error}")


def _check_engram(cfg: ModelConfig) -> None:
    if not cfg.engram_layer_ids:
        return
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        if getattr(cfg, name) < 1:
            refuse(name, getattr(cfg, name), "must be at least 1 when engram_layer_ids is set")
    if cfg.engram_max_ngram_size < 2:
        refuse("engram_max_ngram_size", cfg.engram_max_ngram_size, "must be at least 2: n-grams start at two tokens")
    if len(cfg.engram_num_embeddings) != len(cfg.engram_layer_ids):
        rule = f"must have one entry for each of engram_layer_ids={list(cfg.engram_layer_ids)}"
        refuse("engram_num_embeddings", list(cfg.engram_num_embeddings), rule)
    if cfg.engram_pad_token_id >= cfg.vocab_size:
        refuse("engram_pad_token_id", cfg.engram_pad_token_id, f"must be below vocab_size={cfg.vocab_size}")
    if cfg.engram_head_dim % QUANT_BLOCK:
        refuse("engram_head_dim", cfg.engram_head_dim, f"must be a multiple of {QUANT_BLOCK}, which share a scale")
    last = max(cfg.engram_layer_ids)
    start = max(cfg.kv_source_layer_ids, default=cfg.num_hidden_layers)
    if last >= start:
        rule = f"names layer {last} at or above {start}, where the decoder starts: the encoder alone reads n-grams"
        refuse("engram_layer_ids", list(cfg.engram_layer_ids), rule)


def _check_drafts(cfg: ModelConfig) -> None:
    if not cfg.num_nextn_predict_layers:
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        if getattr(cfg, name) < 1:
            refuse(name, getattr(cfg, name), "must be at least 1 when num_nextn_predict_layers is set")
    if not cfg.dspark_target_layer_ids:
        refuse("dspark_target_layer_ids", [], "must name a layer when num_nextn_predict_layers is set")
    if cfg.dspark_noise_token_id >= cfg.vocab_size:
        refuse("dspark_noise_token_id", cfg.dspark_noise_token_id, f"must be below vocab_size={cfg.vocab_size}")
    if cfg.dspark_num_experts_per_tok > cfg.dspark_n_routed_experts:
        rule = f"exceeds dspark_n_routed_experts={cfg.dspark_n_routed_experts}"
        refuse("dspark_num_experts_per_tok", cfg.dspark_num_experts_per_tok, rule)
    if cfg.dspark_block_size > cfg.num_draft_tokens:
        rule = f"exceeds num_draft_tokens={cfg.num_draft_tokens}, for which ring and state have room to roll back"
        refuse("dspark_block_size", cfg.dspark_block_size, rule)


def _check_packed_weights(cfg: ModelConfig) -> None:
    names = ("hidden_size", "q_lora_rank", "moe_intermediate_size")
    widths = {name: getattr(cfg, name) for name in names}
    packed = {"quant_method": widths | {"o_groups * o_lora_rank": cfg.o_groups * cfg.o_lora_rank},
              "expert_dtype": {name: widths[name] for name in names if name != "q_lora_rank"}}  # fmt: skip
    for key, inputs in packed.items():
        for name, width in inputs.items() if getattr(cfg, key) else ():
            if width % QUANT_BLOCK:
                refuse(name, width, f"must be a multiple of {QUANT_BLOCK} with {key}={getattr(cfg, key)!r}")


def _check_kernels(cfg: ModelConfig) -> None:
    if cfg.implementation not in IMPLEMENTATIONS:
        known = ", ".join(name or "nothing" for name in IMPLEMENTATIONS)
        refuse("implementation", cfg.implementation, f"must be one of {known}")
    kernel = cfg.implementation not in ("", "xla")
    if cfg.interpret and not kernel:
        refuse("interpret", True, f"interprets a kernel, so implementation={cfg.implementation!r} must name one")
    for name, only in (("score_dtype", "float32"), ("stale_index_keys", False)):
        if kernel and getattr(cfg, name) != only:
            rule = f"must be {only!r} with implementation={cfg.implementation!r}: no kernel reproduces it"
            refuse(name, getattr(cfg, name), rule)
