"""Where every cached byte lies: the one owner of cache sizes, offsets and addresses. Free of JAX (`addressing` is not).

Global group (one page = `page_size` tokens): members back to back from byte 0, per KV owner main rows then index keys,
unpadded. Ring (one page = one sequence slot): per layer `ring_rows` window rows, draft layers behind the backbone's.
Released shape: 113,920 B per page with sources at 0 / 22,784 / 45,568 / 68,352; docs/cache.md derives every number.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, TypeVar

from dsflash_jax.config import ModelConfig
from dsflash_jax.numerics.format_table import FormatFacts, format_facts
from dsflash_jax.roles import kv_owners

if TYPE_CHECKING:
    from dsflash_jax.numerics.formats import KVFormat

STATE_FORMAT = "fp32"  # of compressor state: pooling is float32 (docs/contract.md "Compressor and entries")
Integers = TypeVar("Integers")  # an int, or an integer array of NumPy or JAX


@dataclasses.dataclass(frozen=True)
class Member:
    """Rows of one kind of one layer inside a page. `tokens_per_row` is the compress ratio (1 for window rows)."""

    layer: int
    kind: str  # "main" | "index" | "window"
    tokens_per_row: int
    width: int
    facts: FormatFacts
    offset: int  # of the first row, bytes from the start of the page
    rows_per_page: int

    @property
    def format(self) -> KVFormat:
        """How its rows are packed. Imported here: sizes and offsets must not load JAX."""
        from dsflash_jax.numerics.formats import get_format

        return get_format(self.facts.name)

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return self.facts.row_bytes(self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of this member in one page."""
        return self.rows_per_page * self.row_bytes

    def row_offset(self, row: Integers) -> Integers:
        """Byte offset in its page of the row with the running number `row` >= 0 (pages follow each other)."""
        return self.offset + row % self.rows_per_page * self.row_bytes

    def ring_row(self, position: Integers) -> Integers:
        """Row of a position >= 0 in a window ring; its page is the sequence's slot."""
        return position % self.rows_per_page


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """All members of a configuration's caches, with page and slot sizes in bytes."""

    page_tokens: int
    members: tuple[Member, ...]
    ring_rows: int
    ring: tuple[Member, ...]
    state_rows: int
    state_owners: tuple[int, ...]  # KV owners with ratio > 1: they keep un-pooled rows
    state_width: int  # values per state row: un-normed wkv x, then gate
    num_draft_layers: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one global page."""
        return sum(member.nbytes for member in self.members)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the window rings of one sequence slot, those of draft layers included."""
        return sum(member.nbytes for member in self.ring)

    @property
    def draft_ring_bytes(self) -> int:
        """Of `ring_bytes`, those of the draft layers: the last `num_draft_layers` members of `ring`."""
        return sum(member.nbytes for member in self.ring[len(self.ring) - self.num_draft_layers :])

    @property
    def state_bytes(self) -> int:
        """Bytes of compressor state of one sequence slot."""
        return len(self.state_owners) * self.state_rows * format_facts(STATE_FORMAT).row_bytes(self.state_width)

    def pages_for(self, tokens: int) -> int:
        """Pages that the first `tokens` tokens of a sequence occupy; a page is never shared by two."""
        return -(-tokens // self.page_tokens)

    def state_row(self, position: Integers) -> Integers:
        """Row of a position in the compressor state."""
        return position % self.state_rows

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
            members.append(Member(role.layer, kind, role.ratio, width, format_facts(name), offset, rows))
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
        num_draft_layers=cfg.num_nextn_predict_layers,
    )


def pages_for(cfg: ModelConfig, tokens: int) -> int:
    """Global pages that the first `tokens` tokens of a sequence occupy."""
    return cache_layout(cfg).pages_for(tokens)


def ring_rows(cfg: ModelConfig) -> int:
    """Window rows per slot: the window, the verified token and its drafts, so that a rejection loses nothing."""
    return cfg.sliding_window + spare_rows(cfg)


def spare_rows(cfg: ModelConfig) -> int:
    """Rows that a step may write to a slot's ring before any that one of them sees is overwritten."""
    return cfg.num_draft_tokens + 1


def state_rows(cfg: ModelConfig) -> int:
    """Compressor rows per slot: a power of two that holds an open group and a whole rejected verify block."""
    largest = max((role.ratio for role in kv_owners(cfg)), default=1)
    return max(8, 1 << (cfg.num_draft_tokens + max(largest, 2) - 1).bit_length())


def _ring_members(cfg: ModelConfig) -> tuple[Member, ...]:
    facts, rows = format_facts(cfg.window_format), ring_rows(cfg)
    size = rows * facts.row_bytes(cfg.head_dim)
    layers = range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers)  # draft layers are numbered on
    return tuple(Member(layer, "window", 1, cfg.head_dim, facts, layer * size, rows) for layer in layers)
