"""Tiles of the index-score kernel."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import TileConfig, require_powers_of_two, tuned


@dataclasses.dataclass(frozen=True)
class IndexerConfig(TileConfig):
    """entries: keys that one program decodes and keeps. queries: query rows that it multiplies them with at a time.

    num_stages: of the loop over query rows, whose tiles are loaded ahead.
    """

    entries: int = 128
    queries: int = 2
    num_warps: int = 4
    num_stages: int = 2

    def problems(self) -> list[str]:
        return super().problems() + require_powers_of_two(self, "entries", "queries")


def default_config(fmt: str, rows: int) -> IndexerConfig:
    """The tuned config of tiles of that many query rows over keys of that format."""
    return tuned(IndexerConfig, "indexer_scores", bucket(fmt, rows), IndexerConfig())


def bucket(fmt: str, rows: int) -> str:
    """Shape bucket of the tuned table."""
    return f"{fmt}_{'decode' if rows == 1 else 'prefill'}"
