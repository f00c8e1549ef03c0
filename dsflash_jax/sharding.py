"""The steps on several devices: a mesh with axes for data, tensor and experts, and what is split along each.

- data: groups of sequences. Every group has caches of its own, with pages and slots numbered from 0, so a step never
  reaches into another group's arena.
- tensor: heads and vocabulary. The compiler places the products; the specifications here say where weights lie.
- expert: routed experts. Each device runs the rows that chose one of its experts; partial sums are added up.

The step functions are those of `steps.py`. Everything with a leading axis [D] below is split over "data".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsflash_jax import steps
from dsflash_jax.batch import check_accepted, check_cache, check_step, check_tail, check_verified_rows, rows_to_run
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.moe import EXPERT_AXIS
from dsflash_jax.types import StepInfo

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
_ROWS = PartitionSpec(TENSOR_AXIS)  # the output features of a weight [out, in]
_COLUMNS = PartitionSpec(None, TENSOR_AXIS)  # its input features: partial sums are added up
# Last parts of a parameter's path -> how it is split over "tensor": heads, output groups, index heads, vocabulary.
_TENSOR = {
    ("attn", "wq_b", "weight"): _ROWS,
    ("attn", "attn_sink"): _ROWS,
    ("attn", "wo_a", "weight"): _ROWS,
    ("attn", "wo_b", "weight"): _COLUMNS,
    ("indexer", "wq_b", "weight"): _ROWS,
    ("indexer", "weights_proj", "weight"): _ROWS,
    ("embed", "weight"): _ROWS,
    ("head", "weight"): _ROWS,
}


def make_mesh(data: int = 1, tensor: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of data x tensor x expert devices, the first ones of `devices` (all that JAX has without it).

    Raises ValueError for sizes below 1 and where there are not so many devices.
    """
    sizes = {DATA_AXIS: data, TENSOR_AXIS: tensor, EXPERT_AXIS: expert}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")
    available = list(jax.devices() if devices is None else devices)
    need = data * tensor * expert
    if need > len(available):
        raise ValueError(f"a mesh of {data} x {tensor} x {expert} needs {need} devices, there are {len(available)}.")
    return Mesh(
        np.array(available[:need]).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * 3
    )


def param_specs(params: steps.Params) -> Any:
    """A PartitionSpec per parameter, from its path alone: replicated unless it holds heads, vocabulary or experts."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _spec([str(getattr(k, "key", k)) for k in path]), params)


def _spec(path: list[str]) -> PartitionSpec:
    if path[0] == "freqs":
        return PartitionSpec()
    if "experts" in path:
        return PartitionSpec(EXPERT_AXIS)
    for end, spec in _TENSOR.items():
        if tuple(path[-len(end) :]) == end:
            return spec
    return PartitionSpec()


def check_mesh(cfg: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError where an axis does not divide what is split along it."""
    tensor, expert = mesh.shape[TENSOR_AXIS], mesh.shape[EXPERT_AXIS]
    parts = {name: tensor for name in ("num_attention_heads", "o_groups", "vocab_size")}
    parts |= {"index_n_heads": tensor} if cfg.index_source_layer_ids else {}
    for name, size in (*parts.items(), ("n_routed_experts", expert)):
        if getattr(cfg, name) % size:
            axis = EXPERT_AXIS if name == "n_routed_experts" else TENSOR_AXIS
            raise ValueError(f"{name}={getattr(cfg, name)} must be divisible by the mesh's {axis}={size}.")


def shard_params(params: steps.Params, cfg: ModelConfig, mesh: Mesh) -> steps.Params:
    """The parameters, each on its devices. Raises ValueError as `check_mesh`."""
    check_mesh(cfg, mesh)
    place = functools.partial(NamedSharding, mesh)
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, place(spec)), params, param_specs(params))


def empty_cache(cfg: ModelConfig, mesh: Mesh, num_pages: int, num_slots: int, *, decoder: str = "all") -> ModelCache:
    """Zeroed caches [D, ...] of one group each: `num_pages` pages and `num_slots` slots per group. Made in place."""
    shapes = ModelCache.abstract(cfg, num_pages, num_slots, decoder=decoder)
    groups, sharding = mesh.shape[DATA_AXIS], NamedSharding(mesh, PartitionSpec(DATA_AXIS))

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.numpy.zeros((groups, *leaf.shape), leaf.dtype, device=sharding)

    return jax.tree.map(zeros, shapes)


