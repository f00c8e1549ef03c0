"""Sparse attention over every kind of source against the loop oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.numerics.formats import get_format
from dsflash_jax.ops.rows import read_rows, write_bytes
from dsflash_jax.ops.sparse_attention import (
    BandSource,
    MaskedTableSource,
    RowSource,
    TableSource,
    attend,
    sink_softmax,
    sparse_attention,
)
from tests.oracles.attention import sparse_attention as oracle
from tests.oracles.attention import window_positions
from tests.oracles.quant import unpack_row

pytestmark = pytest.mark.smoke
RNG = np.random.default_rng(2)
FP32 = get_format("fp32")
ATOL = 2e-6


def tiles_of(sizes, width):
    """Tiles of `width` rows for sequences of the given numbers of rows, as `sparse_attention` takes them."""
    rows, seq, place, first = [], [], [], 0
    for s, size in enumerate(sizes):
        for at in range(0, size, width):
            live = [first + at + i if at + i < size else -1 for i in range(width)]
            place += [len(rows) * width + i for i, r in enumerate(live) if r >= 0]
            rows.append(live)
            seq.append(s)
        first += size
    return np.array(rows, np.int32), np.array(seq, np.int32), np.array(place, np.int32)


@functools.partial(jax.jit, static_argnames=("scale", "scratch"))
def attention(q, sources, sink, tiles, scale=0.3, scratch=2**20):
    """The public function under jit, as the model calls it."""
    return sparse_attention(q, sources, sink, tiles, scale=scale, scratch_bytes=scratch)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def queries(count, heads=3, width=16):
    return normal(count, heads, width)


def picks(count, k, rows):
    """Random row numbers with repeats, some absent, one query without any row, one with absent rows first."""
    index = RNG.integers(-1, rows, (count, k)).astype(np.int32)
    index[0] = -1
    index[-1, : k - 1], index[-1, -1] = -1, rows - 1
    return index


def arena_of(table, page_rows, margin):
    """Rows of float32 packed into shuffled pages with garbage around them: (arena, page [N], offset [N])."""
    n, nbytes = len(table), FP32.row_bytes(table.shape[1])
    pages = -(-n // page_rows)
    order = RNG.permutation(pages + 2)[:pages].astype(np.int32)
    page, offset = order[np.arange(n) // page_rows], (margin + np.arange(n) % page_rows * nbytes).astype(np.int32)
    arena = np.full((pages + 2, margin + page_rows * nbytes + 5), 0xFF, np.uint8)
    arena = write_bytes(jnp.asarray(arena), page, offset, FP32.pack(jnp.asarray(table)))
    return arena, page, offset


@pytest.mark.parametrize("scratch", [1, 3000, 2**20])
@pytest.mark.parametrize(("count", "k", "rows", "width"), [(1, 1, 1, 1), (7, 5, 11, 4), (5, 70, 20, 8)])
def test_rows_picked_from_pages(count, k, rows, width, scratch):
    """RowSource: any page order, garbage between rows, repeats count twice, -1 first or alone, any budget (B42)."""
    q, table, sink = queries(count), normal(rows, 16), normal(3)
    index = picks(count, k, rows)
    arena, page, offset = arena_of(table, 3, 7)
    source = RowSource(arena, np.where(index >= 0, page[index], -1), offset[index], FP32, 16)
    ours = attention(q, [source], sink, tiles_of([count], width), scale=0.25, scratch=scratch)
    np.testing.assert_allclose(ours, oracle(q, table, index, sink, 0.25), rtol=0, atol=ATOL)
    assert (np.asarray(ours)[(index < 0).all(axis=1)] == 0).all()


def masked(tables, index):
    """A MaskedTableSource of the rows that `index` lists, -1 = none."""
    selected = np.zeros((index.shape[0], tables.shape[1]), bool)
    for row, picked in zip(selected, index, strict=True):
        row[picked[picked >= 0]] = True
    return MaskedTableSource(tables, selected, tables.shape[1])


@pytest.mark.parametrize("scratch", [1, 2**20])
@pytest.mark.parametrize("kind", [TableSource, MaskedTableSource])
@pytest.mark.parametrize(("sizes", "k", "rows"), [((5,), 3, 9), ((4, 1, 6), 4, 40), ((9, 7), 6, 520)])
def test_rows_picked_from_tables(sizes, k, rows, kind, scratch):
    """One table per sequence. 520 rows take the masked form's prefixes: the first sequence needs only the shortest."""
    count, owner = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
    q, sink, tables = queries(count), normal(3), normal(len(sizes), rows, 16)
    reach = np.where((owner == 0) & (rows > 100), 100, rows)
    index = np.stack([np.sort(RNG.choice(reach[t], k, replace=False)) for t in range(count)]).astype(np.int32)
    index[1, 1:], index[2] = -1, -1
    source = masked(tables, index) if kind is MaskedTableSource else kind(tables, index)
    ours = attention(q, [source], sink, tiles_of(sizes, 4), scratch=scratch)
    for t in range(count):
        expected = oracle(q[t : t + 1], tables[owner[t]], index[t : t + 1], sink, 0.3)[0]
        np.testing.assert_allclose(ours[t], expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize(("tile", "scratch"), [(1, 2**20), (4, 1), (4, 2**20)])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_window_band(window, tile, scratch):
    """B49: the query at p sees exactly max(0, p - W + 1) .. p, wherever the tile borders fall."""
    count = 11
    q, table, sink = queries(count), normal(count, 16), normal(3)
    index = np.stack([window_positions(p, window) for p in range(count)])
    first = np.maximum(np.arange(count) - window + 1, 0).astype(np.int32)
    source = BandSource(table, first, np.arange(count, dtype=np.int32), window)
    ours = attention(q, [source], sink, tiles_of([count], tile), scratch=scratch)
    np.testing.assert_allclose(ours, oracle(q, table, index, sink, 0.3), rtol=0, atol=ATOL)


def test_all_sources_share_one_softmax():
    """Window, picked rows and a table together equal one list of rows; a key seen by two sources counts twice."""
    count, window = 6, 3
    q, sink = queries(count), normal(3)
    near, far, table = (normal(n, 16) for n in (count, 9, 5))
    far_index, table_index = picks(count, 4, 9), picks(count, 2, 5)
    arena, page, offset = arena_of(far, 2, 0)
    first = np.maximum(np.arange(count) - window + 1, 0).astype(np.int32)
    sources = [
        BandSource(near, first, np.arange(count, dtype=np.int32), window),
        RowSource(arena, np.where(far_index >= 0, page[far_index], -1), offset[far_index], FP32, 16),
        TableSource(table[None], table_index),
    ]
    ours = attention(q, sources, sink, tiles_of([count], 4))
    index = [np.stack([window_positions(p, window) for p in range(count)])]
    index += [np.where(far_index >= 0, far_index + count, -1), np.where(table_index >= 0, table_index + count + 9, -1)]
    expected = oracle(q, np.concatenate([near, far, table]), np.concatenate(index, axis=1), sink, 0.3)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("kind", ["rows", "table", "masked", "band"])
def test_garbage_in_rows_that_nobody_picks_is_not_read(kind):
    """B53: rows outside the valid ones hold NaN; weights of zero do not hide it, the rows must not take part."""
    q, sink = queries(4), np.zeros(3, np.float32)
    table = normal(8, 16)
    table[[0, 5, 6, 7]] = np.nan
    index = np.array([[1, 2], [2, -1], [-1, -1], [3, 4]], np.int32)
    if kind == "rows":
        arena, page, offset = arena_of(table, 3, 0)
        source = RowSource(arena, np.where(index >= 0, page[index], -1), offset[index], FP32, 16)
    elif kind == "table":
        source = TableSource(table[None], index)
    elif kind == "masked":
        source = masked(table[None], index)
    else:
        index = np.array([[1, -1], [1, 2], [2, 3], [3, 4]], np.int32)
        source = BandSource(table, np.array([1, 1, 2, 3], np.int32), np.array([1, 2, 3, 4], np.int32), 2)
    ours = attention(q, [source], sink, tiles_of([4], 4))
    np.testing.assert_allclose(ours, oracle(q, table, index, sink, 0.3), rtol=0, atol=ATOL)


def test_a_row_with_leading_absent_keys():
    """B45: sixteen -1 and then values 2 and 4 with equal logits give 3; a row of -1 only gives 0, not a mean."""
    values = np.array([[2.0], [4.0]], np.float32)
    index = np.full((2, 18), -1, np.int32)
    index[0, 16:] = 0, 1
    source = TableSource(values[None], index)
    sink = np.array([-np.inf], np.float32)
    out = attention(np.zeros((2, 1, 1), np.float32), [source], sink, tiles_of([2], 2), scale=1.0, scratch=99)
    assert np.asarray(out).ravel().tolist() == [3.0, 0.0]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("sink", "weight"), [(0, 1 / 4), (300, 0), (-np.inf, 1 / 3), (np.inf, 0), (np.log(5), 1 / 8)])
