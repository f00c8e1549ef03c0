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
# Layer 2 reads the pool of layer 1; in between two groups the released code scores it against layer 0's keys.
STALE = running.shallow(compress_ratios=(1, 2, 2), stale_index_keys=True)


def pool_blocks(draws, visible):
    """Per query: the newest visible block and random earlier ones, ascending, -1 padding last."""
    blocks = np.full((len(visible), CFG.candidate_topk_blocks), -1, np.int32)
    for line, seen in zip(blocks, visible, strict=True):
        count = -(-seen // CFG.candidate_block_size)
        others = draws.permutation(max(count - 1, 0))[: draws.integers(0, CFG.candidate_topk_blocks)]
        chosen = np.sort([*others, count - 1])
        line[: len(chosen)] = chosen
    return blocks


@functools.partial(jax.jit, static_argnames=("cfg", "traced"))
def selection(query, published, step, pages, cfg, traced):
    """What the last layer selects; a traced step keeps the scores of all entries, so it has to compute them."""
    tiles = make_tiles(step, step.num_rows)
    return select(query, published, step, tiles, pages, layer_roles(cfg)[-1], cfg, {} if traced else None).selection_TxK


def compare(cfg, start, rows, draws, zeros_from):
    """Both selections of the last layer on random pages: (scoring the whole table, scoring the pool)."""
    role = layer_roles(cfg)[-1]
    member = cache_layout(cfg).member(role.kv_source, "index")
    assert rows * cfg.candidate_topk_blocks * cfg.candidate_block_size < running.PAGES * member.rows_per_page
    pages = np.full((64, cache_layout(cfg).page_bytes), running.POISON_BYTE, np.uint8)
    for each in cache_layout(cfg).members:
        if each.kind == "index":
            values = draws.integers(-1, 2, (64 * each.rows_per_page, each.width)).astype(np.float32)
            values[:, zeros_from:] = 0
            pages[:, each.offset : each.offset + each.nbytes] = np.asarray(each.format.pack(values)).reshape(64, -1)
    chunk = Chunk(0, [1] * rows, start, draws.permutation(64)[: running.PAGES].tolist())
    step = make_step([chunk], cfg, rows=rows, seqs=1, pages=running.PAGES)
    visible = (np.asarray(step.positions) + 1) // role.ratio
    shape = (rows, cfg.index_n_heads, cfg.index_head_dim)
    query = Query(draws.integers(-2, 3, shape).astype(np.float32), draws.integers(-1, 2, shape[:2]) * 1.0)
    published = Published(np.zeros((rows, cfg.index_topk), np.int32), pool_blocks(draws, visible))
    return [np.asarray(selection(query, published, step, pages, cfg, traced)) for traced in (True, False)]


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("zeros_from", [2, CFG.index_head_dim], ids=["ties", "distinct"])
def test_scoring_only_the_pool_selects_what_scoring_everything_selects(rows, zeros_from):
    """Small integers make every dot exact; with few distinct scores, ties and both zeros decide too."""
    draws = np.random.default_rng(rows + zeros_from)
    for start in (0, 1, 5, 30, 50, 70, 90):
        whole, pooled = compare(CFG, start, rows, draws, zeros_from)
        assert np.array_equal(whole, pooled), (start, whole, pooled)
        assert (whole >= 0).any()


def test_stale_keys_reach_a_layer_that_reads_a_pool():
    """The served step follows the released code like the traced one, whichever way the pool is scored."""
    draws = np.random.default_rng(0)
    for start in range(30, 90, 4):
        whole, pooled = compare(STALE, start, 1, draws, CFG.index_head_dim)
        assert np.array_equal(whole, pooled), (start, whole, pooled)
