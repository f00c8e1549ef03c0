"""What a step selects does not depend on how much it scores: a whole table, a prefix of it, a pool's keys alone."""

import functools
import re

import jax
import numpy as np
import pytest

from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.modules.select_forms import Query
from dsflash_jax.modules.selection import select
from dsflash_jax.modules.step_index import make_tiles
from dsflash_jax.roles import layer_roles
from dsflash_jax.types import Published
from tests.model import running

CFG = running.tiny()
# Layer 2 reads the pool of layer 1; in between two groups the released code scores it against layer 0's keys.
LONG = running.tiny(max_position_embeddings=512)
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


@functools.partial(jax.jit, static_argnames=("role", "cfg", "traced"))
def selection(query, published, step, pages, role, cfg, traced):
    """What a layer publishes; a traced step keeps the scores of all entries, so it has to compute them."""
    return select(query, published, step, make_tiles(step, step.num_rows), pages, role, cfg, {} if traced else None)


def compare(cfg, start, rows, draws, zeros_from, layer=-1, table=running.PAGES, ways=(("", True), ("", False))):
    """What `layer` publishes on random pages in each way: (implementation, whether all scores are kept)."""
    role = layer_roles(cfg)[layer]
    member = cache_layout(cfg).member(role.kv_source, "index")
    assert rows > 4 or rows * cfg.candidate_topk_blocks * cfg.candidate_block_size < table * member.rows_per_page
    pages = np.full((64, cache_layout(cfg).page_bytes), running.POISON_BYTE, np.uint8)
    for each in cache_layout(cfg).members:
        if each.kind == "index":
            values = draws.integers(-1, 2, (64 * each.rows_per_page, each.width)).astype(np.float32)
            values[:, zeros_from:] = 0
            pages[:, each.offset : each.offset + each.nbytes] = np.asarray(each.format.pack(values)).reshape(64, -1)
    chunk = Chunk(0, [1] * rows, start, draws.permutation(64)[:table].tolist())
    step = make_step([chunk], cfg, rows=rows, seqs=1, pages=table)
    visible = (np.asarray(step.positions) + 1) // role.ratio
    shape = (rows, cfg.index_n_heads, cfg.index_head_dim)
    query = Query(draws.integers(-2, 3, shape).astype(np.float32), draws.integers(-1, 2, shape[:2]) * 1.0)
    published = Published(np.zeros((rows, cfg.index_topk), np.int32), pool_blocks(draws, visible))
    results = []
    for implementation, traced in ways:
        way = cfg.replace(implementation=implementation, interpret=implementation.startswith("pallas"))
        results.append(jax.device_get(selection(query, published, step, pages, role, way, traced)))
    return results


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("zeros_from", [2, CFG.index_head_dim], ids=["ties", "distinct"])
def test_scoring_only_the_pool_selects_what_scoring_everything_selects(rows, zeros_from):
    """Small integers make every dot exact; with few distinct scores, ties and both zeros decide too."""
    draws = np.random.default_rng(rows + zeros_from)
    for start in (0, 1, 5, 30, 50, 70, 90):
        whole, pooled = compare(CFG, start, rows, draws, zeros_from)
        assert np.array_equal(whole.selection_TxK, pooled.selection_TxK), (start, whole, pooled)
        assert (whole.selection_TxK >= 0).any()


def test_scoring_a_prefix_of_a_long_table_selects_what_scoring_all_of_it_selects():
    """A table of 512 entries is read by quarters; the layer also builds the candidate pool from them."""
    draws = np.random.default_rng(0)
    for start in (0, 125, 126, 250, 300, 383, 508):
        whole, prefix = compare(LONG, start, 2, draws, LONG.index_head_dim, layer=4, table=64)
        for name in ("selection_TxK", "candidates_TxC"):
            assert np.array_equal(getattr(whole, name), getattr(prefix, name)), (start, name)
        assert start < 125 or (whole.selection_TxK >= 0).all()


def test_masks_and_lists_select_the_same():
    """Sixteen rows of one sequence are read densely: served steps carry masks, traced ones both forms."""
    draws = np.random.default_rng(1)
    for layer in (4, 5):  # builds the pool, reads it
        for start in (0, 3, 16):
            traced, served = compare(CFG, start, 16, draws, 2, layer=layer, table=4)
            assert np.array_equal(served.selection_TxK, traced.selection_TxK)
            for mask, lists in ((served.selected_TxE, traced.selection_TxK), (served.pool_TxB, traced.candidates_TxC)):
                if mask is not None:
                    picked = [row[row >= 0].tolist() for row in lists]
                    assert [np.flatnonzero(row).tolist() for row in mask] == picked
            assert served.selected_TxE is not None and (layer == 5 or served.pool_TxB is not None)