def test_the_sink_takes_weight_and_gives_no_value(sink, weight, parts):
    """B47: three keys of equal logits; split over 1, 2 or 3 sources the sink still counts once."""
    values = np.array([[1.0], [10.0], [100.0]], np.float32)
    cuts = np.array_split(np.arange(3), parts)
    sources = [TableSource(values[None], np.array([cut], np.int32)) for cut in cuts]
    sinks = np.array([sink], np.float32)
    out = attention(np.zeros((1, 1, 1), np.float32), sources, sinks, tiles_of([1], 1), scale=1.0)
    np.testing.assert_allclose(np.asarray(out).ravel(), [111 * weight], rtol=1e-6)


@pytest.mark.parametrize("sink", [0.0, -np.inf, 80.0])
def test_a_query_without_keys_gives_zero_and_zero_gradients(sink):
    """B46: output exactly 0, gradients 0 and not NaN, with and without a sink."""
    keys, valid = jnp.ones((2, 3, 4)), jnp.array([[False] * 3, [True, False, True]])

    def total(q, keys, sink):
        return jnp.sum(attend(q, [(keys, valid)], sink, 0.5)[0])

    out = attend(jnp.ones((2, 1, 4)), [(keys, valid)], jnp.array([sink]), 0.5)
    assert (np.asarray(out[0]) == 0).all() and np.isfinite(out).all()
    for grad in jax.grad(total, argnums=(0, 1, 2))(jnp.ones((2, 1, 4)), keys, jnp.array([sink])):
        assert (np.asarray(grad) == 0).all()


