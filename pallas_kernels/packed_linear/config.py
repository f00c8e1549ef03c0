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


def default_config(rows: int, inputs: int, outputs: int, kind: str, grouped: bool = False) -> LinearConfig:
    """The tuned config of that many rows (of a group) through such a weight."""
    # Few outputs leave most of a GPU idle unless several programs share the inputs, or there are groups.
    splits = 1 if grouped or _wide(inputs, outputs) else 4
    default = LinearConfig(rows=_row_tile(rows), splits=splits)
    if (
        default.rows == 128
    ):  # sums of that many rows spill in four warps, beside 128 inputs also in eight (sm_80, compiled)
        default = dataclasses.replace(default, inputs=64, num_warps=8)
    return tuned(LinearConfig, "packed_linear", bucket(rows, inputs, outputs, kind, grouped), default)


def bucket(rows: int, inputs: int, outputs: int, kind: str, grouped: bool = False) -> str:
    """Shape bucket of the tuned table."""
    shape = "grouped" if grouped else "wide" if _wide(inputs, outputs) else "deep"
    return f"{kind}_{shape}_t{_row_tile(rows)}"


def _wide(inputs: int, outputs: int) -> bool:
    return outputs >= 16_384 or inputs < 2_048


def _row_tile(rows: int) -> int:
    return next((tile for tile in (16, 32, 64) if rows <= tile), 128)