def test_a_cpu_sorts_nothing_where_masks_are_read():
    """With the platform's choice a step carries lists, for kernels, beside the masks; whoever reads none pays none."""
    cfg = running.tiny(implementation="")
    role, step = layer_roles(cfg)[4], make_step([Chunk(0, [1] * 16, 0, [0, 1, 2, 3])], cfg, rows=16, seqs=1, pages=4)
    shape = (16, cfg.index_n_heads, cfg.index_head_dim)
    query = Query(np.zeros(shape, np.float32), np.zeros(shape[:2], np.float32))

    def program(read):
        def run(query, step, pages):
            return read(select(query, Published(), step, make_tiles(step, 16), pages, role, cfg))

        pages = jax.ShapeDtypeStruct((4, cache_layout(cfg).page_bytes), np.uint8)
        return jax.jit(run).lower(query, step, pages).compile().as_text()

    sorts = re.compile(r"TopK|\bsort\(")
    assert not sorts.search(program(lambda p: (p.selected_TxE, p.pool_TxB)))
    assert sorts.search(program(lambda p: p.selection_TxK)), "what the first line looks for"


# Six blocks for four entries: the kernels find the top-k of the candidate source without a matrix of its scores.
TRIMMED = running.tiny(candidate_topk_blocks=6, scratch_bytes=2**10)


@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param(TRIMMED, id="trimmed", marks=pytest.mark.smoke),
        pytest.param(CFG, id="scored", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("layer", "rows"), [(4, 5), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(5, 5, marks=pytest.mark.slow)]
)
def test_the_kernels_select_what_the_plain_form_selects(cfg, layer, rows):
    """Interpreted, with ties and both zeros: an index source, the candidate source, a layer that reads its pool."""
    draws, ways = np.random.default_rng(layer), (("xla", False), ("pallas_triton", False), ("pallas_triton", True))
    for start in (0, 5, 60):
        plain, *kernels = compare(cfg, start, rows, draws, 2, layer=layer, ways=ways)
        for ours in kernels:
            for name in ("selection_TxK", "candidates_TxC"):
                assert np.array_equal(getattr(plain, name), getattr(ours, name)), (start, name, plain, ours)
        assert start < 60 or (plain.selection_TxK[:, 0] >= 0).all()


@pytest.mark.parametrize("implementation", ["xla", pytest.param("pallas_triton", marks=pytest.mark.slow)])
def test_padding_rows_select_nothing(implementation):
    """A bucket's spare rows belong to no sequence: their lists would be another row's, read in vain by a kernel."""
    cfg = CFG.replace(implementation=implementation, interpret=implementation != "xla")
    role = layer_roles(cfg)[4]
    chunks = [Chunk(slot, [1] * rows, 20, range(4 * slot, 4 * slot + 4)) for slot, rows in enumerate((3, 2))]
    step = make_step(chunks, cfg, rows=8, seqs=2, pages=4)
    shape = (8, cfg.index_n_heads, cfg.index_head_dim)
    query = Query(np.ones(shape, np.float32), np.ones(shape[:2], np.float32))
    pages = np.zeros((8, cache_layout(cfg).page_bytes), np.uint8)
    tiled = jax.jit(lambda query, step: select(query, Published(), step, make_tiles(step, 4), pages, role, cfg))
    picked = tiled(query, step)
    for lists in (np.asarray(picked.selection_TxK), np.asarray(picked.candidates_TxC)):
        assert (lists[:5] >= 0).any(axis=1).all() and (lists[5:] == -1).all(), lists


def test_stale_keys_reach_a_layer_that_reads_a_pool():
    """The served step follows the released code like the traced one, whichever way the pool is scored."""
    draws = np.random.default_rng(0)
    for start in range(30, 90, 4):
        whole, pooled = compare(STALE, start, 1, draws, CFG.index_head_dim)
        assert np.array_equal(whole.selection_TxK, pooled.selection_TxK), (start, whole, pooled)
