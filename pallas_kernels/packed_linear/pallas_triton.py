"""`packed_linear` by matrix instructions: a tile of the weight is decoded in registers and multiplied as bfloat16.

Inputs and weights are exact in bfloat16 with their scales multiplied in: four significant bits times a power of two.
So only the sums differ from the reference, which are added in another order. The inputs are rounded once, outside the
kernel, in one fused XLA operation; for 4-bit weights they come as even and odd planes, the two nibbles of a byte.
The decoded weight is the left operand, which matrix instructions may take from registers.
The weights of all experts lie row behind row in one array: an expert is a first row, and nothing is sliced out.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.codes import decode_e2m1, decode_e4m3, decode_e8m0
from pallas_kernels.common.formats import arena_reasons
from pallas_kernels.common.tiles import shared_memory_reasons
from pallas_kernels.packed_linear.config import LinearConfig
from pallas_kernels.packed_linear.weights import BLOCK, Kind, rounded


def unsupported(x: jax.Array, codes: jax.Array, kind: Kind, config: LinearConfig, interpret: bool) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    sides = {"rows": config.rows, "outputs": config.outputs}
    reasons = common.small_sides(interpret, **sides)
    *groups, rows, inputs = x.shape
    planes = jax.ShapeDtypeStruct((math.prod(groups) * rows, inputs), x.dtype)
    weights = jax.ShapeDtypeStruct((math.prod(codes.shape[:-1]), codes.shape[-1]), codes.dtype)
    sums = jax.ShapeDtypeStruct((config.splits * planes.shape[0], codes.shape[-2]), jnp.float32)
    for name, size in (("x", planes), ("codes", weights), ("the sums of all splits", sums)):
        reasons += arena_reasons(size, name)
    reasons += common.grid_reasons("tiles of rows", math.prod(groups) * pl.cdiv(rows, config.rows))
    tile = config.inputs * (2 * config.rows + config.outputs // (2 if kind == "fp4" else 1))
    # A decoded tile may pass through shared memory, too.
    needed = config.num_stages * tile + 2 * config.inputs * config.outputs
    what = f"rows={config.rows}, outputs={config.outputs}, inputs={config.inputs}, num_stages={config.num_stages}"
    return (*reasons, *shared_memory_reasons(what, needed))


@functools.partial(jax.jit, static_argnames=("kind", "config", "interpret"))
def packed_linear(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    *expert: jax.Array,
    kind: Kind,
    config: LinearConfig,
    interpret: bool,
) -> jax.Array:
    """As `api.packed_linear`; `expert` is given where x has groups."""
    *groups, rows, inputs = x.shape
    out, count = codes.shape[-2], math.prod(groups) * rows
    exact = rounded(x.reshape(count, inputs)).astype(jnp.bfloat16)
    planes = (exact,) if kind == "fp8" else (exact[:, 0::2], exact[:, 1::2])
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    kernel = functools.partial(
        _kernel, kind=kind, config=config, rows=rows, out=out, scale_rows=scale.shape[-2], grouped=bool(groups),
        steps=pl.cdiv(pl.cdiv(inputs, config.inputs), config.splits),
    )  # fmt: skip
    sums = common.call(
        kernel, *planes, flat(codes), flat(scale), *expert, config=config, interpret=interpret,
        name=f"packed_linear_{kind}{'_grouped' if groups else ''}",
        grid=(pl.cdiv(out, config.outputs), config.splits, math.prod(groups) * pl.cdiv(rows, config.rows)),
        out_shape=jax.ShapeDtypeStruct((config.splits * count, out), jnp.float32),
    )  # fmt: skip
    if config.splits > 1:
        sums = jnp.sum(sums.reshape(config.splits, count, out), axis=0)
    return sums.reshape(*groups, rows, out)


def _kernel(*refs, kind: Kind, config: LinearConfig, rows: int, out: int, scale_rows: int, grouped: bool, steps: int):
    """One tile [outputs, rows] of one group, summed over `steps` tiles of inputs; none of them without an expert."""
    *plane_refs, code_ref, scale_ref = refs[: 4 - (kind == "fp8")]
    out_ref, width, count = refs[-1], code_ref.shape[1], plane_refs[0].shape[0]
    output = config.outputs * pl.program_id(0) + jnp.arange(config.outputs, dtype=jnp.int32)
    split, (group, tile) = pl.program_id(1), divmod(pl.program_id(2), pl.cdiv(rows, config.rows))
    row = config.rows * tile + jnp.arange(config.rows, dtype=jnp.int32)
    chosen = refs[-2][group] if grouped else 0
    expert = jnp.maximum(chosen, 0)
    # Of lanes behind the end the last row is read and the product not stored.
    safe_output, safe_row = jnp.minimum(output, out - 1), group * rows + jnp.minimum(row, rows - 1)
    scale_row = expert * scale_rows + (safe_output if kind == "fp4" else safe_output // BLOCK)
    weight_row = expert * out + safe_output
    columns = config.inputs // len(plane_refs)  # bytes of codes, and values of a plane
    lane, in_scale = jnp.arange(columns, dtype=jnp.int32), jnp.arange(config.inputs // BLOCK, dtype=jnp.int32)

    def step(number: jax.Array, total: jax.Array) -> jax.Array:
        at = split * steps + number
        column, scale_column = at * columns + lane, at * in_scale.shape[0] + in_scale
        codes = _tile(code_ref, weight_row, column, width, 0)
        scales = _tile(scale_ref, scale_row, scale_column, scale_ref.shape[1], 0)
        scales = common.per_group(decode_e8m0(scales.astype(jnp.int32)), columns)
        for plane_ref, weight in zip(plane_refs, _decode(codes.astype(jnp.int32), kind), strict=True):
            inputs = _tile(plane_ref, safe_row, column, width, 0.0)
            total += common.dot((weight * scales).astype(jnp.bfloat16), inputs, transpose_b=True)
        return total

    # Not `where`: the kernel compiler takes its condition for the bound of the loop.
    rounds = steps * jnp.minimum(chosen + 1, 1) if grouped else steps
    total = lax.fori_loop(0, rounds, step, jnp.zeros((config.outputs, config.rows), jnp.float32))
    place = split * count + group * rows + row
    at = jnp.broadcast_to(place[None], total.shape), jnp.broadcast_to(output[:, None], total.shape)
    inside = (row < rows)[None] & (output < out)[:, None]
    common.scatter(out_ref, at, total, inside)


def _decode(codes: jax.Array, kind: Kind) -> tuple[jax.Array, ...]:
    """Unscaled values of each plane: of all columns, or of the even and the odd ones."""
    return (decode_e4m3(codes),) if kind == "fp8" else (decode_e2m1(codes & 15), decode_e2m1(codes >> 4))


def _tile(ref, row: jax.Array, column: jax.Array, width: int, other) -> jax.Array:
    """ref[row, column] as [rows, columns], `other` behind the last column."""
    shape = (row.shape[0], column.shape[0])
    inside = jnp.broadcast_to((column < width)[None], shape)
    at = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)
    return common.load_at(ref, at, inside, other)
