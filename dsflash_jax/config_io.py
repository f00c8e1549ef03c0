"""Reading and writing `ModelConfig` in the three spellings met in the field.

* the released Hugging Face `config.json` (upstream keys; the text part may be nested in `text_config`),
* the project's own files (the same keys plus the project keys),
* the argument names of the reference inference code (`dim`, `n_layers`, ...), bare or wrapped in `args`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dsflash_jax.config import ModelConfig, RopeScaling

# Reference-inference argument -> config key. Arguments with equal names are not listed.
_REFERENCE_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "n_mtp_layers": "num_nextn_predict_layers",
}
# Reference arguments that describe a run, an allocation, or a part this package does not build yet.
_REFERENCE_UNUSED_PREFIXES = ("dspark_", "engram_", "vision_")
_REFERENCE_UNUSED = {"max_batch_size", "temperature", "dtype", "expert_dtype", "image_token_id"}
_REFERENCE_YARN = ("original_seq_len", "rope_factor", "beta_fast", "beta_slow")
# Keys of a released file that say nothing about the text backbone's arithmetic.
_RELEASED_UNUSED_PREFIXES = ("dspark_", "engram_", "vision_", "image_", "_")
_RELEASED_UNUSED = {
    "architectures", "attention_bias", "attention_dropout", "auto_map", "bos_token_id", "eos_token_id", "expert_dtype",
    "hidden_act", "initializer_range", "model_type", "num_key_value_heads", "pad_token_id", "pretraining_tp",
    "quantization_config", "rope_interleave", "tie_word_embeddings", "tokenizer_class", "topk_method", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
_YARN_TYPES = ("yarn", "deepseek_yarn")
_YARN_FIELDS = tuple(field.name for field in dataclasses.fields(RopeScaling))
_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


def read_config(source: str | pathlib.Path | Mapping[str, Any]) -> ModelConfig:
    """Builds a validated `ModelConfig` from a path, a JSON string's mapping or a mapping.

    Raises:
      OSError: the file cannot be read.
      ValueError: not JSON, an unknown or missing key (all are named), or a rule of `ModelConfig.validate`.
    """
    name, raw = _load(source)
    if isinstance(raw.get("args"), Mapping):
        raw = raw["args"]
    if "dim" in raw and "n_layers" in raw:
        fields = _from_reference(raw, name)
    elif isinstance(raw.get("text_config"), Mapping):
        fields = _from_released(raw["text_config"], name)
    else:
        fields = _from_released(raw, name)
    required = {f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING}
    missing = sorted(required - fields.keys())
    if missing:
        raise ValueError(f"{name}: missing config key(s) {', '.join(missing)}.")
    return ModelConfig(**fields)


def write_config(cfg: ModelConfig, path: str | pathlib.Path) -> None:
    """Writes the canonical form, which `read_config` reads back to an equal config."""
    pathlib.Path(path).write_text(json.dumps(cfg.to_dict(), indent=1) + "\n")


def _load(source: str | pathlib.Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "config", source
    text = pathlib.Path(source).read_text()
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not a JSON file ({error}).") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"{source}: a config must be a JSON object, not {type(raw).__name__}.")
    return str(source), raw


def _from_reference(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    unknown = []
    for key, value in raw.items():
        target = _REFERENCE_KEYS.get(key, key)
        if key in _REFERENCE_YARN or key in _REFERENCE_UNUSED:
            continue
        if target in _FIELDS:
            fields[target] = value
        elif not key.startswith(_REFERENCE_UNUSED_PREFIXES):
            unknown.append(key)
    _refuse_unknown(unknown, name)
    if raw.get("original_seq_len"):  # 0 = no YaRN
        values = {"original_max_position_embeddings": raw["original_seq_len"], "factor": raw.get("rope_factor")}
        values |= {key: raw[key] for key in ("beta_fast", "beta_slow") if key in raw}
        fields["rope_scaling"] = _rope_scaling({k: v for k, v in values.items() if v is not None}, name)
    return fields


def _from_released(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    unknown = []
    for key, value in raw.items():
        if key == "rope_scaling" or key == "rope_parameters":
            fields["rope_scaling"] = _rope_scaling(value, name)
        elif key in _FIELDS:
            fields[key] = value
        elif key not in _RELEASED_UNUSED and not key.startswith(_RELEASED_UNUSED_PREFIXES):
            unknown.append(key)
    _refuse_unknown(unknown, name)
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        if fields.get(key) is None:
            fields[key] = ()
    if fields.get("candidate_source_layer_id") is None:
        fields["candidate_source_layer_id"] = -1
    return fields


def _rope_scaling(value: Mapping[str, Any] | None, name: str) -> RopeScaling | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: rope_scaling={value!r} must be an object or null.")
    kind = value.get("rope_type", value.get("type", "yarn"))
    if kind not in _YARN_TYPES:
        raise ValueError(f"{name}: rope_scaling type {kind!r} must be yarn: no other scaling is built.")
    missing = [k for k in ("factor", "original_max_position_embeddings") if k not in value]
    if missing:
        raise ValueError(f"{name}: rope_scaling lacks {' and '.join(missing)}.")
    return RopeScaling(**{field: value[field] for field in _YARN_FIELDS if field in value})


def _refuse_unknown(unknown: list[str], name: str) -> None:
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise ValueError(f"{name}: unknown config key(s) {', '.join(sorted(unknown))}; known are {known}.")
