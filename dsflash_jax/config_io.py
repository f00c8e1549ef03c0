"""Reading `ModelConfig` in the three spellings met in the field.

* the released Hugging Face `config.json` (upstream keys; the text part may be nested in `text_config`),
* the project's own files (the same keys plus the project keys),
* the argument names of the reference inference code (`dim`, `n_layers`, ...), bare or wrapped in `args`.

A key is applied, checked against the one value that the model implements, or named here as without effect on the
text backbone's arithmetic; any other key is refused. Around `text_config` or `args` other keys may lie (a vision part,
a script's settings): there, too, those that concern the text backbone are applied or checked.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dsflash_jax.config import ModelConfig, RopeScaling
from dsflash_jax.config_rules import DTYPES, QUANT_BLOCK, QUANT_METHODS

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
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "engram_pad_id": "engram_pad_token_id",
}
# Reference arguments that describe a run, an allocation, or a part this package does not build yet.
_REFERENCE_UNUSED_PREFIXES = ("vision_",)
_REFERENCE_UNUSED = {"max_batch_size", "temperature", "image_token_id"}
_REFERENCE_YARN = ("original_seq_len", "rope_factor", "beta_fast", "beta_slow")
# Keys of a released file that change the arithmetic and have one built value: another one is another model.
_BUILT_VALUES = {
    "attention_bias": False,
    "attention_dropout": 0,
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "pretraining_tp": 1,
    "rope_interleave": True,
    "topk_method": "noaux_tc",
}
# Keys of a released file that say nothing about the text backbone's arithmetic.
_RELEASED_UNUSED_PREFIXES = ("vision_", "image_", "_")
_RELEASED_UNUSED = {
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "initializer_range", "model_type", "pad_token_id",
    "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_ROPE_KEYS = ("rope_scaling", "rope_parameters")  # the second since transformers 5
_AROUND = {*_ROPE_KEYS, "quantization_config"}
_YARN_TYPES = ("yarn", "deepseek_yarn")
_YARN_FIELDS = tuple(field.name for field in dataclasses.fields(RopeScaling))
# Of the YaRN variants: no factor on the attention's magnitude, and the ramp between whole dimensions.
_YARN_BUILT_VALUES = {"attention_factor": 1, "truncate": True}
_QUANTIZATION = "quantization_config"
# Of packed weights: 32x32 blocks whose scales are powers of two; inputs are rounded as they come.
_QUANTIZATION_BUILT_VALUES = {
    "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK], "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "fmt": "e4m3",
}  # fmt: skip
_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}
_NULL_MEANS = {
    "kv_source_layer_ids": (), "index_source_layer_ids": (), "engram_layer_ids": (), "candidate_source_layer_id": -1,
    "engram_num_embeddings": (), "dspark_target_layer_ids": (), "expert_dtype": "",
}  # fmt: skip


def read_config(source: str | pathlib.Path | Mapping[str, Any]) -> ModelConfig:
    """Builds a validated `ModelConfig` from the path of a JSON file (a string is a path, never JSON) or from a mapping.

    Raises:
      OSError: the file cannot be read.
      ValueError: not JSON, an unknown or missing key (all are named), a key with a value that no model here implements,
        two values for one key, or a rule of `ModelConfig.validate`.
    """
    name, raw = _load(source)
    inner, wrapper = _text_part(raw)
    reference = "dim" in inner and "n_layers" in inner
    fields = _from_reference(inner, name) if reference else _from_released(inner, name)
    if wrapper is not None:
        fields = _with_keys_around(fields, raw, wrapper, name)
    if not reference:
        fields = {**_NULL_MEANS, **fields}
    required = {f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING}
    missing = sorted(required - fields.keys())
    if missing:
        raise ValueError(f"{name}: missing config key(s) {', '.join(missing)}.")
    return ModelConfig(**fields)


def _load(source: str | pathlib.Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "config", source
    data = pathlib.Path(source).read_bytes()
    try:
        raw = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{source}: not a JSON file ({error}).") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"{source}: a config must be a JSON object, not {type(raw).__name__}.")
    return str(source), raw


def _text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """(the keys of the text backbone, the key that they are wrapped in)."""
    for wrapper in ("args", "text_config"):
        if isinstance(raw.get(wrapper), Mapping):
            return raw[wrapper], wrapper
    return raw, None


def _with_keys_around(fields: dict[str, Any], raw: Mapping[str, Any], wrapper: str, name: str) -> dict[str, Any]:
    """`fields`, which lay inside the wrapper, and those beside it; a key in both places must say the same."""
    around = _from_released({k: v for k, v in raw.items() if k in _FIELDS | _BUILT_VALUES.keys() | _AROUND}, name)
    for key, value in around.items():
        if fields.get(key, value) != value:
            raise ValueError(f"{name}: {key}={value!r} beside {wrapper} contradicts {fields[key]!r} inside it.")
    return fields | around


def _from_reference(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    unknown = []
    for key, value in raw.items():
        target = _REFERENCE_KEYS.get(key, key)
        if key in _REFERENCE_YARN or key in _REFERENCE_UNUSED:
            continue
        if key == "dtype" and value not in DTYPES:
            # How the reference stores its dense weights, not the compute dtype.
            fields |= {"quant_method": value} if value in QUANT_METHODS else {}
            continue
        if value is None and key in _NULL_MEANS:
            value = _NULL_MEANS[key]
        if target in fields or (key == "rope_scaling" and raw.get("original_seq_len")):
            raise ValueError(f"{name}: {key}={value!r} is a second value for {target}.")
        if target in _FIELDS:
            fields[target] = value
        elif not key.startswith(_REFERENCE_UNUSED_PREFIXES):
            unknown.append(key)
    _refuse_unknown(unknown, name)
    if raw.get("original_seq_len") == 0:  # said to have no YaRN
        fields.setdefault("rope_scaling", None)
    elif raw.get("original_seq_len"):
        values = {"original_max_position_embeddings": raw["original_seq_len"], "factor": raw.get("rope_factor")}
        values |= {key: raw[key] for key in ("beta_fast", "beta_slow") if key in raw}
        scaling = _rope_scaling({k: v for k, v in values.items() if v is not None}, "rope_scaling", name)
        fields["rope_scaling"] = scaling
    return fields


def _from_released(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    unknown = []
    for key, value in raw.items():
        if key in _ROPE_KEYS:
            continue
        if key == _QUANTIZATION:
            fields |= _packed_weights(value, name)
        elif key in _FIELDS:
            fields[key] = _NULL_MEANS.get(key) if value is None else value
        elif key in _BUILT_VALUES:
            _check_built(key, value, _BUILT_VALUES[key], name)
        elif key not in _RELEASED_UNUSED and not key.startswith(_RELEASED_UNUSED_PREFIXES):
            unknown.append(key)
    _refuse_unknown(unknown, name)
    return _with_rope(fields, raw, name)


def _check_built(key: str, value: Any, built: Any, name: str) -> None:
    if value != built:
        raise ValueError(f"{name}: {key}={value!r} must be {built!r}: no other value is built.")


def _packed_weights(value: Any, name: str) -> dict[str, str]:
    """`quant_method` and `expert_dtype` from a `quantization_config`; null says nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {_QUANTIZATION}={value!r} must be an object or null.")
    for part, built in _QUANTIZATION_BUILT_VALUES.items():
        if part in value:
            _check_built(f"{_QUANTIZATION}.{part}", value[part], built, name)
    kept = {key: value[key] for key in ("quant_method", "expert_dtype") if value.get(key) is not None}
    unknown = sorted(value.keys() - kept.keys() - _QUANTIZATION_BUILT_VALUES.keys() - {"expert_dtype"})
    if unknown:
        raise ValueError(f"{name}: {_QUANTIZATION} has unknown part(s) {', '.join(unknown)}.")
    return kept


