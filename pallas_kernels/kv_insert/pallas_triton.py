"""`kv_insert` in one launch: a program packs a few rows of one insert and stores their codes and scales.

A row is worked on as [groups, group], so that the scale of a group is a reduction along one axis, and split into even
and odd elements: the pairs of the rotation, and the two nibbles of a byte. Padding rows are skipped by a branch, so
that no store has masked lanes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import encode
from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.formats import arena_reasons
from pallas_kernels.common.tiles import power_of_two
from pallas_kernels.kv_insert.config import InsertConfig
from pallas_kernels.kv_insert.insert import Insert


def unsupported(arenas: tuple[jax.Array, ...], inserts: tuple[Insert, ...]) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    reasons = [reason for n, arena in enumerate(arenas) for reason in arena_reasons(arena, f"arenas[{n}]")]
    for number, insert in enumerate(inserts):
        if not power_of_two(insert.layout.width) or insert.layout.width < 2:
            reasons.append(f"inserts[{number}]: width={insert.layout.width} must be a power of two, at least 2")
        reasons += arena_reasons(insert.values, f"inserts[{number}].values")
    return tuple(reasons)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def kv_insert(
    arenas: tuple[jax.Array, ...], inserts: tuple[Insert, ...], *, config: InsertConfig, interpret: bool
) -> tuple[jax.Array, ...]:
    """As `api.kv_insert`."""
    programs = [pl.cdiv(insert.values.shape[0], config.rows) for insert in inserts]
    operands = tuple(_operands(insert) for insert in inserts)
    leaves, tree = jax.tree.flatten(operands)
    static = tuple((insert.layout, insert.rope_width, insert.arena) for insert in inserts)
    kernel = functools.partial(
        _kernel, tree=tree, static=static, programs=programs, rows=config.rows, arenas=len(arenas), interpret=interpret
    )
    return tuple(
        common.call(
            kernel, *arenas, *leaves, name="kv_insert", grid=(sum(programs),), config=config, interpret=interpret,
            out_shape=[jax.ShapeDtypeStruct(arena.shape, arena.dtype) for arena in arenas],
            aliases={n: n for n in range(len(arenas))},
        )
    )  # fmt: skip


def _operands(insert: Insert) -> tuple[jax.Array | None, ...]:
    return insert.values, insert.cos, insert.sin, insert.index, insert.seq, insert.table


def _kernel(*refs, tree, static, programs: list[int], rows: int, arenas: int, interpret: bool):
    arena_refs = refs[len(refs) - arenas :]  # the outputs, which are the inputs
    inserts = jax.tree.unflatten(tree, refs[arenas : len(refs) - arenas])
    program, first = pl.program_id(0), 0
    for insert, (layout, rope, arena), count in zip(inserts, static, programs, strict=True):
        work = functools.partial(
            _insert_rows, arena_refs[arena], insert, layout, rope, rows * (program - first), rows, interpret
        )
        pl.when((program >= first) & (program < first + count))(work)
        first += count


def _insert_rows(arena_ref, insert, layout, rope: int, first: jax.Array, rows: int, interpret: bool) -> None:
    """Rows first .. first + rows - 1 of one insert, as far as it has them."""
    _, _, _, index_ref, seq_ref, table_ref = insert
    total = index_ref.shape[0]

    def insert_row(step: jax.Array, carry: None) -> None:
        row = first + step
        place = jnp.minimum(row, total - 1)
        index = index_ref[place]
        seq = jnp.clip(seq_ref[place], 0, table_ref.shape[0] - 1)
        inside = (index >= 0) & (index < table_ref.shape[1] * layout.rows_per_page) & (row < total)
        safe = jnp.where(inside, index, 0)
        page = table_ref[seq, safe // layout.rows_per_page]

        @pl.when(inside & (page >= 0) & (page < arena_ref.shape[0]))
        def _():
            column = layout.offset + safe % layout.rows_per_page * layout.row_bytes
            _store(arena_ref, page, column, *_packed(insert, layout, rope, place, interpret))

        return carry

    lax.fori_loop(0, rows, insert_row, None)


def _packed(insert, layout, rope: int, row: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array | None]:
    """Bytes of one row: codes uint8[groups, bytes of a group], scales uint8[groups, bytes of a scale] or None."""
    values_ref, cos_ref, sin_ref = insert[:3]
    fmt, exact = layout.fmt, common.exact(interpret)
    groups = fmt.num_scales(layout.width) or 1
    group = layout.width // groups
    column = _grid(groups, group)
    x = values_ref[jnp.full_like(column, row), column].astype(jnp.float32)
    even, odd = common.deinterleave(x)
    if rope:
        pair = _grid(groups, group // 2) - (layout.width - rope) // 2
        rotates = pair >= 0
        at = jnp.full_like(pair, row), jnp.maximum(pair, 0)
        cos, sin = (common.load_at(ref, at, rotates, 0.0) for ref in (cos_ref, sin_ref))
        turned = [encode.round_to(part, values_ref.dtype) for part in encode.rotate(even, odd, cos, sin, exact)]
        even, odd = jnp.where(rotates, turned[0], even), jnp.where(rotates, turned[1], odd)
    (even, odd), scales = encode.quantise([even, odd], fmt, exact)
    codes = even | (odd << 4) if fmt.element == "e2m1" else common.interleave(even, odd)
    return common.to_bytes(codes, fmt.element), None if scales is None else common.bytes_of(scales, fmt.scale)


def _store(arena_ref, page: jax.Array, column: jax.Array, codes: jax.Array, scales: jax.Array | None) -> None:
    """Codes, then scales, both row-major, from (page, column) on."""
    for part in (codes,) if scales is None else (codes, scales):
        target = column + _grid(*part.shape)
        arena_ref[jnp.full_like(target, page), target] = part
        column = column + part.size


def _grid(rows: int, columns: int) -> jax.Array:
    """int32[rows, columns] counting 0, 1, 2, ... row-major."""
    return jnp.arange(rows, dtype=jnp.int32)[:, None] * columns + jnp.arange(columns, dtype=jnp.int32)[None, :]
