"""Tiles of the block selection: those of the top-k kernel, tuned for rows of block scores."""

from __future__ import annotations

from pallas_kernels.common.tiles import tuned
from pallas_kernels.topk_select.config import TopkConfig, bucket


def default_config(blocks: int, topk_blocks: int) -> TopkConfig:
    """The tuned config of rows of that many block scores."""
    return tuned(TopkConfig, "candidate_select", bucket(blocks, topk_blocks), TopkConfig())
