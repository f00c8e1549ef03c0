"""Where every byte lies: the released offsets, and arithmetic that never lets two rows touch."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax.cache.addressing import paged_rows
from dsflash_jax.cache.layout import cache_layout, pages_for, ring_rows, state_rows
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.numerics.format_table import FORMAT_NAMES
from pallas_kernels.common.gather import read_tables

RNG = np.random.default_rng(0)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RELEASED = ModelConfig.from_json(CONFIGS / "v41_flash.json")
TINY = ModelConfig.from_json(CONFIGS / "tiny.json")
LAB = ModelConfig.from_json(CONFIGS / "lab.json")


def test_released_page():
    layout = cache_layout(RELEASED)
    assert layout.page_bytes == 113_920 == 128 * 890
    assert [(m.layer, m.kind, m.offset, m.row_bytes, m.rows_per_page) for m in layout.members] == [
        (2, "main", 0, 288, 64), (2, "index", 18_432, 68, 64),
        (8, "main", 22_784, 288, 64), (8, "index", 41_216, 68, 64),
        (14, "main", 45_568, 288, 64), (14, "index", 64_000, 68, 64),
        (20, "main", 68_352, 288, 128), (20, "index", 105_216, 68, 128),
    ]  # fmt: skip


def test_released_ring_and_state():
    layout = cache_layout(RELEASED)
    assert (layout.ring_rows, layout.ring[0].row_bytes, layout.ring[0].nbytes) == (134, 528, 70_752)
    assert sum(member.nbytes for member in layout.ring[:20]) == 1_415_040
    assert layout.ring_bytes - layout.draft_ring_bytes == 2_830_080
    assert layout.draft_ring_bytes == 3 * 70_752
    assert (layout.state_owners, layout.state_rows, layout.state_width) == ((2, 8, 14), 8, 1024)
    assert layout.state_bytes == 98_304


def every_byte_once(members, size):
    """Bytes start..end of every row of every member, in order, must tile 0..size."""
    owner = np.zeros(size, int)
    for member in members:
        for row in range(member.rows_per_page):
            start = member.offset + row * member.row_bytes
            owner[start : start + member.row_bytes] += 1
    return owner.min(initial=1) == owner.max(initial=1) == 1


@given(
    ratios=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
    page=st.sampled_from([8, 16, 24, 128]),
    formats=st.tuples(*[st.sampled_from(FORMAT_NAMES)] * 3),
)
def test_rows_tile_page_and_ring_without_gap_or_overlap(ratios, page, formats):
    encoder, decoder = ratios
    main, index, window = formats
    cfg = TINY.replace(
        compress_ratios=(0, 0, encoder, encoder, decoder, decoder), page_size=page,
        main_format=main, index_format=index, window_format=window,
    )  # fmt: skip
    layout = cache_layout(cfg)
    assert every_byte_once(layout.members, layout.page_bytes)
    assert every_byte_once(layout.ring, layout.ring_bytes)
    for member in layout.members:
        assert member.rows_per_page * member.tokens_per_row == page


def test_only_owners_have_members():
    layout = cache_layout(TINY)
    assert [(m.layer, m.kind) for m in layout.members] == [(2, "main"), (2, "index"), (4, "main"), (4, "index")]
    assert layout.member(4, "index") is layout.members[3]
    for layer, kind in ((3, "main"), (5, "index"), (2, "window")):
        with pytest.raises(KeyError, match=f"layer {layer} owns no {kind} rows"):
            layout.member(layer, kind)
    assert [m.layer for m in layout.ring] == list(range(6))  # every layer has a window


def test_only_pooled_owners_keep_state():
    assert cache_layout(TINY).state_owners == (2,)
    assert cache_layout(LAB).state_owners == (1,)
    assert cache_layout(TINY.replace(compress_ratios=(0, 0, 1, 1, 1, 1))).state_bytes == 0


@pytest.mark.parametrize(
    ("drafts", "ratio", "rows"),
    [(0, 1, 8), (5, 2, 8), (6, 2, 8), (7, 2, 16), (5, 4, 16), (5, 8, 16), (14, 2, 16), (15, 2, 32)],
)
def test_state_holds_an_open_group_and_a_rejected_block(drafts, ratio, rows):
    cfg = TINY.replace(num_draft_tokens=drafts, compress_ratios=(0, 0, ratio, ratio, 1, 1))
    assert state_rows(cfg) == rows
    # Before verifying, ratio - 1 rows of an open group are needed; drafts + 1 rows are written and may be rejected.
    assert rows >= ratio - 1 + drafts + 1
    assert rows >= max(8, drafts + 2)


def test_ring_keeps_the_window_and_a_rejected_block():
    assert ring_rows(RELEASED) == 128 + 6
    assert ring_rows(TINY.replace(num_draft_tokens=0)) == 5


def test_address_goes_through_the_block_table():
    member = cache_layout(TINY).member(2, "index")  # 4 rows of 17 B per page
    tables = np.array([[1, 5, 6], [7, 3, -1]], np.int32)
    entries = np.array([[0, 3, 4, 7, 8, 12, -1]] * 2, np.int32)
    arena = jnp.zeros((8, cache_layout(TINY).page_bytes), jnp.uint8)
    page, offset = paged_rows(member, arena, jnp.asarray(tables), np.array([0, 1], np.int32)).address(entries)
    assert page.tolist() == [[1, 1, 5, 5, 6, -1, -1], [7, 7, 3, 3, -1, -1, -1]]
    assert (offset[1, :4] - member.offset).tolist() == [0, 51, 0, 51]


def test_ring_rows_of_consecutive_positions_tile_the_layers_rows():
    member = cache_layout(TINY).ring[3]  # 10 rows of 33 B
    rows, end = member.rows_per_page, member.offset + member.nbytes
    offsets = [member.row_offset(member.ring_row(position)) for position in range(25, 25 + rows)]
    assert sorted(offsets) == list(range(member.offset, end, member.row_bytes))
    assert member.ring_row(25) == member.ring_row(25 + rows) == 5
    assert member.ring_row(np.array([9, 10])).tolist() == [9, 0]


def test_state_rows_follow_the_position():
    layout = cache_layout(TINY)
    assert [layout.state_row(position) for position in (0, 7, 8, 21)] == [0, 7, 0, 5]
    assert layout.state_row(np.array([8, 15])).tolist() == [0, 7]


def test_a_whole_member_is_its_rows_in_order_of_page_and_row():
    member = cache_layout(TINY).member(4, "index")
    values = RNG.normal(size=(3, member.rows_per_page, member.width)).astype(np.float32)
    packed = np.asarray(jax.jit(member.format.pack)(values))
    pages = np.zeros((3, cache_layout(TINY).page_bytes), np.uint8)
    for page, row in np.ndindex(packed.shape[:2]):
        start = member.row_offset(row)
        pages[page, start : start + member.row_bytes] = packed[page, row]
    table = jnp.array([[2, 0]], jnp.int32)
    rows = jax.jit(lambda pages: read_tables(paged_rows(member, pages, table, table[0])))(pages)
    expected = jax.jit(member.format.fake_quant)(values)[table].reshape(1, -1, member.width)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("cfg", [RELEASED, TINY], ids=["released", "tiny"])
def test_pages_for_counts_started_pages(cfg):
    page = cfg.page_size
    assert [pages_for(cfg, n) for n in (0, 1, page - 1, page, page + 1, 10 * page)] == [0, 1, 1, 1, 2, 10]


def test_the_cache_has_exactly_these_bytes():
    layout = cache_layout(TINY)
    cache = ModelCache.empty(TINY, num_pages=3, num_slots=2)
    assert cache.pages.shape == (3, layout.page_bytes)
    assert cache.ring.shape == (2, layout.ring_bytes)
    assert cache.state.nbytes == 2 * layout.state_bytes
    assert cache.length.tolist() == [0, 0]


def test_an_arena_may_be_wider_than_the_group_but_not_narrower():
    need = cache_layout(TINY).page_bytes
    assert ModelCache.abstract(TINY, 3, 2, page_bytes=need + 100).pages.shape == (3, need + 100)
    with pytest.raises(ValueError, match=rf"page_bytes={need - 1} is smaller than the global group's page of {need}"):
        ModelCache.abstract(TINY, 3, 2, page_bytes=need - 1)
