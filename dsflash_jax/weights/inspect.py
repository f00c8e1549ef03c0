"""What a checkpoint folder holds, or what a configuration asks for: data for `dsflash inspect`, from headers alone."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from dsflash_jax.config import ModelConfig
from dsflash_jax.weights.load import read_checkpoint
from dsflash_jax.weights.names import role_of
from dsflash_jax.weights.shapes import MAYBE_PACKED, expected_shapes, parameter_counts
from dsflash_jax.weights.shards import TensorInfo


def inspect(path: str | pathlib.Path) -> dict[str, Any]:
    """A report on a checkpoint folder or a configuration file; no tensor is read, nothing is allocated.

    Both: parameters (see `shapes.parameter_counts`) and its rows by part. A folder also: rows of tensors and bytes by
    role, by element type and by file, the names that are missing, unexpected or of another shape, and `complete`,
    which is whether there are none. Vision tensors are neither: the config of the text backbone says nothing of them.

    Raises ValueError for a damaged folder or another variant, OSError for what cannot be read.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        return _counted(ModelConfig.from_json(path))
    cfg, tensors = read_checkpoint(path)
    expected = expected_shapes(cfg)
    told = {name: info for name, info in tensors.items() if role_of(name) != "vision"}
    odd = {
        "missing": sorted(expected.keys() - told.keys()),
        "unexpected": sorted(n for n in told.keys() - expected.keys() if not n.endswith(MAYBE_PACKED)),
        "other_shape": sorted(n for n in told.keys() & expected.keys() if told[n].shape != tuple(expected[n])),
    }
    return {
        "complete": not any(odd.values()),
        "bytes": sum(info.nbytes for info in tensors.values()),
        **_counted(cfg),
        "roles": _rows("role", ((role_of(name), info) for name, info in tensors.items())),
        "element_types": _rows("dtype", ((info.dtype, info) for info in tensors.values())),
        "files": _rows("file", ((info.file.name, info) for info in tensors.values())),
        **odd,
    }


def _counted(cfg: ModelConfig) -> Mapping[str, Any]:
    return {"parameters": parameter_counts(cfg)}


def _rows(key: str, tensors: Iterable[tuple[str, TensorInfo]]) -> list[dict[str, Any]]:
    """One row per value of `key`, in alphabetical order: tensors and bytes."""
    rows: dict[str, dict[str, Any]] = {}
    for value, info in tensors:
        row = rows.setdefault(value, {key: value, "tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += info.nbytes
    return [rows[value] for value in sorted(rows)]
