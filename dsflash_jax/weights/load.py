"""A checkpoint folder in the released layout -> configuration and parameters, one tensor in memory at a time."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from dsflash_jax.config import ModelConfig
from dsflash_jax.config_rules import QUANT_BLOCK
from dsflash_jax.modules.transformer import Transformer
from dsflash_jax.numerics.minifloat import E2M1, E4M3, ue8m0_decode
from dsflash_jax.ops.rope import table_buffers
from dsflash_jax.weights.names import (
    OTHER_ROLES,
    check_names,
    fill,
    listed,
    released_names,
    released_shapes,
    role_of,
    stored_dtype,
    walk,
)
from dsflash_jax.weights.shards import FLOATS, TensorInfo, open_checkpoint
from dsflash_jax.weights.variants import READ, refuse_variant

CONFIG_NAME = "config.json"
# Stored element type -> what is accepted in its place: raw bytes may have lost their name, floats may be of any width.
ACCEPTED = {"F8_E4M3": ("F8_E4M3", "U8"), "I8": ("I8", "U8"), "F8_E8M0": ("F8_E8M0", "U8")}


class Loaded(NamedTuple):
    """cfg: of the parameters, so without what was skipped. params: nested dict with RoPE tables under "freqs".

    skipped: role -> number of tensors that were left out as asked.
    """

    cfg: ModelConfig
    params: dict[str, Any]
    skipped: dict[str, int]


def load_checkpoint(
    folder: str | pathlib.Path, *, dequantise: bool = False, skip: Collection[str] = (), dtype: str | None = None
) -> Loaded:
    """Parameters from `folder`: config.json, and safetensors shards with their index.

    Packed weights stay packed. With `dequantise` they become float32 under a config without `quant_method` and
    `expert_dtype`; that model does not round the inputs of these products, so its logits differ.
    skip: "drafts", "engram" or "vision": tensors that are left out, and the parts of the config with them. Without it
    a tensor that the model has no place for is an error. dtype: compute dtype instead of the file's.

    Raises ValueError naming variant, tensor or file for another layout, a damaged one, and tensors that are missing,
    unexpected, of another shape or of another element type. OSError for files that cannot be read.
    """
    folder = pathlib.Path(folder)
    unknown = sorted(set(skip) - OTHER_ROLES.keys())
    if unknown:
        raise ValueError(f"skip={', '.join(unknown)} must be among {', '.join(OTHER_ROLES)}.")
    cfg, tensors = read_checkpoint(folder)
    cfg = without(cfg, skip)
    if dtype is not None:
        cfg = cfg.replace(dtype=dtype)
    kept = {name: info for name, info in tensors.items() if role_of(name) not in skip}
    abstract = abstract_params(cfg)
    _check(kept, abstract, cfg)
    if dequantise:
        cfg = cfg.replace(quant_method="", expert_dtype="")
        abstract = abstract_params(cfg)
    params = fill(abstract, _Copier(kept))
    params["freqs"] = table_buffers(cfg)
    return Loaded(cfg, params, _count_roles(tensors.keys() - kept.keys()))


def read_checkpoint(folder: pathlib.Path) -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """Config and tensor headers of a folder. Raises as `load_checkpoint` for other variants and damaged files."""
    raw = read_json(folder / CONFIG_NAME)
    refuse_variant(folder, raw, ())
    tensors = open_checkpoint(folder)
    refuse_variant(folder, raw, tensors)
    return ModelConfig.from_json(folder / CONFIG_NAME), tensors


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    """A JSON object. Raises ValueError for anything else, OSError without the file."""
    try:
        raw = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file ({error}).") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}: a config must be a JSON object, not {type(raw).__name__}.")
    return raw


def abstract_params(cfg: ModelConfig) -> dict[Any, Any]:
    """Shapes and dtypes of a model of `cfg`, nothing allocated."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(0)))))


