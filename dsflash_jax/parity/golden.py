"""Reading golden files: `CASE.MODE.npz` traces, `CASE.weights.npz`, `units_*.npz`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.ngram_hash import NgramHash
from dsflash_jax.weights.names import from_released

TEXT = -1  # in `token_types`; all other kinds are parts of an image
MODES = ("f32", "f32_raw", "bf16", "bf16_raw")


@dataclasses.dataclass(frozen=True)
class Trace:
    """One recorded run and the model it was recorded from."""

    name: str
    mode: str
    cfg: ModelConfig
    params: steps.Params
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    ngram_hash: NgramHash | None = None  # with the file's token map, all else is ours
    engram: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # the file's own hash constants

    @property
    def batch(self) -> int:
        """Sequences B."""
        return self.arrays["input_ids"].shape[0]

    @property
    def alive(self) -> np.ndarray:
        """bool[B, T + N]: tokens that n-grams read, all but image positions."""
        types, ids = self.arrays.get("token_types"), self.arrays["input_ids"]
        alive = np.ones(ids.shape, bool)
        if types is not None:
            alive[:, : types.shape[1]] = types == TEXT
        return alive

    @property
    def prompt(self) -> int:
        """Prompt tokens T."""
        return self.meta["T"]

    @property
    def starts_behind_prompt(self) -> bool:
        """Whether only the decode steps can be replayed: part by part, and of the prompt the last rows are recorded."""
        return self.mode.startswith("bf16") and 0 < (self.meta.get("keep_last") or 0) < self.prompt

    @property
    def decoded(self) -> int:
        """Single-token decode steps N."""
        return self.meta["ndec"]


def unbuilt_parts(reference: dict[str, Any]) -> list[str]:
    """Parts of a recorded model that this package does not build yet, in words."""
    parts = []
    if reference.get("vision_n_layers"):
        parts.append("vision tower")
    return parts


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Raises ValueError for another kind of file, else what NumPy and zipfile raise."""
    with open(path, "rb") as file:  # NumPy leaves a damaged file open
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError(f"{path.name}: not an .npz archive.")
        return dict(loaded)


def load_trace(path: pathlib.Path) -> Trace | list[str]:
    """The trace at `path`, or the list of its unbuilt parts. Raises ValueError for a folder without its weights."""
    case, mode = path.name.removesuffix(".npz").split(".")
    arrays = read_arrays(path)
    meta = json.loads(str(arrays.pop("meta_json")))
    reference = json.loads(str(arrays.pop("config_json")))
    unbuilt = unbuilt_parts(reference)
    if unbuilt:
        return unbuilt
    dtype = "bfloat16" if mode.startswith("bf16") else "float32"
    cfg = ModelConfig.from_json(reference).replace(
        dtype=dtype, score_dtype=dtype, stale_index_keys=not meta["own_index_keys"]
    )
    weights_path = path.parent / meta["weights"]
    if not weights_path.exists():
        raise ValueError(f"{path.name}: its weights {meta['weights']} are not in {path.parent}.")
    weights = read_arrays(weights_path)
    tensors = {k.removeprefix("w/"): v for k, v in weights.items() if k.startswith("w/")}
    params = from_released(tensors, steps.abstract_params(cfg))
    params["freqs"] = {
        table: {part: weights[f"freqs/{table}/{part}"] for part in ("cos", "sin")} for table in ("swa", "compressed")
    }
    engram = {k.removeprefix("engram/"): v for k, v in weights.items() if k.startswith("engram/")}
    ngram_hash = NgramHash.of(cfg, engram.get("token_map")) if cfg.engram_layer_ids else None
    return Trace(case, mode, cfg, params, arrays, meta, ngram_hash, engram)
