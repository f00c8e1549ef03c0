"""A layout's members as the ops of `pallas_kernels` address them: what needs JAX, so that `layout` stays free of it."""

from __future__ import annotations

import jax

from dsflash_jax.cache.layout import Member
from pallas_kernels.common.formats import PagedRows, RowLayout


def row_layout(member: Member) -> RowLayout:
    """How the rows of `member` lie in its page."""
    return RowLayout(member.facts.name, member.width, member.offset, member.rows_per_page)


def paged_rows(member: Member, arena: jax.Array, tables: jax.Array, seq: jax.Array) -> PagedRows:
    """The rows of `member` in an arena uint8[P, page_bytes], found through block tables int32[S, W].

    seq: int32[Q], the table row of each query. Of window rows the arena is the ring, whose page is a sequence slot:
    its table is `slot[:, None]`, and the row of a position is `ring_row`.
    """
    return PagedRows(arena, tables, seq, row_layout(member))
