"""Shapes of `candidate_scores`: pools of 2,048 blocks of 8 entries, decoding and a prefill chunk of 4,096 queries."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.candidate_scores.api import candidate_scores
from pallas_kernels.candidate_scores.config import CandidateConfig, bucket
from pallas_kernels.common.cases import Budget, Case, Cost
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.expected import sequence_rows
from pallas_kernels.common.formats import FORMATS, PagedRows
from pallas_kernels.indexer_scores.cases import HEADS, LEAST, TOLERANCE, WIDTH, arena_pages, draw_keys, want_scores

_BLOCKS, _SIZE, _ENTRIES = 2_048, 8, 1 << 17
_SWEEP = tuple(CandidateConfig(entries=e, num_warps=w) for e, w in ((32, 2), (64, 4), (128, 4), (128, 8), (256, 8)))


def _want(q, weights, keys: PagedRows, blocks, visible, *, block_size: int) -> np.ndarray:
    rows = []
    for t, seq in enumerate(keys.seq):
        entry = (blocks[t][:, None] * block_size + np.arange(block_size)).reshape(-1)
        page = keys.table[seq][np.clip(entry // keys.layout.rows_per_page, 0, keys.table.shape[1] - 1)]
        inside = (entry >= 0) & (entry < min(visible[t], keys.rows_per_seq)) & (page >= 0)
        picked = sequence_rows(keys, seq)[np.where(inside, entry, 0)]
        rows.append(np.where(inside, want_scores(q[t][None], weights[t][None], picked)[0], -np.inf))
    return np.stack(rows)


def _case(fmt: str, queries: int, short: bool = False) -> Case:
    sequences = queries if queries <= 128 else 1

    def args(draw: Draw, small: bool) -> tuple:
        t, c, e = (3, 21, 512) if small else (queries, _BLOCKS, _ENTRIES)
        lines = min(sequences, t)
        keys = draw_keys(draw, fmt, lines, e, draw.integers(0, lines, (t,)))
        blocks = draw.integers(-1 if small else 0, e // _SIZE, (t, c))
        visible = draw.integers(0, e + 1, (t,)) if small else draw.full((t,), e)
        return draw.normal((t, HEADS, WIDTH), jnp.bfloat16), draw.normal((t, HEADS)), keys, blocks, visible

    scores = queries * _BLOCKS * _SIZE
    row_bytes = FORMATS[fmt].row_bytes(WIDTH)
    nbytes = scores * (row_bytes + 4) + 4 * queries * _BLOCKS + queries * HEADS * (2 * WIDTH + 4)
    pages, shared = arena_pages(fmt, sequences, _ENTRIES)
    return Case(
        op="candidate_scores",
        name=f"{fmt}_c{_BLOCKS}x{_SIZE}_t{queries}",
        args=args,
        call=functools.partial(candidate_scores, block_size=_SIZE),
        want=functools.partial(_want, block_size=_SIZE),
        cost=Cost(nbytes=nbytes, flops=2 * HEADS * WIDTH * scores),
        budget=Budget(matrix=True, instructions=LEAST[fmt]),
        tolerance=TOLERANCE,
        short=short,
        configs=_SWEEP,
        bucket=bucket(fmt),
        shape={
            "queries": queries, "heads": HEADS, "width": WIDTH, "blocks": _BLOCKS, "block_size": _SIZE,
            "entries": _ENTRIES, "format": fmt, "dtype": "bfloat16", "pages": pages,
            "sharing": "pages shared between sequences" if shared else "own pages",
        },
    )  # fmt: skip


CASES = (
    *(_case("mxfp4", queries, short=queries == 32) for queries in (1, 32, 128, 4_096)),
    *(_case(fmt, queries, short=queries == 32) for fmt in ("fp8_fp32", "bf16") for queries in (32, 4_096)),
)