def _with_rope(fields: dict[str, Any], raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`fields` with `rope_scaling` and `rope_theta` from the two keys that may hold them; null says nothing."""
    found = {key: raw[key] for key in _ROPE_KEYS if raw.get(key) is not None}
    if not found:
        return fields
    scalings = [_rope_scaling(value, key, name) for key, value in found.items()]
    if scalings[0] != scalings[-1]:
        raise ValueError(f"{name}: rope_scaling={found['rope_scaling']!r} and rope_parameters contradict each other.")
    for key, value in found.items():
        theta = value.get("rope_theta", fields.get("rope_theta"))
        if theta is not None and fields.setdefault("rope_theta", theta) != theta:
            raise ValueError(f"{name}: rope_theta={theta!r} in {key} contradicts rope_theta={fields['rope_theta']!r}.")
    return fields | {"rope_scaling": scalings[0]}


def _rope_scaling(value: Any, key: str, name: str) -> RopeScaling | None:
    """The YaRN parameters of one object; None where its type is "default" (no scaling)."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {key}={value!r} must be an object or null.")
    kind = value.get("rope_type", value.get("type", "yarn"))
    rest = {k: v for k, v in value.items() if k not in ("rope_type", "type", "rope_theta")}
    if kind == "default" and not rest:
        return None
    if kind not in _YARN_TYPES:
        raise ValueError(f"{name}: {key} type {kind!r} must be yarn: no other scaling is built.")
    missing = [k for k in ("factor", "original_max_position_embeddings") if k not in rest]
    if missing:
        raise ValueError(f"{name}: {key} lacks {' and '.join(missing)}.")
    for part, built in _YARN_BUILT_VALUES.items():
        if rest.get(part) is not None:
            _check_built(f"{key}.{part}", rest[part], built, name)
    unknown = sorted(rest.keys() - {*_YARN_FIELDS, *_YARN_BUILT_VALUES})
    if unknown:
        raise ValueError(
            f"{name}: {key} has unknown part(s) {', '.join(unknown)}; known are {', '.join(_YARN_FIELDS)}."
        )
    return RopeScaling(**{field: rest[field] for field in _YARN_FIELDS if field in rest})


def _refuse_unknown(unknown: list[str], name: str) -> None:
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise ValueError(f"{name}: unknown config key(s) {', '.join(sorted(unknown))}; known are {known}.")
