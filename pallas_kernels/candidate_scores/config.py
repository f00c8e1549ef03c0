"""Tiles of the candidate-score kernel."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.tiles import TileConfig, require_powers_of_two, tuned


@dataclasses.dataclass(frozen=True)
class CandidateConfig(TileConfig):
    """entries: keys of whole candidate blocks that one program decodes and multiplies with one query."""

    entries: int = 128
    num_warps: int = 4

    def problems(self) -> list[str]:
        return super().problems() + require_powers_of_two(self, "entries")


def default_config(fmt: str) -> CandidateConfig:
    """The tuned config of keys of that format."""
    return tuned(CandidateConfig, "candidate_scores", bucket(fmt), CandidateConfig())


def bucket(fmt: str) -> str:
    """Shape bucket of the tuned table: a program is the same for any number of queries and blocks."""
    return fmt
