"""Inserts that evidence is made for: what a layer of the released model writes in decode, verify and prefill steps."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.cases import Budget, Case, Cost, Update
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.expected import bfloat16_bits, pack
from pallas_kernels.common.formats import RowLayout
from pallas_kernels.kv_insert.api import kv_insert
from pallas_kernels.kv_insert.config import FEW_ROWS, InsertConfig, bucket
from pallas_kernels.kv_insert.insert import Insert

PAGE_BYTES, PAGE_ROWS, RING_ROWS, ROPE = 113_920, 64, 134, 64  # of the released model; rows of a source of ratio 2
RELEASED = ("fp4_e4m3", "mxfp4", "mxfp8")  # main rows, index keys, window rows
WIDTHS = (512, 128, 512)
_LEAST = {"released": 900, "wide": 340, "fp8": 650}  # instructions: half of what compilers make of them


def _layouts(formats: tuple[str, str, str]) -> list[RowLayout]:
    """Main rows, then index keys in a page; window rows in a ring. Rows of a page as far as they fit."""
    main, index = (RowLayout(f, w, 0, 1).row_bytes for f, w in zip(formats[:2], WIDTHS[:2], strict=True))
    rows = min(PAGE_ROWS, PAGE_BYTES // (main + index))
    return [
        RowLayout(formats[0], WIDTHS[0], 0, rows),
        RowLayout(formats[1], WIDTHS[1], rows * main, rows),
        RowLayout(formats[2], WIDTHS[2], 0, RING_ROWS),
    ]


def _args(draw: Draw, small: bool, *, rows: int, formats: tuple[str, str, str]):
    """Up to FEW_ROWS rows are one of each sequence; more are a chunk of one sequence, whose window keeps the last."""
    rows = min(rows, 3) if small else rows
    layouts, chunk = _layouts(formats), rows > FEW_ROWS
    seqs = 1 if chunk else rows
    pages = -(-rows // layouts[0].rows_per_page) if chunk else 2
    arenas = (
        draw.arena(seqs * pages, PAGE_BYTES, *layouts[:2]),
        draw.arena(seqs, RING_ROWS * layouts[2].row_bytes, layouts[2]),
    )
    tables = draw.pages(seqs, pages), draw.given(np.arange(seqs)[:, None])
    inserts = []
    for layout, arena in zip(layouts, (0, 0, 1), strict=True):
        row = np.arange(rows)
        entry = row if chunk else 7 * row % (pages * layout.rows_per_page)
        if arena:
            entry = np.where(row >= rows - RING_ROWS, row % RING_ROWS, -1) if chunk else row % RING_ROWS
        angles = [draw.normal((rows, ROPE // 2)) for _ in range(2)]
        values = draw.normal((rows, layout.width), jnp.bfloat16)
        seq = np.zeros(rows) if chunk else row
        inserts.append(Insert(values, *angles, draw.given(entry), draw.given(seq), tables[arena], layout, arena))
    return arenas, tuple(inserts)


def _want(arenas, inserts):
    arenas = [np.array(arena) for arena in arenas]
    for insert in inserts:
        layout, values = insert.layout, np.asarray(insert.values).astype(np.float32)
        even, odd = values[:, -ROPE::2].copy(), values[:, -ROPE + 1 :: 2].copy()
        cos, sin = np.asarray(insert.cos), np.asarray(insert.sin)
        for start, turned in ((0, even * cos - odd * sin), (1, even * sin + odd * cos)):
            bits = bfloat16_bits(turned.view(np.uint32)).astype(np.uint32) << 16
            values[:, values.shape[1] - ROPE + start :: 2] = bits.view(np.float32)
        packed, table = pack(values, layout.fmt), np.asarray(insert.table)
        for row, index, seq in zip(packed, np.asarray(insert.index), np.asarray(insert.seq), strict=True):
            if index >= 0:
                first = layout.offset + index % layout.rows_per_page * layout.row_bytes
                arenas[insert.arena][table[seq, index // layout.rows_per_page], first : first + len(row)] = row
    return tuple(arenas)


def _cost(rows: int, formats: tuple[str, str, str]) -> Cost:
    nbytes = flops = 0
    for layout in _layouts(formats):
        written = min(rows, RING_ROWS) if layout.rows_per_page == RING_ROWS and rows > FEW_ROWS else rows
        nbytes += 8 * rows + written * (2 * layout.width + 4 * ROPE + 4 + layout.row_bytes)
        flops += written * (3 * ROPE + 2 * layout.width)  # a pair turns in six; a value is compared and divided
    return Cost(nbytes, flops)


def _case(rows: int, name: str = "released", formats: tuple[str, str, str] = RELEASED, short: bool = False) -> Case:
    return Case(
        op="kv_insert",
        name=f"{name}_{rows}",
        args=functools.partial(_args, rows=rows, formats=formats),
        call=kv_insert,
        want=_want,
        cost=_cost(rows, formats),
        budget=Budget(matrix=False, instructions=_LEAST[name]),
        update=Update(argument=0),
        short=short,
        configs=tuple(
            InsertConfig(rows=n, num_warps=w) for n in ((1,) if rows <= FEW_ROWS else (1, 2, 4, 8)) for w in (1, 2)
        ),
        bucket=bucket(rows),
        shape={"rows": rows, "formats": "+".join(formats)},
    )


CASES = (
    _case(1),
    _case(32, short=True),
    _case(128),
    _case(4096),
    _case(32, "wide", ("bf16", "fp32", "bf16"), short=True),
    _case(32, "fp8", ("mxfp8", "fp8_fp32", "bf16"), short=True),
)
