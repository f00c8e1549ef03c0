"""Model configuration: one frozen, hashable record with the upstream config keys.

The keys are those of the released `config.json`; the keys under "project" below are ours. `validate` is called by
every constructor path, so a `ModelConfig` that exists is consistent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from dsflash_jax.numerics.format_table import FORMAT_NAMES, format_facts

SCORING_FUNCS = ("sqrtsoftplus", "sigmoid", "softmax")
DTYPES = ("float32", "bfloat16")
CACHES = ("main", "index", "window")  # each has a key `<cache>_format`


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters, used only in layers with a global branch (key `rope_scaling`)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        _floats_for_integers(self)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and semantics of one text backbone. Field names are upstream config keys.

    Layers are zero-based. `compress_ratios[l]` is 0 for a layer with window attention only, else the number m of raw
    tokens per global entry. `swiglu_limit` 0 means no clamp. `candidate_source_layer_id` -1 means no candidate pool.

    `num_nextn_predict_layers` is read and checked (released files list the draft layers in `compress_ratios` too), but
    draft layers are not built yet: no module, cache or step has them, and every model here is the backbone alone.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    qk_rope_head_dim: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    num_nextn_predict_layers: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    # -- project --
    dtype: str = "float32"
    score_dtype: str = "float32"  # of index scores; "bfloat16" reproduces the released rounding
    stale_index_keys: bool = False  # reproduce the released decode quirk (golden `_raw` files only)
    page_size: int = 128  # tokens per page of the global group
    num_draft_tokens: int = 5  # sizes the rollback room of ring and compressor state
    window_format: str = "mxfp8"
    main_format: str = "fp4_e4m3"
    index_format: str = "mxfp4"
    scratch_bytes: int = 32 * 2**20  # budget of one score or gather tile
    qat: bool = False  # whole-sequence forward rounds KV as the cache does, straight-through gradient
    token_shift: bool = False  # lab only: learned share of the previous embedding (not in the published model)

    def __post_init__(self) -> None:
        for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                _fail(name, value, "must be a list of integers")
            object.__setattr__(self, name, tuple(value))
        _floats_for_integers(self)
        self.validate()

    @classmethod
    def from_json(cls, source: Any) -> ModelConfig:
        """Reads a config file or mapping in any accepted spelling; see `config_io.read_config`."""
        from dsflash_jax.config_io import read_config

        return read_config(source)

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compress ratios of the backbone layers (draft layers, if listed, cut off)."""
        return self.compress_ratios[: self.num_hidden_layers]

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with fields changed (validated again)."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field present: the canonical form that `sha256` hashes."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def sha256(self) -> str:
        """Hex digest of the canonical form; goes into every artefact."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: ModelConfig | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Fields in which two configs differ: name -> (here, there)."""
        mine = self.to_dict()
        theirs = other.to_dict() if isinstance(other, ModelConfig) else dict(other)
        return {k: (mine.get(k), theirs.get(k)) for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)}

    def validate(self) -> None:
        """Raises ValueError with one sentence naming field, value and rule."""
        _check_types(self)
        _check_sizes(self)
        _check_rope(self)
        _check_layers(self)
        _check_candidates(self)
        _check_formats(self)


def _fail(name: str, value: Any, rule: str) -> None:
    raise ValueError(f"{name}={value!r} {rule}.")


def _floats_for_integers(record: Any) -> None:
    """JSON writes 16.0 as 16 in some files: equal configs must have one canonical form, hence one hash."""
    for field in dataclasses.fields(record):
        if field.type == "float" and type(getattr(record, field.name)) is int:
            object.__setattr__(record, field.name, float(getattr(record, field.name)))


def _check_types(record: Any, prefix: str = "") -> None:
    for field in dataclasses.fields(record):
        name, value = prefix + field.name, getattr(record, field.name)
        if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            _fail(name, value, "must be an integer")
        if field.type == "float" and not (isinstance(value, float) and math.isfinite(value)):
            _fail(name, value, "must be a finite number")
        if field.type == "bool" and not isinstance(value, bool):
            _fail(name, value, "must be true or false")
        if field.type == "str" and not isinstance(value, str):
            _fail(name, value, "must be text")
        if field.type == "tuple[int, ...]" and any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            _fail(name, list(value), "must be a list of integers")
        if isinstance(value, RopeScaling):
            _check_types(value, f"{name}.")
        elif field.type == "RopeScaling | None" and value is not None:
            _fail(name, value, "must be a RopeScaling or nothing")


