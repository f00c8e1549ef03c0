"""Shapes of `topk_select`: entries of 16K to 1M tokens, and the candidate pool of 128K blocks."""

from __future__ import annotations

import functools

import numpy as np

from pallas_kernels.common.cases import Budget, Case, Cost
from pallas_kernels.common.draw import Draw
from pallas_kernels.topk_select.api import topk_select
from pallas_kernels.topk_select.config import TopkConfig, bucket

_SWEEP = tuple(
    TopkConfig(block=block, bits=bits, num_warps=warps)
    for block, warps in ((4096, 8), (8192, 8), (8192, 16), (16384, 32))
    for bits in (1, 2, 4)
)


def _want(scores: np.ndarray, *, k: int) -> np.ndarray:
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-ranked, axis=1, kind="stable")[:, :k]
    index = np.where(np.take_along_axis(ranked, order, axis=1) > -np.inf, order, ranked.shape[1])
    index = np.sort(index, axis=1)
    return np.where(index < ranked.shape[1], index, -1).astype(np.int32)


def _case(rows: int, entries: int, k: int, short: bool = False) -> Case:
    def args(draw: Draw, small: bool) -> tuple:
        return (draw.normal((3, 3000) if small else (rows, entries)),)

    return Case(
        op="topk_select",
        name=f"k{k}_n{entries}_t{rows}",
        args=args,
        call=functools.partial(topk_select, k=k),
        want=functools.partial(_want, k=k),
        cost=Cost(nbytes=4 * rows * (entries + k), flops=0),
        budget=Budget(matrix=False, instructions=800),
        short=short,
        configs=_SWEEP,
        bucket=bucket(entries, k),
        shape={"rows": rows, "entries": entries, "k": k, "dtype": "float32"},
    )


CASES = (
    _case(32, 16_384, 512),
    *(_case(rows, 131_072, 512, short=rows == 32) for rows in (1, 32, 128)),
    *(_case(rows, 1_048_576, 512) for rows in (1, 32)),
    *(_case(rows, 131_072, 2_048) for rows in (1, 64, 128)),
    _case(4_096, 16_384, 512),
)
