"""The steps on several devices: a mesh with axes for data, tensor and experts, and what is split along each.

- data: groups of sequences. Every group has caches of its own, with pages and slots numbered from 0, so a step never
  reaches into another group's arena.
- tensor: heads, vocabulary, and the width of n-gram tables. The compiler places the products; the specifications here
  say where weights lie.
- expert: routed experts, those of draft layers too. Each device runs the rows that chose one of its experts; partial
  sums are added up.

The step functions are those of `steps.py`. Everything with a leading axis [D] below is split over "data".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsflash_jax import steps
from dsflash_jax.batch import (
    check_accepted,
    check_cache,
    check_few_rows,
    check_ngrams,
    check_step,
    check_tail,
    rows_to_run,
)
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.config_rules import QUANT_BLOCK
from dsflash_jax.draft_step import check_draft, run_draft
from dsflash_jax.modules.dspark import DraftOutput
from dsflash_jax.modules.moe import EXPERT_AXIS
from dsflash_jax.speculative import Settings
from dsflash_jax.types import DraftStep, StepInfo

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
_ROWS = PartitionSpec(TENSOR_AXIS)  # the output features of a weight [out, in]
_COLUMNS = PartitionSpec(None, TENSOR_AXIS)  # its input features: partial sums are added up
# Last parts of a parameter's path, without "weight" and "scale" -> how it is split over "tensor": heads, output groups,
# index heads, vocabulary. The first that fits counts. An n-gram table has no number of rows that a mesh divides.
_TENSOR = {
    ("attn", "wq_b"): _ROWS,
    ("attn", "attn_sink"): _ROWS,
    ("attn", "wo_a"): _ROWS,
    ("attn", "wo_b"): _COLUMNS,
    ("indexer", "wq_b"): _ROWS,
    ("indexer", "weights_proj"): _ROWS,
    ("engram", "embed"): _COLUMNS,
    ("embed",): _ROWS,
    ("head",): _ROWS,
}
# Blocks of inputs of a packed product are added in order, so each of its outputs stays on one device.
_PACKED = {("attn", "wo_b"): _ROWS}


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
    """A PartitionSpec per parameter: replicated unless it holds heads, vocabulary, n-gram tables or experts.

    Codes and scales of a packed weight lie alike: a scale is on the device of its tile.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _spec([str(getattr(k, "key", k)) for k in path], leaf), params
    )


def _spec(path: list[str], leaf: Any) -> PartitionSpec:
    if path[0] == "freqs":
        return PartitionSpec()
    if "experts" in path:
        return PartitionSpec(EXPERT_AXIS)
    holder = path[:-1] if path[-1] in ("weight", "scale") else path
    rules = _TENSOR | _PACKED if leaf.dtype == np.uint8 else _TENSOR
    return next((spec for end, spec in rules.items() if tuple(holder[-len(end) :]) == end), PartitionSpec())


