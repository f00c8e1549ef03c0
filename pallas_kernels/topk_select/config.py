"""Tiles of the top-k kernel."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import TileConfig, require_powers_of_two, tuned

MAX_BITS = 4  # 15 counts at once


@dataclasses.dataclass(frozen=True)
class TopkConfig(TileConfig):
    """block: scores that one program keeps in registers. bits: of the threshold that one counting pass decides."""

    block: int = 8192
    bits: int = 2
    num_warps: int = 16

    def problems(self) -> list[str]:
        broken = super().problems() + require_powers_of_two(self, "block")
        if self.bits not in (1, 2, MAX_BITS):
            broken.append(f"bits={self.bits} must be 1, 2 or {MAX_BITS}, to divide the 32 bits of a score")
        return broken


def default_config(entries: int, k: int) -> TopkConfig:
    """The tuned config of rows of that many entries."""
    return tuned(TopkConfig, "topk_select", bucket(entries, k), TopkConfig())


def bucket(entries: int, k: int) -> str:
    """Shape bucket of the tuned table."""
    return f"n{'16k' if entries <= 1 << 14 else '128k' if entries <= 1 << 17 else '1m'}_k{512 if k <= 512 else 2048}"
