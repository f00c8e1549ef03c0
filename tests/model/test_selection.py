"""The two ways to choose entries of a candidate pool agree: scoring the whole table, or only the pool's keys."""

import functools

import jax
import numpy as np
import pytest

from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.modules.selection import Query, select
from dsflash_jax.modules.step_index import make_tiles
from dsflash_jax.roles import layer_roles
from dsflash_jax.types import Published
from tests.model import running

CFG = running.tiny()
ROLE = layer_roles(CFG)[5]


def pool_blocks(draws, visible):
    """Per query: the newest visible block and random earlier ones, ascending, -1 padding last."""
    blocks = np.full((len(visible), CFG.candidate_topk_blocks), -1, np.int32)
    for line, seen in zip(blocks, visible, strict=True):
        count = -(-seen // CFG.candidate_block_size)
        others = draws.permutation(max(count - 1, 0))[: draws.integers(0, CFG.candidate_topk_blocks)]
        chosen = np.sort([*others, count - 1])
        line[: len(chosen)] = chosen
    return blocks


@functools.partial(jax.jit, static_argnames="traced")
def selection(query, published, step, pages, traced):
    """What layer 5 selects; a traced step keeps the scores of all entries, so it has to compute them."""
    tiles = make_tiles(step, step.num_rows)
    return select(query, published, step, tiles, pages, ROLE, CFG, {} if traced else None).selection_TxK


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_scoring_only_the_pool_selects_what_scoring_everything_selects(rows, ties):
    """Small integers make every dot exact; with few distinct scores, ties and both zeros decide too."""
    draws = np.random.default_rng(rows + ties)
    member = cache_layout(CFG).member(ROLE.kv_source, "index")
    assert rows * CFG.candidate_topk_blocks * CFG.candidate_block_size < running.PAGES * member.rows_per_page
    shape = (rows, CFG.index_n_heads, CFG.index_head_dim)
    for start in (0, 1, 5, 30, 90):
        values = draws.integers(-1, 2, (64 * member.rows_per_page, member.width)).astype(np.float32)
        values[:, 2 if ties else member.width :] = 0
        pages = np.full((64, cache_layout(CFG).page_bytes), running.POISON_BYTE, np.uint8)
        packed = np.asarray(member.format.pack(values)).reshape(64, -1)
        pages[:, member.offset : member.offset + member.nbytes] = packed
        chunk = Chunk(0, [1] * rows, start, draws.permutation(64)[: running.PAGES].tolist())
        step = make_step([chunk], CFG, rows=rows, seqs=1, pages=running.PAGES)
        visible = (np.asarray(step.positions) + 1) // ROLE.ratio
        query = Query(draws.integers(-2, 3, shape).astype(np.float32), draws.integers(-1, 2, shape[:2]) * 1.0)
        published = Published(np.zeros((rows, CFG.index_topk), np.int32), pool_blocks(draws, visible))
        whole, pooled = (np.asarray(selection(query, published, step, pages, traced)) for traced in (True, False))
        assert np.array_equal(whole, pooled), (start, whole, pooled)
        assert (whole >= 0).any()
