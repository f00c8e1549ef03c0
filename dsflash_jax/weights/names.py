"""The map between released tensor names and the parameter tree, and the element types that the release stores.

A parameter's path joined by dots is its released name. The one exception are the routed experts, which the release
keeps one tensor each (`experts.3.w1.weight`) and the tree stacks on a leading axis (`experts.w1.weight`[3]), with
their scales. Linear weights are [out, in] on both sides. RoPE tables (`freqs`) are derived, not part of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dsflash_jax.config import ModelConfig

Path = tuple[str | int, ...]
# Buffers of this alignment become device arrays of the CPU backend without a copy.
_ALIGNMENT = 64
_MOST_LISTED = 8  # names in one sentence: a released checkpoint has 94 thousand
# What a role of tensors that is not the text backbone's is called, and how its names are told.
OTHER_ROLES: dict[str, Callable[[str], bool]] = {
    "drafts": lambda name: name.startswith("mtp."),
    "engram": lambda name: ".engram." in name,
    "vision": lambda name: name.startswith(("vision.", "aligner.", "image_")) or name.endswith(".gate.bias_vl"),
}
# Stored in float32 in the release, whatever the rest is stored in (reference; golden weights name each one's type).
_FLOAT32_ENDS = (
    "attn_sink", "gate.bias", "gate.bias_vl", "markov_head.head.weight", "confidence_head.proj.weight", "token_shift",
)  # fmt: skip


class Place(NamedTuple):
    """Where a released tensor lies in the tree: path, and the index on the expert axis (None = the whole array)."""

    path: Path
    expert: int | None


def walk(params: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, array) for every leaf of a nested parameter dict, without the RoPE tables."""
    for key, value in params.items():
        if path == () and key == "freqs":
            continue
        if isinstance(value, Mapping):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key), value


def names_of(path: Path, shape: tuple[int, ...]) -> Iterator[tuple[str, int | None]]:
    """(released name, expert) of the tensors that one leaf of that shape holds."""
    if "experts" not in path:
        yield ".".join(map(str, path)), None
        return
    at = path.index("experts") + 1
    for e in range(shape[0]):
        yield ".".join(map(str, (*path[:at], e, *path[at:]))), e


def released_names(params: Mapping[Any, Any]) -> dict[str, Place]:
    """Released name -> place, for every parameter of the tree (abstract or real)."""
    return {name: Place(path, e) for path, leaf in walk(params) for name, e in names_of(path, leaf.shape)}


def released_shapes(params: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Released name -> shape, for every parameter of the tree (abstract or real)."""
    return {
        name: leaf.shape if e is None else leaf.shape[1:]
        for path, leaf in walk(params)
        for name, e in names_of(path, leaf.shape)
    }


def role_of(name: str) -> str:
    """ "drafts", "engram" or "vision", else "backbone"."""
    return next((role for role, is_it in OTHER_ROLES.items() if is_it(name)), "backbone")


def stored_dtype(name: str, leaf_dtype: Any, cfg: ModelConfig) -> str:
    """The safetensors name of the element type in which the release stores the tensor.

    `leaf_dtype`: the parameter's; uint8 means packed. Routed experts in FP4 are I8, two codes per byte.
    """
    if np.dtype(leaf_dtype) == np.uint8:
        if name.endswith(".scale"):
            return "F8_E8M0"
        return "I8" if ".experts." in name and cfg.expert_dtype else "F8_E4M3"
    parts = name.split(".")
    if name == "head.weight" or name.endswith(_FLOAT32_ENDS) or parts[-1].startswith("hc_"):
        return "F32"
    if "compressor" in parts and parts[-2] in ("wkv", "wgate") and cfg.layer_ratios[int(parts[1])] > 1:
        return "F32"
    return "BF16"


def fill(abstract: Mapping[Any, Any], copy: Callable[[str, np.ndarray], None]) -> dict[Any, Any]:
    """A parameter tree shaped like `abstract` (without RoPE tables), one leaf at a time.

    `copy(name, target)` writes the tensor of a released name into a host array. No leaf is ever in memory twice where
    the device is the CPU.
    """
    tree: dict[Any, Any] = {}
    for path, leaf in walk(abstract):
        host = _aligned(leaf.shape, leaf.dtype)
        for name, e in names_of(path, leaf.shape):
            copy(name, host if e is None else host[e : e + 1].reshape(leaf.shape[1:]))
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jax.device_put(host)
    return tree


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array whose first byte lies where the CPU backend needs it to take it over."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def check_names(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError naming missing and unexpected tensors, or the first of another shape."""
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"missing tensor(s): {listed(missing)}; unexpected: {listed(extra)}.")
    for name, shape in expected.items():
        if tuple(given[name]) != tuple(shape):
            raise ValueError(f"{name}: shape {tuple(given[name])} must be {tuple(shape)}.")


def listed(names: Collection[str]) -> str:
    """The first of the names and the number of the rest; "none" without any."""
    shown = ", ".join(list(names)[:_MOST_LISTED]) or "none"
    return shown if len(names) <= _MOST_LISTED else f"{shown} and {len(names) - _MOST_LISTED:,} more"


def from_released(tensors: Mapping[str, np.ndarray], abstract: Mapping[Any, Any]) -> dict[Any, Any]:
    """A parameter tree shaped like `abstract` (its RoPE tables are left out) from released tensors in memory.

    Raises ValueError naming missing, unexpected or wrongly shaped tensors.
    """
    check_names(released_shapes(abstract), {name: tensor.shape for name, tensor in tensors.items()})

    def copy(name: str, target: np.ndarray) -> None:
        target[...] = tensors[name]

    return fill(abstract, copy)


def to_released(params: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """Released name -> array, the inverse of `from_released`."""
    leaves = {path: np.asarray(leaf) for path, leaf in walk(params)}
    return {name: leaves[path] if e is None else leaves[path][e] for name, (path, e) in released_names(params).items()}
