"""Parameters -> a checkpoint folder in the released layout: config.json, safetensors shards, index."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dsflash_jax.config import ModelConfig
from dsflash_jax.weights.load import CONFIG_NAME, abstract_params
from dsflash_jax.weights.names import check_names, released_names, released_shapes, stored_dtype, walk
from dsflash_jax.weights.shards import CHUNK_BYTES, DTYPE_BYTES, FLOATS, INDEX_NAME

STORED = ("released", "float32")
SHARD_BYTES = 5 * 10**9  # at most per file, as usual on model hubs; one tensor may exceed it
_ORDER = {dtype: place for place, dtype in enumerate(DTYPE_BYTES)}


class _Piece(NamedTuple):
    """One tensor to write: name, element type, shape, the array or device array that holds it, index on its experts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaf: Any
    expert: int | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes, in pieces. Raises ValueError where a value would have to be rounded."""
        whole = np.asarray(self.leaf)  # no copy on the CPU; elsewhere JAX keeps the one that it makes
        values = (whole if self.expert is None else whole[self.expert]).reshape(-1)
        for first in range(0, len(values), CHUNK_BYTES):
            part = values[first : first + CHUNK_BYTES]
            if self.dtype not in FLOATS:
                yield part.tobytes()
                continue
            stored = part.astype(FLOATS[self.dtype])
            if not np.array_equal(stored.astype(part.dtype), part, equal_nan=True):
                rule = 'as the release does; dtype="float32" keeps it'
                raise ValueError(f"{self.name} has values that {self.dtype} cannot hold, {rule}.")
            yield stored.tobytes()


def export_checkpoint(
    params: Mapping[Any, Any],
    cfg: ModelConfig,
    folder: str | pathlib.Path,
    *,
    dtype: str = "released",
    shard_bytes: int = SHARD_BYTES,
    places: Mapping[str, str] | None = None,
) -> pathlib.Path:
    """Writes parameters of `cfg` to a new `folder`, which appears only when it is complete.

    dtype: "released" stores each tensor in the release's element type and refuses values that it cannot hold;
    "float32" stores all that is not packed in float32. shard_bytes: the size from which a new shard begins.
    places: tensor name -> shard file, to write the same shards as another checkpoint's `weight_map` instead.

    Returns the folder. Raises ValueError naming what does not fit, also if `folder` exists and is not empty.
    """
    folder = pathlib.Path(folder)
    if dtype not in STORED:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(STORED)}.")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be at least 1.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: a checkpoint is never overwritten.")
    shards = _shards(_pieces(params, cfg, dtype), shard_bytes, places)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        for file, pieces in shards.items():
            _write_shard(partial / file, pieces)
        total = sum(piece.nbytes for pieces in shards.values() for piece in pieces)
        index = {"metadata": {"total_size": total}}
        index["weight_map"] = {piece.name: file for file, pieces in shards.items() for piece in pieces}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (partial / CONFIG_NAME).write_text(json.dumps(config_json(cfg), indent=2, sort_keys=True) + "\n")
        os.chmod(partial, 0o755)  # a temporary folder is the owner's alone
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def config_json(cfg: ModelConfig) -> dict[str, Any]:
    """`cfg` as the config.json of a checkpoint: every field, and packed weights as `quantization_config`."""
    fields = cfg.to_dict()
    quantised = {key: fields.pop(key) for key in ("quant_method", "expert_dtype")}
    fields["model_type"] = "deepseek_v41"
    if any(quantised.values()):
        fields["quantization_config"] = {key: value for key, value in quantised.items() if value}
        fields["quantization_config"] |= {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    return fields


def _pieces(params: Mapping[Any, Any], cfg: ModelConfig, dtype: str) -> list[_Piece]:
    abstract = abstract_params(cfg)
    check_names(released_shapes(abstract), released_shapes(params))
    leaves, wanted = dict(walk(params)), dict(walk(abstract))
    pieces = []
    for name, (path, expert) in released_names(params).items():
        leaf = leaves[path]
        if (leaf.dtype == np.uint8) != (wanted[path].dtype == np.uint8):
            raise ValueError(f"{name}: {leaf.dtype} parameters do not fit quant_method and expert_dtype of the config.")
        stored = stored_dtype(name, leaf.dtype, cfg)
        if dtype == "float32" and stored in FLOATS:
            stored = "F32"
        pieces.append(_Piece(name, stored, leaf.shape if expert is None else leaf.shape[1:], leaf, expert))
    return pieces


def _shards(pieces: list[_Piece], shard_bytes: int, places: Mapping[str, str] | None) -> dict[str, list[_Piece]]:
    """File name -> its tensors, in the order in which they are written."""
    if places is not None:
        names = {piece.name for piece in pieces}
        if names != places.keys():
            odd = ", ".join(sorted(names ^ places.keys())[:8])
            raise ValueError(f"places must name the tensors of the parameters, differs in {odd}.")
        shards: dict[str, list[_Piece]] = {file: [] for file in sorted(set(places.values()))}
        for piece in pieces:
            shards[places[piece.name]].append(piece)
    else:
        groups: list[list[_Piece]] = [[]]
        size = 0
        for piece in pieces:
            if groups[-1] and size + piece.nbytes > shard_bytes:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += piece.nbytes
        shards = {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}
    # Wide elements first, then by name: the order of the format's own library, so that its files come back as they are.
    return {file: sorted(group, key=lambda p: (-_ORDER[p.dtype], p.name)) for file, group in shards.items()}


def _write_shard(file: pathlib.Path, pieces: list[_Piece]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for piece in pieces:
        offsets = [start, start + piece.nbytes]
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
        start += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            for chunk in piece.chunks():
                stream.write(chunk)
