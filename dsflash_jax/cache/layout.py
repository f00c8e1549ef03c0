"""Where every cached byte lies: the one owner of cache sizes, offsets and address arithmetic.

Global group (one page = `page_size` tokens): members back to back from byte 0, per KV owner main rows then index keys,
unpadded. Ring (one page = one sequence slot): per layer `ring_rows` window rows. Released shape: 113,920 B per page
with sources at 0 / 22,784 / 45,568 / 68,352 (model.md §2.6; deployment notes §3.4).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsflash_jax.config import ModelConfig
from dsflash_jax.numerics.formats import KVFormat, get_format
from dsflash_jax.roles import kv_owners


@dataclasses.dataclass(frozen=True)
class Member:
    """Rows of one kind of one layer inside a page. `tokens_per_row` is the compress ratio (1 for window rows)."""

    layer: int
    kind: str  # "main" | "index" | "window"
    tokens_per_row: int
    width: int
    format: KVFormat
    offset: int  # of the first row, bytes from the start of the page
    rows_per_page: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return self.format.row_bytes(self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of this member in one page."""
        return self.rows_per_page * self.row_bytes

    def address(self, table_row: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(page, byte offset) of `entry` [..., K] through block-table rows [..., P]; page -1 where there is none."""
        block = jnp.clip(entry // self.rows_per_page, 0, table_row.shape[-1] - 1)
        page = jnp.take_along_axis(table_row, block, axis=-1)
        inside = (entry >= 0) & (entry < table_row.shape[-1] * self.rows_per_page)
        offset = self.offset + jnp.maximum(entry, 0) % self.rows_per_page * self.row_bytes
        return jnp.where(inside, page, -1), offset


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """All members of a configuration's caches, with page and slot sizes in bytes."""

    page_tokens: int
    members: tuple[Member, ...]
    ring_rows: int
    ring: tuple[Member, ...]
    state_rows: int
    state_owners: tuple[int, ...]  # KV owners with ratio > 1: they keep un-pooled rows
    state_width: int  # float32 values per state row: un-normed wkv x, then gate

    @property
    def page_bytes(self) -> int:
        """Bytes of one global page."""
        return sum(member.nbytes for member in self.members)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the window rings of one sequence slot."""
        return sum(member.nbytes for member in self.ring)

    @property
    def state_bytes(self) -> int:
        """Bytes of compressor state of one sequence slot."""
        return len(self.state_owners) * self.state_rows * self.state_width * 4

    def member(self, layer: int, kind: str) -> Member:
        """The member of `kind` owned by `layer`; KeyError if the layer owns none."""
        for member in self.members:
            if (member.layer, member.kind) == (layer, kind):
                return member
        raise KeyError(f"layer {layer} owns no {kind} rows")


@functools.lru_cache(maxsize=64)
def cache_layout(cfg: ModelConfig) -> CacheLayout:
    """The layout of `cfg`; formats are the config's `main_format`, `index_format` and `window_format`."""
    kinds = (("main", cfg.head_dim, cfg.main_format), ("index", cfg.index_head_dim, cfg.index_format))
    members: list[Member] = []
    offset = 0
    for role in kv_owners(cfg):
        for kind, width, name in kinds:
            rows = cfg.page_size // role.ratio
            members.append(Member(role.layer, kind, role.ratio, width, get_format(name), offset, rows))
            offset += members[-1].nbytes
    pooled = tuple(role.layer for role in kv_owners(cfg) if role.ratio > 1)
    return CacheLayout(
        page_tokens=cfg.page_size,
        members=tuple(members),
        ring_rows=ring_rows(cfg),
        ring=_ring_members(cfg),
        state_rows=state_rows(cfg),
        state_owners=pooled,
        state_width=2 * cfg.head_dim,
    )


def ring_rows(cfg: ModelConfig) -> int:
    """Window rows per slot: the window, the verified token and its drafts, so that a rejection loses nothing."""
    return cfg.sliding_window + cfg.num_draft_tokens + 1


def state_rows(cfg: ModelConfig) -> int:
    """Compressor rows per slot: a power of two that holds an open group and a whole rejected verify block."""
    largest = max((role.ratio for role in kv_owners(cfg)), default=1)
    return max(8, 1 << (cfg.num_draft_tokens + max(largest, 2) - 1).bit_length())


def _ring_members(cfg: ModelConfig) -> tuple[Member, ...]:
    fmt, rows = get_format(cfg.window_format), ring_rows(cfg)
    size = rows * fmt.row_bytes(cfg.head_dim)
    layers = range(cfg.num_hidden_layers)
    return tuple(Member(layer, "window", 1, cfg.head_dim, fmt, layer * size, rows) for layer in layers)
