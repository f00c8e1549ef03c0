"""Tiles of the insert kernel."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import TileConfig, tuned

FEW_ROWS = 512  # up to here every row gets its own program


@dataclasses.dataclass(frozen=True)
class InsertConfig(TileConfig):
    """rows: that one program packs, one after the other."""

    rows: int = 1
    num_warps: int = 1

    def problems(self) -> list[str]:
        broken = super().problems()
        if self.rows < 1:
            broken.append(f"rows={self.rows} must be at least 1")
        return broken


def default_config(rows: int) -> InsertConfig:
    """The tuned config of inserts whose longest has that many rows."""
    return tuned(InsertConfig, "kv_insert", bucket(rows), InsertConfig(rows=1 if rows <= FEW_ROWS else 4))


def bucket(rows: int) -> str:
    """Shape bucket of the tuned table."""
    return "decode" if rows <= FEW_ROWS else "prefill"
