"""Shapes of `candidate_select`: 2,048 of the blocks of 8 of 128K and 1M entries."""

from __future__ import annotations

import functools

import numpy as np

from pallas_kernels.candidate_select.api import candidate_select
from pallas_kernels.common.cases import Budget, Case, Cost
from pallas_kernels.common.draw import Draw
from pallas_kernels.topk_select.config import TopkConfig, bucket

_TOPK, _SIZE = 2_048, 8
_SWEEP = tuple(
    TopkConfig(block=block, bits=bits, num_warps=warps)
    for block, warps in ((8192, 8), (8192, 16))
    for bits in (1, 2, 4)
)


def _want(block_scores: np.ndarray, visible: np.ndarray, *, block_size: int, topk_blocks: int) -> np.ndarray:
    picked = np.full((len(block_scores), topk_blocks), -1, np.int32)
    for t, scores in enumerate(np.minimum(np.where(np.isnan(block_scores), -np.inf, block_scores), np.finfo("f4").max)):
        newest = (visible[t] - 1) // block_size
        if 0 <= newest < len(scores):
            scores[newest] = np.inf
        order = np.argsort(-scores, kind="stable")[:topk_blocks]
        order = np.sort(order[scores[order] > -np.inf])
        picked[t, : len(order)] = order
    return picked


def _case(queries: int, blocks: int, short: bool = False) -> Case:
    def args(draw: Draw, small: bool) -> tuple:
        t, n = (3, 5000) if small else (queries, blocks)
        return draw.normal((t, n)), draw.integers(0 if small else _SIZE * n, _SIZE * n + 1, (t,))

    wanted = {"block_size": _SIZE, "topk_blocks": _TOPK}
    return Case(
        op="candidate_select",
        name=f"k{_TOPK}_n{blocks}_t{queries}",
        args=args,
        call=functools.partial(candidate_select, **wanted),
        want=functools.partial(_want, **wanted),
        cost=Cost(nbytes=4 * queries * (blocks + _TOPK), flops=0),
        budget=Budget(matrix=False, instructions=800),
        short=short,
        configs=_SWEEP,
        bucket=bucket(blocks, _TOPK),
        shape={"queries": queries, "blocks": blocks, "topk_blocks": _TOPK, "block_size": _SIZE, "dtype": "float32"},
    )


CASES = (
    *(_case(queries, 1 << 14, short=queries == 32) for queries in (1, 32, 128, 4_096)),
    *(_case(queries, 1 << 17) for queries in (1, 32, 128)),
)