def check_mesh(cfg: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError where an axis does not divide what is split along it."""
    indexes = ("index_n_heads",) if cfg.index_source_layer_ids else ()
    drafts = ("dspark_n_routed_experts",) if cfg.num_nextn_predict_layers else ()
    axes = dict.fromkeys(("num_attention_heads", "o_groups", "vocab_size", *indexes), TENSOR_AXIS)
    axes |= dict.fromkeys(("n_routed_experts", *drafts), EXPERT_AXIS)
    for name, axis in axes.items():
        if getattr(cfg, name) % mesh.shape[axis]:
            raise ValueError(f"{name}={getattr(cfg, name)} must be divisible by the mesh's {axis}={mesh.shape[axis]}.")
    tiled = {"engram_head_dim": cfg.engram_head_dim if cfg.engram_layer_ids else 0}
    if cfg.quant_method:
        tiled["hidden_size"] = cfg.hidden_size
        tiled["num_attention_heads * head_dim"] = cfg.num_attention_heads * cfg.head_dim
        tiled["index_n_heads * index_head_dim"] = cfg.index_n_heads * cfg.index_head_dim if indexes else 0
    for name, width in tiled.items():
        if width % (QUANT_BLOCK * mesh.shape[TENSOR_AXIS]):
            rule = f"must be divisible by the mesh's {TENSOR_AXIS}={mesh.shape[TENSOR_AXIS]} into multiples"
            raise ValueError(f"{name}={width} {rule} of {QUANT_BLOCK}, which share a scale.")


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


def stack_steps(parts: Sequence[Any]) -> Any:
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
    _check(params, cache, parts, cfg, mesh)
    if decoder == "all":
        return _compiled(cfg, mesh, "last", True)(params, cache, stack_steps(parts))
    check_tail(_group(cache), cfg, decoder)
    rows = max((rows_to_run(part, cfg, decoder) for part in parts), key=lambda counts: counts[:1])
    return _compiled(cfg, mesh, rows, True)(params, cache, stack_steps(parts))


def verify(
    params: steps.Params, cache: ModelCache, parts: Sequence[StepInfo], cfg: ModelConfig, mesh: Mesh
) -> tuple[jax.Array, ModelCache]:
    """`steps.verify` of one step per group: (logits [D, T, V], cache [D, ...])."""
    _check(params, cache, parts, cfg, mesh)
    for part in parts:
        check_few_rows(part, cfg)
    return _compiled(cfg, mesh, "all", False)(params, cache, stack_steps(parts))


def commit(cache: ModelCache, parts: Sequence[StepInfo], accepted: np.ndarray) -> ModelCache:
    """`steps.commit` of one step per group, accepted [D, S]."""
    for part, counts in zip(parts, np.asarray(accepted), strict=True):
        check_accepted(part, counts)
    return _commit(cache, stack_steps(parts), np.asarray(accepted, np.int32))


def draft(
    params: steps.Params,
    cache: ModelCache,
    parts: Sequence[DraftStep],
    cfg: ModelConfig,
    mesh: Mesh,
    settings: Sequence[Settings],
) -> DraftOutput:
    """`draft_step.draft` of one draft step and its settings per group: tokens, logits, confidences [D, S, block]."""
    _check_groups(parts, cfg, mesh)
    for part in parts:
        check_draft(_group(cache), part, cfg)
    return _compiled_draft(cfg, mesh)(params, cache, stack_steps(parts), stack_steps(settings))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _commit(cache: ModelCache, step: StepInfo, accepted: jax.Array) -> ModelCache:
    return jax.vmap(lambda c, s, a: steps.commit_lengths(c, s.slot, s.start + a))(cache, step, accepted)


def _group(cache: ModelCache) -> ModelCache:
    """Shapes of one group's caches."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), cache)


def _check_groups(parts: Sequence[Any], cfg: ModelConfig, mesh: Mesh) -> None:
    groups = mesh.shape[DATA_AXIS]
    if len(parts) != groups:
        raise ValueError(f"there are {len(parts)} steps for the mesh's data={groups}: one per group.")
    if cfg.implementation not in ("", "xla"):
        raise ValueError(
            f"implementation={cfg.implementation!r} must be empty or xla on a mesh: kernels are not split."
        )


def _check(params: steps.Params, cache: ModelCache, parts: Sequence[StepInfo], cfg: ModelConfig, mesh: Mesh) -> None:
    _check_groups(parts, cfg, mesh)
    check_cache(_group(cache), cfg)
    for part in parts:
        check_step(part, _group(cache))
        check_ngrams(part, params, cfg)


@functools.lru_cache(maxsize=64)
def _compiled(cfg: ModelConfig, mesh: Mesh, run: str | tuple[int, ...], advance: bool):
    """The jitted step over a mesh. run: logits of `steps` ("last" or "all"), or rows per decoder layer."""

    cfg = _unpartitioned(cfg)

    def one(params: steps.Params, cache: ModelCache, step: StepInfo):
        return steps.run_step(params, cache, step, cfg, run, advance)

    return jax.jit(_per_group(one, mesh), donate_argnums=1, compiler_options=steps.EXACT_ROUNDING)


@functools.lru_cache(maxsize=16)
def _compiled_draft(cfg: ModelConfig, mesh: Mesh):
    cfg = _unpartitioned(cfg)

    def one(params: steps.Params, cache: ModelCache, step: DraftStep, settings: Settings) -> DraftOutput:
        return run_draft(params, cache, step, cfg, settings)

    return jax.jit(_per_group(one, mesh), compiler_options=steps.EXACT_ROUNDING)


def _unpartitioned(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the ops' XLA forms: the compiler can split those along heads, but not a kernel."""
    return cfg.replace(implementation="xla", interpret=False)


def _per_group(one: Callable, mesh: Mesh) -> Callable:
    """`one(params, *group's arrays)` as a function of arrays [D, ...]: what it returns gets that axis, too."""

    def group(params: steps.Params, *arrays: Any) -> Any:
        out = one(params, *jax.tree.map(lambda leaf: leaf[0], arrays))
        return jax.tree.map(lambda leaf: leaf[None], out)

    def over_mesh(params: steps.Params, *arrays: Any) -> Any:
        # Manual along data and expert; along tensor the compiler follows the weights' placement.
        manual = jax.tree.map(_without_tensor, param_specs(params), is_leaf=lambda s: isinstance(s, PartitionSpec))
        data = PartitionSpec(DATA_AXIS)
        return jax.shard_map(
            group, mesh=mesh, in_specs=(manual, *(data for _ in arrays)), out_specs=data,
            axis_names={DATA_AXIS, EXPERT_AXIS}, check_vma=False,
        )(params, *arrays)  # fmt: skip

    return over_mesh


def lower(
    step: str,
    params: Any,
    cache: Any,
    parts: Sequence[Any],
    cfg: ModelConfig,
    mesh: Mesh,
    settings: Sequence[Settings] = (),
) -> jax.stages.Lowered:
    """A step traced but not compiled: for reading its HLO. step: "prefill" (`decode` is the same), "verify" or "draft",
    which takes draft steps and settings."""
    if step == "draft":
        return _compiled_draft(cfg, mesh).lower(params, cache, stack_steps(parts), stack_steps(settings))
    if step not in ("prefill", "verify"):
        raise ValueError(f"step={step!r} must be one of prefill, verify, draft.")
    run, advance = ("last", True) if step == "prefill" else ("all", False)
    return _compiled(cfg, mesh, run, advance).lower(params, cache, stack_steps(parts))


def _without_tensor(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if name == TENSOR_AXIS else name for name in spec))
