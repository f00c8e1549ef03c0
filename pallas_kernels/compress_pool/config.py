"""Tiles of the pooling kernels."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import TileConfig, require_powers_of_two, tuned

FEW_ROWS = 512  # of the steps that decode and verify take


@dataclasses.dataclass(frozen=True)
class PoolConfig(TileConfig):
    """block: channels that one program pools, and values of a state row that one program stores."""

    block: int = 128
    num_warps: int = 1

    def problems(self) -> list[str]:
        return super().problems() + require_powers_of_two(self, "block")


def default_config(rows: int) -> PoolConfig:
    """The tuned config of steps of that many rows."""
    return tuned(PoolConfig, "compress_pool", bucket(rows), PoolConfig())


def bucket(rows: int) -> str:
    """Shape bucket of the tuned table."""
    return "decode" if rows <= FEW_ROWS else "prefill"
