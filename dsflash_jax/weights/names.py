"""The map between released tensor names and the parameter tree.

A parameter's path joined by dots is its released name. The one exception are the routed experts, which the release
keeps one tensor each (`experts.3.w1.weight`) and the tree stacks on a leading axis (`experts.w1.weight`[3]).
Linear weights are [out, in] on both sides. RoPE tables (`freqs`) are derived, not part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Place(NamedTuple):
    """Where a released tensor lies in the tree: path, and the index on the expert axis (None = the whole array)."""

    path: tuple[str | int, ...]
    expert: int | None


def walk(params: Mapping[Any, Any], path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, array) for every leaf of a nested parameter dict, without the RoPE tables."""
    for key, value in params.items():
        if path == () and key == "freqs":
            continue
        if isinstance(value, Mapping):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key), value


def released_names(params: Mapping[Any, Any]) -> dict[str, Place]:
    """Released name -> place, for every parameter of the tree (abstract or real)."""
    names = {}
    for path, value in walk(params):
        if "experts" in path:
            at = path.index("experts") + 1
            for e in range(value.shape[0]):
                names[".".join(map(str, (*path[:at], e, *path[at:])))] = Place(path, e)
        else:
            names[".".join(map(str, path))] = Place(path, None)
    return names


def from_released(tensors: Mapping[str, np.ndarray], abstract: Mapping[Any, Any]) -> dict[Any, Any]:
    """A parameter tree shaped like `abstract` (its RoPE tables are left out) from released tensors.

    Raises ValueError naming every missing, unexpected or wrongly shaped tensor.
    """
    names = released_names(abstract)
    missing, extra = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or extra:
        listed = [", ".join(group) or "none" for group in (missing, extra)]
        raise ValueError(f"missing tensor(s): {listed[0]}; unexpected: {listed[1]}.")
    leaves = dict(walk(abstract))
    stacked = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    for name, (path, index) in names.items():
        target = stacked[path] if index is None else stacked[path][index]
        if tensors[name].shape != target.shape:
            raise ValueError(f"{name}: shape {tensors[name].shape} must be {target.shape}.")
        target[...] = tensors[name]
    tree: dict[Any, Any] = {}
    for path, value in stacked.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jax.numpy.asarray(value)
    return tree


def to_released(params: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """Released name -> array, the inverse of `from_released`."""
    leaves = {path: np.asarray(leaf) for path, leaf in walk(params)}
    return {name: leaves[path] if e is None else leaves[path][e] for name, (path, e) in released_names(params).items()}