def without(cfg: ModelConfig, skip: Collection[str]) -> ModelConfig:
    """`cfg` of a model that lacks the skipped roles."""
    if "drafts" in skip and cfg.num_nextn_predict_layers:
        cfg = cfg.without_drafts()
    if "engram" in skip and cfg.engram_layer_ids:
        cfg = cfg.replace(engram_layer_ids=(), engram_num_embeddings=())
    return cfg


def _count_roles(names: Iterable[str]) -> dict[str, int]:
    roles = [role_of(name) for name in names]
    return {role: roles.count(role) for role in OTHER_ROLES if role in roles}


def _check(tensors: Mapping[str, TensorInfo], abstract: Mapping[Any, Any], cfg: ModelConfig) -> None:
    """Names, shapes and element types of everything that will be read, before anything is allocated."""
    expected, given = released_shapes(abstract), {name: info.shape for name, info in tensors.items()}
    homeless = _count_roles(given.keys() - expected.keys())
    if homeless:
        role, count = next(iter(homeless.items()))
        names = listed(sorted(name for name in given.keys() - expected.keys() if role_of(name) == role))
        raise ValueError(
            f'{count:,} {role} tensor(s) have no place in this model: {names}; skip=("{role}",) leaves them out.'
        )
    _check_packing(expected, tensors)
    check_names(expected, given)
    leaves = dict(walk(abstract))
    for name, (path, _) in released_names(abstract).items():
        info, stored = tensors[name], stored_dtype(name, leaves[path].dtype, cfg)
        accepted = ACCEPTED.get(stored, tuple(FLOATS))
        if info.dtype not in accepted:
            rule = f"must be {' or '.join(accepted)}"
            raise ValueError(f"{name} in {info.file.name}: dtype {info.dtype} {rule}.")


def _check_packing(expected: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """A weight without its scale, and a scale that the config does not ask for, are named as such."""
    for name in expected:
        weight = name.removesuffix(".scale") + ".weight"
        if name.endswith(".scale") and name not in tensors and weight in tensors:
            file = tensors[weight].file.name
            raise ValueError(f"{weight} in {file} is packed, and its scale {name} is in no shard.")
    for name, info in tensors.items():
        weight = name.removesuffix(".scale") + ".weight"
        if name.endswith(".scale") and name not in expected and weight in expected:
            keys = "quant_method and expert_dtype of the config say that it is not packed"
            raise ValueError(f"{name} in {info.file.name} is the scale of a weight, but {keys}. {READ}.")


class _Copier:
    """Copies tensors by name into host arrays, chunk by chunk; a float target of a packed tensor gets its values."""

    def __init__(self, tensors: Mapping[str, TensorInfo]):
        self._tensors = tensors
        codes = np.arange(256, dtype=np.uint32)
        with jax.default_device(jax.devices("cpu")[0]):
            self._e4m3, self._e2m1 = np.asarray(E4M3.decode(codes)), np.asarray(E2M1.decode(codes[:16]))
            self._scales = np.asarray(ue8m0_decode(codes))

    def __call__(self, name: str, target: np.ndarray) -> None:
        info = self._tensors[name]
        scale = self._tensors.get(name.removesuffix("weight") + "scale")
        if target.dtype == np.uint8 or scale is None or not name.endswith(".weight"):
            if not info.shape:
                target[...] = info.rows()
                return
            for first, last in info.chunks():
                target[first:last] = info.rows(first, last)
            return
        square = scale.shape[0] != info.shape[0]  # one scale per 32 rows as well
        for first, last in info.chunks(QUANT_BLOCK):
            rows = slice(first, last)
            if square:
                scales = scale.rows(first // QUANT_BLOCK, -(-last // QUANT_BLOCK)).repeat(QUANT_BLOCK, axis=0)
            else:
                scales = scale.rows(first, last)
            np.multiply(
                self._values(info.rows(first, last), target.shape[-1]),
                self._scales[scales[: last - first]].repeat(QUANT_BLOCK, axis=-1),
                out=target[rows],
            )

    def _values(self, codes: np.ndarray, width: int) -> np.ndarray:
        if codes.shape[-1] == width:
            return self._e4m3[codes]
        return self._e2m1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], width)]
