"""RoPE, quantisation, packing and paged scatter of new cache rows: what writes the caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.common.formats import PagedRows, check_rows
from pallas_kernels.kv_insert import pallas_triton, xla
from pallas_kernels.kv_insert.config import InsertConfig, default_config
from pallas_kernels.kv_insert.insert import Insert

OP = "kv_insert"


def kv_insert(
    arenas: tuple[jax.Array, ...],
    inserts: Sequence[Insert],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: InsertConfig | None = None,
) -> tuple[jax.Array, ...]:
    """Writes the rows of all `inserts` into the arenas uint8[P, page_bytes]; returns the arenas, updated in place.

    Rows are rotated in float32 (each product and sum rounded once), rounded to their dtype, quantised and packed as
    `layout.format` says. Donate the arenas: otherwise JAX copies them. Two rows of one call must not share an address.
    implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernel, None = the tuned ones.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.4.4 (what the caches keep), reference inference/model.py (rotation before rounding).
    """
    arenas, inserts = tuple(arenas), tuple(inserts)
    if not inserts:
        raise ValueError(f"{OP}: inserts is empty; there must be at least one.")
    for number, insert in enumerate(inserts):
        _check(arenas, f"inserts[{number}]", insert)
    inserts = tuple(insert for insert in inserts if insert.values.shape[0])
    if not inserts:
        return arenas
    config = config or default_config(max(insert.values.shape[0] for insert in inserts))
    reasons = pallas_triton.unsupported(arenas, inserts)
    kernel = Kernel(functools.partial(pallas_triton.kv_insert, config=config, interpret=interpret), reasons)
    kernels = {"pallas_triton": kernel}
    return dispatch(OP, implementation, xla.kv_insert, kernels, arenas, inserts, interpret=interpret)


def _check(arenas: tuple[jax.Array, ...], name: str, insert: Insert) -> None:
    values, layout = insert.values, insert.layout
    if not 0 <= insert.arena < len(arenas):
        raise ValueError(f"{OP}: {name}.arena={insert.arena} must number one of the {len(arenas)} arenas.")
    if values.dtype not in (jnp.float32, jnp.bfloat16) or values.ndim != 2:
        got = f"{values.dtype}{list(values.shape)}"
        raise ValueError(f"{OP}: {name}.values must be float32 or bfloat16 [N, D], got {got}.")
    arena, rows = arenas[insert.arena], values.shape[0]
    if arena.dtype != jnp.uint8 or arena.ndim != 2:
        got = f"{arena.dtype}{list(arena.shape)}"
        raise ValueError(f"{OP}: arenas[{insert.arena}] must be uint8[P, page_bytes], got {got}.")
    check_rows(OP, name, PagedRows(arena, insert.table, insert.seq, layout), rows)
    if values.shape[1] != layout.width:
        raise ValueError(f"{OP}: {name}.values are {values.shape[1]} wide, but layout.width={layout.width}.")
    if insert.index.dtype != jnp.int32 or insert.index.shape != (rows,):
        got = f"{insert.index.dtype}{list(insert.index.shape)}"
        raise ValueError(f"{OP}: {name}.index must be int32[{rows}], got {got}.")
    _check_rope(name, insert)


def _check_rope(name: str, insert: Insert) -> None:
    cos, sin, (rows, width) = insert.cos, insert.sin, insert.values.shape
    if (cos is None) != (sin is None):
        raise ValueError(f"{OP}: {name}: cos and sin must both be given, or neither.")
    if cos is None:
        return
    for what, table in (("cos", cos), ("sin", sin)):
        if table.dtype != jnp.float32 or table.ndim != 2 or table.shape != cos.shape or table.shape[0] != rows:
            got = f"{table.dtype}{list(table.shape)}"
            raise ValueError(f"{OP}: {name}.{what} must be float32[{rows}, r / 2], got {got}.")
    if not 0 < insert.rope_width <= width:
        raise ValueError(f"{OP}: {name} rotates r={insert.rope_width} elements of rows that are {width} wide.")
