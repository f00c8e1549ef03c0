"""Tiles of the sparse attention kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallas_kernels.common.formats import RowLayout
from pallas_kernels.common.tiles import TileConfig, next_power_of_two, require_powers_of_two, tuned

_SMALLEST_CHUNK = 16  # columns


@dataclasses.dataclass(frozen=True)
class SparseMlaConfig(TileConfig):
    """Tiles of one program: `block_heads` heads of one query meet `block_rows` listed rows at a time.

    chunks: pieces that the width is cut into. splits: programs that share a query's lists, for small batches.
    """

    block_heads: int = 16
    block_rows: int = 32
    chunks: int = 8
    splits: int = 1
    num_warps: int = 8
    num_stages: int = 1

    def problems(self) -> list[str]:
        broken = super().problems() + require_powers_of_two(self, "block_heads", "block_rows")
        if self.chunks < 1 or self.splits < 1:
            broken.append(f"chunks={self.chunks} and splits={self.splits} must be at least 1")
        return broken


def has_nibbles(layouts: Sequence[RowLayout]) -> bool:
    """Whether any set is of 4-bit codes: columns are then handled as even and odd ones."""
    return any(layout.fmt.element == "e2m1" for layout in layouts)


def blocks(picks: Sequence[int], config: SparseMlaConfig) -> int:
    """Blocks of rows of all lists of a query."""
    return sum(-(-k // config.block_rows) for k in picks)


def default_config(queries: int, heads: int, picks: Sequence[int], layouts: Sequence[RowLayout]) -> SparseMlaConfig:
    """The tuned config of that many queries, with tiles no larger than the heads and the width need."""
    splits = 10 if queries <= 8 else 2 if queries <= 64 else 1
    nibbles = has_nibbles(layouts)
    # Chosen because they compile without spilled registers for every case and GPU; not timed.
    untimed = SparseMlaConfig(block_rows=16) if nibbles else SparseMlaConfig()
    config = tuned(SparseMlaConfig, "sparse_mla", bucket(queries, layouts), dataclasses.replace(untimed, splits=splits))
    least, chunks = 2 if nibbles else 1, config.chunks
    while chunks > least and layouts[0].width // chunks < _SMALLEST_CHUNK:
        chunks //= 2
    block_heads = min(config.block_heads, max(_SMALLEST_CHUNK, next_power_of_two(heads)))
    splits = min(config.splits, blocks(picks, config))
    return dataclasses.replace(config, chunks=chunks, block_heads=block_heads, splits=splits)


def bucket(queries: int, layouts: Sequence[RowLayout]) -> str:
    """Shape bucket of the tuned table: how many queries, and the format of the last set (the global rows)."""
    size = "b1" if queries <= 8 else "b32" if queries <= 64 else "b128" if queries <= 512 else "prefill"
    return f"{size}_{layouts[-1].format}"