def test_softmax_statistics():
    """The denominator includes the sink once; a masked row's is 1 (B47: what a split would need to be merged)."""
    logits = np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]], np.float32)
    valid = np.array([[True, False, True], [False] * 3])
    weights, denominator = sink_softmax(logits, valid, np.array([[0.5], [0.5]], np.float32))
    np.testing.assert_allclose(weights, [[np.exp(-2), 0, 1], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(denominator, [[np.exp(-2) + 1 + np.exp(-2.5)], [1]], rtol=1e-6)


def test_large_logits_stay_finite():
    q = np.full((1, 1, 4), 1e18, np.float32)
    keys = np.array([[1e18] * 4, [-1e18] * 4, [0.0] * 4], np.float32)
    index = np.array([[0, 1, 2]], np.int32)
    out = attention(q, [TableSource(keys[None], index)], np.zeros(1, np.float32), tiles_of([1], 1), scale=0.5)
    assert np.asarray(out).ravel().tolist() == [np.float32(1e18)] * 4


def test_bfloat16_rounds_probabilities_but_not_their_sum():
    """Against float64 with the named roundings: almost every output bit by bit; with other roundings many differ."""
    count, keys = 40, 60
    q, table = queries(count).astype(jnp.bfloat16), bf16(normal(keys, 16))
    index, tiles = np.tile(np.arange(keys, dtype=np.int32), (count, 1)), tiles_of([count], 4)
    ours = attention(q, [TableSource(table[None], index)], np.zeros(3, np.float32), tiles, scale=0.25)
    assert ours.dtype == jnp.bfloat16
    logits = np.einsum("thd,kd->thk", np.asarray(q, np.float64), table.astype(np.float64)) * 0.25
    top = logits.max(axis=-1, keepdims=True)
    exact = np.exp(logits - top)
    rounded, sink = bf16(exact.astype(np.float32)).astype(np.float64), np.exp(-top)

    def wrong(weights, total):
        out = bf16((weights @ table / (total.sum(axis=-1, keepdims=True) + sink)).astype(np.float32))
        return np.mean(np.asarray(ours, np.float32) != out)

    assert wrong(rounded, exact) < 0.005
    assert wrong(exact, exact) > 0.03 and wrong(rounded, rounded) > 0.03


def bf16(x):
    """float32 values rounded to bfloat16."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


@pytest.mark.parametrize("name", ["fp4_e4m3", "mxfp4", "mxfp8", "fp8_fp32", "bf16", "fp32"])
def test_rows_come_back_from_any_page_order(name):
    """B43: position-coded rows with their own scales, written and read through shuffled pages, at odd byte offsets."""
    fmt, rows, width = get_format(name), 12, 32
    values = (np.arange(rows)[:, None] + 1) * normal(rows, width)
    packed = np.asarray(jax.jit(fmt.pack)(jnp.asarray(values, jnp.float32)))
    page = np.repeat([5, 0, 3], 4).astype(np.int32)
    offset = np.tile(3 + np.arange(4) * packed.shape[1], 3).astype(np.int32)
    arena = np.full((6, 3 + 4 * packed.shape[1] + 9), 0xFF, np.uint8)
    written = write_bytes(jnp.asarray(arena), page, offset, packed)
    shuffled = RNG.permutation(rows)
    back = jax.jit(read_rows, static_argnums=(3, 4))(written, page[shuffled], offset[shuffled], fmt, width)
    expected = np.stack([unpack_row(name, row.tobytes(), width) for row in packed])
    assert np.array_equal(back, expected[shuffled])
    untouched = np.ones(arena.shape, bool)
    for p, o in zip(page, offset, strict=True):
        untouched[p, o : o + packed.shape[1]] = False
    assert (np.asarray(written)[untouched] == 0xFF).all()


def test_a_negative_page_writes_nothing():
    """B100: in JAX index -1 wraps to the last page even with mode="drop"; padding must leave every byte alone."""
    arena = jnp.full((3, 8), 7, jnp.uint8)
    rows = jnp.zeros((3, 4), jnp.uint8)
    out = np.asarray(write_bytes(arena, jnp.array([-1, 1, -1]), jnp.array([0, 4, 4]), rows))
    assert out[1].tolist() == [7] * 4 + [0] * 4 and (out[[0, 2]] == 7).all()
    assert (np.asarray(arena.at[-1].set(0, mode="drop"))[-1] == 0).all(), "the JAX behaviour this guards against"


def test_a_negative_page_reads_exactly_zero():
    arena = jnp.full((2, FP32.row_bytes(4)), 0xFF, jnp.uint8)
    out = np.asarray(read_rows(arena, jnp.array([-1, 0]), jnp.array([0, 0]), FP32, 4))
    assert (out[0] == 0).all() and np.isnan(out[1]).all()


def test_addresses_stay_inside_32_bits():
    """B35: page and offset are separate numbers; only their product passes 2^31, and it is never formed.

    The arena meets nothing but one gather and one scatter with two indices each: flattened, an index would not fit.
    """
    arena = jax.ShapeDtypeStruct((40_000, 113_920), jnp.uint8)
    place = jax.ShapeDtypeStruct((7,), jnp.int32)
    rows = jax.ShapeDtypeStruct((7, 288), jnp.uint8)
    assert arena.shape[0] * arena.shape[1] > 2**31
    read = jax.make_jaxpr(lambda a, p, o: read_rows(a, p, o, get_format("fp4_e4m3"), 512))(arena, place, place)
    written = jax.make_jaxpr(write_bytes)(arena, place, place, rows)
    expected = ((read, "gather", "start_index_map"), (written, "scatter", "scatter_dims_to_operand_dims"))
    for jaxpr, name, dims in expected:
        users = [e for e in jaxpr.jaxpr.eqns if jaxpr.jaxpr.invars[0] in e.invars]
        assert [e.primitive.name for e in users] == [name]
        assert getattr(users[0].params["dimension_numbers"], dims) == (0, 1)
        assert users[0].invars[1].aval.dtype == jnp.int32 and users[0].invars[1].aval.shape == (7, 2)