def stack_steps(parts: Sequence[StepInfo]) -> StepInfo:
    """One step per group as a step with leading axis [D]: NumPy, equal sizes. A group without work has an empty step.

    Raises ValueError for steps of different sizes.
    """
    shapes = [jax.tree.map(np.shape, part) for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("the steps of all groups must have the same rows, seqs and pages: pass these to make_step.")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


def prefill(
    params: steps.Params,
    cache: ModelCache,
    parts: Sequence[StepInfo],
    cfg: ModelConfig,
    mesh: Mesh,
    *,
    decoder: str = "all",
) -> tuple[jax.Array, ModelCache]:
    """`steps.prefill` of one step per group: (logits [D, S, V], cache [D, ...]). `decode` is the same call.

    Raises ValueError as that function does, and unless there is one step per group.
    """  # fmt: skip
    _check(cache, parts, cfg, mesh)
    if decoder == "all":
        return _compiled(cfg, mesh, "last", True)(params, cache, stack_steps(parts))
    check_tail(_group(cache), cfg, decoder)
    rows = max((rows_to_run(part, cfg, decoder) for part in parts), key=lambda counts: counts[:1])
    return _compiled(cfg, mesh, rows, True)(params, cache, stack_steps(parts))


def verify(
    params: steps.Params, cache: ModelCache, parts: Sequence[StepInfo], cfg: ModelConfig, mesh: Mesh
) -> tuple[jax.Array, ModelCache]:
    """`steps.verify` of one step per group: (logits [D, T, V], cache [D, ...])."""
    _check(cache, parts, cfg, mesh)
    for part in parts:
        check_verified_rows(part, cfg)
    return _compiled(cfg, mesh, "all", False)(params, cache, stack_steps(parts))


def commit(cache: ModelCache, parts: Sequence[StepInfo], accepted: np.ndarray) -> ModelCache:
    """`steps.commit` of one step per group, accepted [D, S]."""
    for part, counts in zip(parts, np.asarray(accepted), strict=True):
        check_accepted(part, counts)
    return _commit(cache, stack_steps(parts), np.asarray(accepted, np.int32))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _commit(cache: ModelCache, step: StepInfo, accepted: jax.Array) -> ModelCache:
    return jax.vmap(lambda c, s, a: steps.commit_lengths(c, s.slot, s.start + a))(cache, step, accepted)


def _group(cache: ModelCache) -> ModelCache:
    """Shapes of one group's caches."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), cache)


def _check(cache: ModelCache, parts: Sequence[StepInfo], cfg: ModelConfig, mesh: Mesh) -> None:
    groups = mesh.shape[DATA_AXIS]
    if len(parts) != groups:
        raise ValueError(f"there are {len(parts)} steps for the mesh's data={groups}: one per group.")
    check_cache(_group(cache), cfg)
    for part in parts:
        check_step(part, _group(cache))


@functools.lru_cache(maxsize=64)
def _compiled(cfg: ModelConfig, mesh: Mesh, run: str | tuple[int, ...], advance: bool):
    """The jitted step over a mesh. run: logits of `steps` ("last" or "all"), or rows per decoder layer."""

    def one(params: steps.Params, cache: ModelCache, step: StepInfo):
        cache, step = jax.tree.map(lambda leaf: leaf[0], (cache, step))
        out, cache = steps.run_step(params, cache, step, cfg, run, advance)
        return jax.tree.map(lambda leaf: leaf[None], (out, cache))

    def over_mesh(params: steps.Params, cache: ModelCache, step: StepInfo):
        # Manual along data and expert; along tensor the compiler follows the weights' placement.
        manual = jax.tree.map(_without_tensor, param_specs(params), is_leaf=lambda s: isinstance(s, PartitionSpec))
        data = PartitionSpec(DATA_AXIS)
        return jax.shard_map(
            one, mesh=mesh, in_specs=(manual, data, data), out_specs=data, axis_names={DATA_AXIS, EXPERT_AXIS},
            check_vma=False,
        )(params, cache, step)  # fmt: skip

    return jax.jit(over_mesh, donate_argnames=("cache",), compiler_options=steps.EXACT_ROUNDING)


def lower(params: Any, cache: Any, parts: Sequence[StepInfo], cfg: ModelConfig, mesh: Mesh) -> jax.stages.Lowered:
    """The step of `prefill` traced but not compiled: for reading its HLO."""
    return _compiled(cfg, mesh, "last", True).lower(params, cache, stack_steps(parts))


def _without_tensor(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if name == TENSOR_AXIS else name for name in spec))