_AT_LEAST = {
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
            _fail(field.name, getattr(cfg, field.name), f"must be at least {least}")
    if cfg.n_shared_experts != 1:
        _fail("n_shared_experts", cfg.n_shared_experts, "must be 1: the released model has exactly one shared expert")
    if cfg.num_attention_heads % cfg.o_groups:
        _fail("o_groups", cfg.o_groups, f"must divide num_attention_heads={cfg.num_attention_heads}")
    if cfg.num_experts_per_tok > cfg.n_routed_experts:
        _fail("num_experts_per_tok", cfg.num_experts_per_tok, f"exceeds n_routed_experts={cfg.n_routed_experts}")
    if cfg.scoring_func not in SCORING_FUNCS:
        _fail("scoring_func", cfg.scoring_func, f"must be one of {', '.join(SCORING_FUNCS)}")
    for name in ("dtype", "score_dtype"):
        if getattr(cfg, name) not in DTYPES:
            _fail(name, getattr(cfg, name), f"must be one of {', '.join(DTYPES)}")
    for name in ("gate_temp", "routed_scaling_factor", "rope_theta", "compress_rope_theta", "rms_norm_eps", "hc_eps"):
        if not getattr(cfg, name) > 0:
            _fail(name, getattr(cfg, name), "must be positive")
    if cfg.swiglu_limit < 0:
        _fail("swiglu_limit", cfg.swiglu_limit, "must be 0 (no clamp) or positive")


def _check_rope(cfg: ModelConfig) -> None:
    width = cfg.qk_rope_head_dim
    if width % 2:
        _fail("qk_rope_head_dim", width, "must be even: RoPE rotates adjacent pairs")
    heads = ["head_dim"] + (["index_head_dim"] if cfg.index_source_layer_ids else [])
    for name in heads:
        if width > getattr(cfg, name):
            _fail("qk_rope_head_dim", width, f"exceeds {name}={getattr(cfg, name)}")
    scaling = cfg.rope_scaling
    if scaling is None:
        return
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        if not getattr(scaling, name) > 0:
            _fail(f"rope_scaling.{name}", getattr(scaling, name), "must be positive")
    if scaling.beta_fast < scaling.beta_slow:
        _fail("rope_scaling.beta_fast", scaling.beta_fast, f"must not be below beta_slow={scaling.beta_slow}")


def _check_layer_list(cfg: ModelConfig, name: str) -> None:
    ids = getattr(cfg, name)
    if list(ids) != sorted(set(ids)):
        _fail(name, list(ids), "must be ascending without repeats")
    for layer in ids:
        if not 0 <= layer < cfg.num_hidden_layers:
            _fail(name, list(ids), f"names layer {layer} outside 0..{cfg.num_hidden_layers - 1}")


def _check_layers(cfg: ModelConfig) -> None:
    n, drafts = cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    if len(cfg.compress_ratios) not in (n, n + drafts):
        allowed = f"{n}" if not drafts else f"{n} or {n + drafts} (with {drafts} draft layers)"
        rule = f"has {len(cfg.compress_ratios)} entries, must have {allowed}"
        _fail("compress_ratios", list(cfg.compress_ratios), rule)
    if any(r != 0 for r in cfg.compress_ratios[n:]):
        _fail("compress_ratios", list(cfg.compress_ratios), "must be 0 in the draft layers")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        _check_layer_list(cfg, name)
    kv_source = None
    for layer, ratio in enumerate(cfg.layer_ratios):
        where = f"at layer {layer}"
        if ratio < 0 or (ratio and cfg.page_size % ratio):
            _fail("compress_ratios", ratio, f"{where} must be 0 or divide page_size={cfg.page_size}")
        if layer in cfg.kv_source_layer_ids:
            kv_source = layer
            if layer not in cfg.index_source_layer_ids:
                rule = "must also be in index_source_layer_ids: new KV needs a new selection"
                _fail("kv_source_layer_ids", layer, rule)
        if layer in cfg.index_source_layer_ids:
            if ratio == 0:
                _fail("index_source_layer_ids", layer, "names a layer whose compress ratio is 0")
        if ratio == 0:
            continue
        if kv_source is None:  # a KV source is an index source too, so this finds a missing selection as well
            rule = f"{where} makes the layer a consumer before its source: no KV source at or below it"
            _fail("compress_ratios", ratio, rule)
        if cfg.layer_ratios[kv_source] != ratio:
            rule = f"{where} differs from ratio {cfg.layer_ratios[kv_source]} of its KV source, layer {kv_source}"
            _fail("compress_ratios", ratio, rule)


def _check_candidates(cfg: ModelConfig) -> None:
    source = cfg.candidate_source_layer_id
    if source < 0:
        return
    if source not in cfg.index_source_layer_ids:
        sources = list(cfg.index_source_layer_ids)
        _fail("candidate_source_layer_id", source, f"must be -1 (no pool) or in index_source_layer_ids={sources}")
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(cfg, name) < 1:
            _fail(name, getattr(cfg, name), "must be at least 1 when candidate_source_layer_id is set")
    later = [k for k in cfg.kv_source_layer_ids if k > source]
    if later and any(i >= later[0] for i in cfg.index_source_layer_ids):
        rule = f"precedes KV source {later[0]}: its pool would name foreign entries"
        _fail("candidate_source_layer_id", source, rule)
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
            _fail(name, getattr(cfg, name), f"must be one of {', '.join(FORMAT_NAMES)}")
    for name, width_name in widths.items():
        try:
            format_facts(getattr(cfg, name)).check_width(getattr(cfg, width_name))
        except ValueError as error:
            _fail(name, getattr(cfg, name), f"does not fit {width_name}={getattr(cfg, width_name)}: {error}")
