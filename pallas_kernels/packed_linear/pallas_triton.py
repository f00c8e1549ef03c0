"""`packed_linear` by matrix instructions: a tile of the weight is decoded in registers and multiplied as bfloat16.

Inputs and weights are exact in bfloat16 with their scales multiplied in: four significant bits times a power of two.
So only the sums differ from the reference, which are added in another order. The inputs are rounded once, outside the
kernel, in one fused XLA operation; for 4-bit weights they come as even and odd planes, the two nibbles of a byte.
The decoded weight is the left operand, which matrix instructions may take from registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.codes import decode_e2m1, decode_e4m3, decode_e8m0
from pallas_kernels.common.formats import arena_reasons
from pallas_kernels.common.tiles import shared_memory_reasons
from pallas_kernels.packed_linear.config import LinearConfig
from pallas_kernels.packed_linear.weights import BLOCK, Kind, in_width, rounded


def unsupported(x: jax.Array, codes: jax.Array, kind: Kind, config: LinearConfig, interpret: bool) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    sides = {"rows": config.rows, "outputs": config.outputs}
    reasons = common.small_sides(interpret, **sides)
    for name, size in (("x", x), ("codes", codes)):
        reasons += arena_reasons(size, name)
    sums = jax.ShapeDtypeStruct((config.splits * x.shape[0], codes.shape[0]), jnp.float32)
    reasons += arena_reasons(sums, "the sums of all splits")
    tile = config.inputs * (2 * config.rows + config.outputs // (2 if kind == "fp4" else 1))
    # A decoded tile may pass through shared memory, too.
    needed = config.num_stages * tile + 2 * config.inputs * config.outputs
    what = f"rows={config.rows}, outputs={config.outputs}, inputs={config.inputs}, num_stages={config.num_stages}"
    return (*reasons, *shared_memory_reasons(what, needed))


@functools.partial(jax.jit, static_argnames=("kind", "config", "interpret"))
def packed_linear(
    x: jax.Array, codes: jax.Array, scale: jax.Array, *, kind: Kind, config: LinearConfig, interpret: bool
) -> jax.Array:
    """As `api.packed_linear`."""
    rows, out, inputs = x.shape[0], codes.shape[0], in_width(codes, kind)
    exact = rounded(x).astype(jnp.bfloat16)
    planes = (exact,) if kind == "fp8" else (exact[:, 0::2], exact[:, 1::2])
    steps = pl.cdiv(pl.cdiv(inputs, config.inputs), config.splits)
    kernel = functools.partial(_kernel, kind=kind, config=config, steps=steps)
    sums = common.call(
        kernel, *planes, codes, scale, name=f"packed_linear_{kind}", config=config, interpret=interpret,
        grid=(pl.cdiv(out, config.outputs), config.splits, pl.cdiv(rows, config.rows)),
        out_shape=jax.ShapeDtypeStruct((config.splits * rows, out), jnp.float32),
    )  # fmt: skip
    return sums if config.splits == 1 else jnp.sum(sums.reshape(config.splits, rows, out), axis=0)


def _kernel(*refs, kind: Kind, config: LinearConfig, steps: int):
    """One tile [outputs, rows] summed over `steps` tiles of inputs."""
    *plane_refs, code_ref, scale_ref, out_ref = refs
    (out, width), rows = code_ref.shape, plane_refs[0].shape[0]
    output = config.outputs * pl.program_id(0) + jnp.arange(config.outputs, dtype=jnp.int32)
    split = pl.program_id(1)
    row = config.rows * pl.program_id(2) + jnp.arange(config.rows, dtype=jnp.int32)
    # Of lanes behind the end the last row is read and the product not stored.
    safe_output, safe_row = jnp.minimum(output, out - 1), jnp.minimum(row, rows - 1)
    scale_row = safe_output if kind == "fp4" else safe_output // BLOCK
    columns = config.inputs // len(plane_refs)  # bytes of codes, and values of a plane
    lane, group = jnp.arange(columns, dtype=jnp.int32), jnp.arange(config.inputs // BLOCK, dtype=jnp.int32)

    def step(number: jax.Array, total: jax.Array) -> jax.Array:
        tile = split * steps + number
        column, scale_column = tile * columns + lane, tile * group.shape[0] + group
        codes = _tile(code_ref, safe_output, column, width, 0)
        scales = _tile(scale_ref, scale_row, scale_column, scale_ref.shape[1], 0)
        scales = common.per_group(decode_e8m0(scales.astype(jnp.int32)), columns)
        for plane_ref, weight in zip(plane_refs, _decode(codes.astype(jnp.int32), kind), strict=True):
            inputs = _tile(plane_ref, safe_row, column, width, 0.0)
            total += common.dot((weight * scales).astype(jnp.bfloat16), inputs, transpose_b=True)
        return total

    total = lax.fori_loop(0, steps, step, jnp.zeros((config.outputs, config.rows), jnp.float32))
    at = jnp.broadcast_to((split * rows + row)[None], total.shape), jnp.broadcast_to(output[:, None], total.shape)
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
