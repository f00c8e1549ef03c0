"""How packed rows lie in memory, as far as kernels need it: formats, rows of a page, and pages through a block table.

A packed row is all element codes, then all scales; of two 4-bit codes in a byte the even index is the low nibble.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Format:
    """Codes of one row format. `group` elements share a scale; None = the whole row."""

    name: str
    element: str  # "e2m1" | "e4m3" | "bfloat16" | "float32"
    scale: str | None  # "e4m3" | "e8m0" | "float32" | None
    group: int | None
    amax_floor: float  # smallest largest magnitude that a scale is made for

    def code_bytes(self, width: int) -> int:
        """Bytes of the element codes of a row."""
        return width * CODE_BITS[self.element] // 8

    def num_scales(self, width: int) -> int:
        """Scales of a row."""
        return 0 if self.scale is None else 1 if self.group is None else width // self.group

    def row_bytes(self, width: int) -> int:
        """Bytes of a packed row."""
        scale_bytes = 0 if self.scale is None else CODE_BITS[self.scale] // 8
        return self.code_bytes(width) + self.num_scales(width) * scale_bytes

    def problems(self, width: int) -> tuple[str, ...]:
        """Why rows of this width cannot be packed; empty if they can."""
        step = self.group or (2 if self.element == "e2m1" else 1)
        if width < 1 or width % step:
            return (f"width={width} of {self.name} rows must be a positive multiple of {step}",)
        return ()


CODE_BITS = {"e2m1": 4, "e4m3": 8, "e8m0": 8, "bfloat16": 16, "float32": 32}
_E4M3_FLOOR, _E2M1_LARGEST = 1e-4, 6.0
FORMATS = {
    f.name: f
    for f in (
        Format("fp4_e4m3", "e2m1", "e4m3", 16, _E2M1_LARGEST * 2.0**-9),
        Format("mxfp4", "e2m1", "e8m0", 32, _E2M1_LARGEST * 2.0**-126),
        Format("mxfp8", "e4m3", "e8m0", 32, _E4M3_FLOOR),
        Format("fp8_fp32", "e4m3", "float32", None, _E4M3_FLOOR),
        Format("bf16", "bfloat16", None, None, 0.0),
        Format("fp32", "float32", None, None, 0.0),
    )
}


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Rows of one kind inside a page: `rows_per_page` packed rows of `width` elements from byte `offset` on."""

    format: str
    width: int
    offset: int
    rows_per_page: int

    @property
    def fmt(self) -> Format:
        """The format's codes."""
        return FORMATS[self.format]

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return self.fmt.row_bytes(self.width)

    def problems(self, page_bytes: int) -> tuple[str, ...]:
        """Why such rows do not lie in a page of that many bytes; empty if they do."""
        broken = list(self.fmt.problems(self.width))
        if self.rows_per_page < 1 or self.offset < 0:
            broken.append(f"rows_per_page={self.rows_per_page} must be positive and offset={self.offset} not negative")
        elif not broken and self.offset + self.rows_per_page * self.row_bytes > page_bytes:
            end = self.offset + self.rows_per_page * self.row_bytes
            broken.append(f"rows end at byte {end:,}, behind the page of {page_bytes:,} B")
        return tuple(broken)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedRows:
    """Packed rows of many sequences in one arena, found by running number through block tables.

    Row n of sequence s lies in page table[s, n // rows_per_page]. A window ring is an arena whose page is a sequence
    slot: its table has one column, the slot, and a row's number is its ring row.
    """

    arena: jax.Array  # uint8[P, page_bytes]; of unscaled rows also [P, page_bytes / itemsize] in their own dtype
    table: jax.Array  # int32[S, W] page numbers, -1 = no page
    seq: jax.Array  # int32[Q] table row of each query (or of each tile of queries, where an op says so)
    layout: RowLayout = dataclasses.field(metadata=dict(static=True))

    @property
    def unit(self) -> int:
        """Bytes of one arena element, static: 1 unless the arena holds unscaled rows in their own dtype."""
        return self.arena.dtype.itemsize

    @property
    def rows_per_seq(self) -> int:
        """Rows that a block table can address, static."""
        return self.table.shape[1] * self.layout.rows_per_page

    def address(self, index: jax.Array, seq: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(page, column) of the first element of rows `index` [Q, K]; page -1 where there is none.

        seq: table rows, broadcast against index; None = the queries' own.
        """
        seq = self.seq[:, None] if seq is None else seq
        per_page = self.layout.rows_per_page
        page = self.table[seq, jnp.clip(index // per_page, 0, self.table.shape[1] - 1)]
        inside = (index >= 0) & (index < self.rows_per_seq)
        offset = self.layout.offset + jnp.maximum(index, 0) % per_page * self.layout.row_bytes
        return jnp.where(inside, page, -1), offset // self.unit


def check_rows(op: str, name: str, rows: PagedRows, queries: int) -> None:
    """Raises ValueError, naming `name`, unless arena, table and seq have the dtypes and shapes of `PagedRows`."""
    arena, table, seq = rows.arena, rows.table, rows.seq
    if rows.layout.format not in FORMATS:
        raise ValueError(f"{op}: {name}: format={rows.layout.format!r} is unknown; known: {', '.join(FORMATS)}.")
    allowed = ("uint8", rows.layout.fmt.element) if rows.layout.fmt.scale is None else ("uint8",)
    if arena.dtype.name not in allowed or arena.ndim != 2:
        shape = f"{' or '.join(allowed)}[P, page]"
        raise ValueError(f"{op}: {name}.arena must be {shape}, got {arena.dtype}{list(arena.shape)}.")
    for what, value, ndim in (("table", table, 2), ("seq", seq, 1)):
        if value.dtype != jnp.int32 or value.ndim != ndim:
            shape = "[S, W]" if ndim == 2 else "[Q]"
            raise ValueError(f"{op}: {name}.{what} must be int32{shape}, got {value.dtype}{list(value.shape)}.")
    if seq.shape[0] != queries:
        raise ValueError(f"{op}: {name}.seq has {seq.shape[0]} entries for {queries} queries.")
    broken = rows.layout.problems(arena.shape[1] * rows.unit)
    if rows.layout.offset % rows.unit:
        broken += (f"offset={rows.layout.offset} must be a multiple of the {rows.unit} bytes of an element",)
    if broken:
        raise ValueError(f"{op}: {name}: {'; '.join(broken)}.")


# Offsets in a kernel are 32-bit unless an array has more than 2^32 bytes (JAX 0.10 and 0.11), so they wrap between.
OFFSET_LIMIT, WIDE_OFFSETS = 2**31, 2**32


def arena_reasons(arena: jax.Array, name: str = "arena") -> tuple[str, ...]:
    """The reason against an arena whose bytes a Triton kernel would address wrongly."""
    elements = arena.shape[0] * arena.shape[1]
    if OFFSET_LIMIT < elements and elements * arena.dtype.itemsize <= WIDE_OFFSETS:
        what = f"{name} has {elements:,} elements in {elements * arena.dtype.itemsize:,} B"
        return (f"{what}; 32-bit offsets end at 2^31 elements and 64-bit ones begin behind 2^32 B",)
    return ()
