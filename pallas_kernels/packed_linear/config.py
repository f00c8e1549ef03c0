"""Tiles of the packed product."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import TileConfig, require_powers_of_two, tuned

LEAST_BLOCK = 32  # inputs: those of one scale


@dataclasses.dataclass(frozen=True)
class LinearConfig(TileConfig):
    """rows, outputs, inputs: of one tile. splits: programs that share the inputs of a tile, each with its own sum."""

    rows: int = 16
    outputs: int = 64
    inputs: int = 128
    splits: int = 1
    num_stages: int = 3

    def problems(self) -> list[str]:
        broken = super().problems() + require_powers_of_two(self, "rows", "outputs", "inputs")
        if self.inputs < LEAST_BLOCK:
            broken.append(f"inputs={self.inputs} must be at least the {LEAST_BLOCK} of one scale")
        if self.splits < 1:
            broken.append(f"splits={self.splits} must be at least 1")
        return broken


def default_config(rows: int, inputs: int, outputs: int, kind: str) -> LinearConfig:
    """The tuned config of that many rows through such a weight."""
    tile = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    # Few outputs leave most of a GPU idle unless several programs share the inputs.
    default = LinearConfig(rows=tile, splits=1 if outputs >= 16_384 or inputs < 2_048 else 4)
    if tile == 128:  # sums of that many rows spill in four warps, beside 128 inputs also in eight (sm_80, compiled)
        default = dataclasses.replace(default, inputs=64, num_warps=8)
    return tuned(LinearConfig, "packed_linear", bucket(rows, inputs, outputs, kind), default)


def bucket(rows: int, inputs: int, outputs: int, kind: str) -> str:
    """Shape bucket of the tuned table."""
    wide = "wide" if outputs >= 16_384 or inputs < 2_048 else "deep"
    return f"{kind}_{wide}_t{16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128}"
