"""`sparse_mla` on float32 rows as a model calls it: every way of reading keys, many sequences, any budget."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.numerics.formats import get_format
from pallas_kernels.common.formats import PagedRows, RowLayout
from pallas_kernels.common.gather import read_rows
from pallas_kernels.kv_insert.api import kv_insert
from pallas_kernels.kv_insert.insert import Insert
from pallas_kernels.sparse_mla import sources
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.attention import attend, sink_softmax
from pallas_kernels.sparse_mla.row_set import RowSet
from tests.oracles.attention import sparse_attention as oracle
from tests.oracles.attention import window_positions
from tests.oracles.quant import unpack_row

RNG = np.random.default_rng(2)
WAYS = ("Picked", "Table", "MaskedTable")
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
def attention(q, row_sets, sink, tiles, scale=0.3, scratch=2**20):
    """The public function under jit, as the model calls it."""
    options = {"scale": scale, "scratch_bytes": scratch, "implementation": "xla"}
    return sparse_mla(jnp.asarray(q), row_sets, jnp.asarray(sink), tiles=tiles, **options)


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


def listed(tables, index, owner=0, selected=None, run=False):
    """The rows `index` of float32 tables [S, N, D] (or [N, D]), one page each; owner: sequence of the queries."""
    tables = np.asarray(tables)
    tables = tables[None] if tables.ndim == 2 else tables
    seqs, count, width = tables.shape
    pages, owner = np.arange(seqs, dtype=np.int32)[:, None], np.broadcast_to(np.int32(owner), len(index))
    rows = PagedRows(tables.reshape(seqs, -1), pages, owner, RowLayout("fp32", width, 0, count))
    return RowSet(rows, np.asarray(index, np.int32), selected, run)


def paged(table, index, page_rows, margin):
    """The same of one sequence, packed into shuffled pages of bytes with garbage around them."""
    n, nbytes = len(table), 4 * table.shape[1]
    pages = -(-n // page_rows)
    order = RNG.permutation(pages + 2)[:pages].astype(np.int32)
    arena = np.full((pages + 2, margin + page_rows * nbytes + 5), 0xFF, np.uint8)
    for row in range(n):
        start = margin + row % page_rows * nbytes
        arena[order[row // page_rows], start : start + nbytes] = table[row].astype("<f4").view(np.uint8)
    layout = RowLayout("fp32", table.shape[1], margin, page_rows)
    return RowSet(PagedRows(arena, order[None], np.zeros(len(index), np.int32), layout), np.asarray(index, np.int32))


def band(table, window, first=0):
    """A sliding window as a run: query t sees rows max(first, t - window + 1) .. t."""
    position = np.arange(len(table))[:, None] - window + 1 + np.arange(window)
    return listed(table, np.where(position >= first, position, -1), run=True)


def mask_of(index, rows):
    """The lists as a mask over `rows` rows."""
    selected = np.zeros((len(index), rows), bool)
    for row, picked in zip(selected, index, strict=True):
        row[picked[picked >= 0]] = True
    return selected


def force(monkeypatch, way):
    """Makes calls read keys in the named way where they can."""
    monkeypatch.setattr(sources, "DENSE_TILE_ROWS", 1)
    monkeypatch.setattr(sources, "unpacks_table", lambda *_: way != "Picked")
    jax.clear_caches()


@pytest.mark.smoke
@pytest.mark.parametrize("scratch", [1, 3000, 2**20])
@pytest.mark.parametrize(("count", "k", "rows", "width"), [(1, 1, 1, 1), (7, 5, 11, 4), (5, 70, 20, 8)])
def test_rows_picked_from_pages(count, k, rows, width, scratch):
    """Any page order, garbage between rows, repeats count twice, -1 first or alone, any budget (B42)."""
    q, table, sink = queries(count), normal(rows, 16), normal(3)
    index = picks(count, k, rows)
    ours = attention(q, [paged(table, index, 3, 7)], sink, tiles_of([count], width), scale=0.25, scratch=scratch)
    np.testing.assert_allclose(ours, oracle(q, table, index, sink, 0.25), rtol=0, atol=ATOL)
    assert (np.asarray(ours)[(index < 0).all(axis=1)] == 0).all()


@pytest.mark.parametrize("scratch", [pytest.param(1, marks=pytest.mark.slow), 2**20])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sizes", "k", "rows"), [((5,), 3, 9), ((4, 1, 6), 4, 40), ((9, 7), 6, 520)])
def test_rows_of_many_sequences(sizes, k, rows, way, scratch, monkeypatch):
    """One table per sequence. 520 rows take the masked form's prefixes: the first sequence needs only the shortest."""
    force(monkeypatch, way)
    count, owner = sum(sizes), np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    q, sink, tables = queries(count), normal(3), normal(len(sizes), rows, 16)
    reach = np.where((owner == 0) & (rows > 100), 100, rows)
    index = np.stack([np.sort(RNG.choice(reach[t], k, replace=False)) for t in range(count)]).astype(np.int32)
    index[1, 1:], index[2] = -1, -1
    row_set = listed(tables, index, owner, mask_of(index, rows) if way == "MaskedTable" else None)
    assert type(sources.choose(row_set, 4, True, scratch)).__name__ == way
    ours = attention(q, [row_set], sink, tiles_of(sizes, 4), scratch=scratch)
    for t in range(count):
        expected = oracle(q[t : t + 1], tables[owner[t]], index[t : t + 1], sink, 0.3)[0]
        np.testing.assert_allclose(ours[t], expected, rtol=0, atol=ATOL)


def test_tiles_of_mixed_sequences_where_none_are_named():
    """Queries of three sequences in one tile: each reads its own rows, in whatever order they come."""
    owner = np.array([2, 0, 1, 1, 0, 2, 2], np.int32)
    q, sink, tables = queries(7), normal(3), normal(3, 9, 16)
    index = picks(7, 4, 9)
    ours = attention(q, [listed(tables, index, owner)], sink, None)
    for t in range(7):
        expected = oracle(q[t : t + 1], tables[owner[t]], index[t : t + 1], sink, 0.3)[0]
        np.testing.assert_allclose(ours[t], expected, rtol=0, atol=ATOL)


@pytest.mark.smoke
@pytest.mark.parametrize(("tile", "scratch"), [(1, 2**20), (4, 1), (4, 2**20)])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_window_band(window, tile, scratch):
    """B49: the query at p sees exactly max(0, p - W + 1) .. p, wherever the tile borders fall."""
    count = 11
    q, table, sink = queries(count), normal(count, 16), normal(3)
    index = np.stack([window_positions(p, window) for p in range(count)])
    ours = attention(q, [band(table, window)], sink, tiles_of([count], tile), scratch=scratch)
    np.testing.assert_allclose(ours, oracle(q, table, index, sink, 0.3), rtol=0, atol=ATOL)


@pytest.mark.smoke
def test_both_sets_share_one_softmax():
    """A window and picked rows together equal one list of rows; a key seen by both counts twice."""
    count, window = 6, 3
    q, sink = queries(count), normal(3)
    near, far = normal(count, 16), normal(9, 16)
    far[4] = near[2]
    far_index = picks(count, 4, 9)
    ours = attention(q, [band(near, window), paged(far, far_index, 2, 0)], sink, tiles_of([count], 4))
    index = [np.stack([window_positions(p, window) for p in range(count)])]
    index += [np.where(far_index >= 0, far_index + count, -1)]
    expected = oracle(q, np.concatenate([near, far]), np.concatenate(index, axis=1), sink, 0.3)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=ATOL)


@pytest.mark.smoke
@pytest.mark.parametrize("way", [*WAYS, "Band"])
def test_garbage_in_rows_that_nobody_picks_is_not_read(way, monkeypatch):
    """B53: rows outside the valid ones hold NaN; weights of zero do not hide it, the rows must not take part."""
    force(monkeypatch, way)
    q, sink = queries(4), np.zeros(3, np.float32)
    table = normal(8, 16)
    table[[0, 5, 6, 7]] = np.nan
    index = np.array([[1, 2], [2, -1], [-1, -1], [3, 4]], np.int32)
    if way == "Band":
        index = np.array([[-1, 1], [1, 2], [2, 3], [3, 4]], np.int32)
    row_set = listed(table, index, selected=mask_of(index, 8) if way == "MaskedTable" else None, run=way == "Band")
    assert type(sources.choose(row_set, 4, True, 2**20)).__name__ == way
    ours = attention(q, [row_set], sink, tiles_of([4], 4))
    np.testing.assert_allclose(ours, oracle(q, table, index, sink, 0.3), rtol=0, atol=ATOL)


@pytest.mark.smoke
def test_a_row_with_leading_absent_keys():
    """B45: sixteen -1 and then values 2 and 4 with equal logits give 3; a row of -1 only gives 0, not a mean."""
    values = np.array([[2.0], [4.0]], np.float32)
    index = np.full((2, 18), -1, np.int32)
    index[0, 16:] = 0, 1
    sink = np.array([-np.inf], np.float32)
    out = attention(
        np.zeros((2, 1, 1), np.float32), [listed(values, index)], sink, tiles_of([2], 2), scale=1.0, scratch=99
    )
    assert np.asarray(out).ravel().tolist() == [3.0, 0.0]


@pytest.mark.smoke
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("sink", "weight"), [(0, 1 / 4), (300, 0), (-np.inf, 1 / 3), (np.inf, 0), (np.log(5), 1 / 8)])
def test_the_sink_takes_weight_and_gives_no_value(sink, weight, parts):
    """B47: three keys of equal logits; split over 1 or 2 sets the sink still counts once."""
    values = np.array([[1.0], [10.0], [100.0]], np.float32)
    cuts = np.array_split(np.arange(3), parts)
    sets = [listed(values, cut[None]) for cut in cuts]
    sinks = np.array([sink], np.float32)
    out = attention(np.zeros((1, 1, 1), np.float32), sets, sinks, tiles_of([1], 1), scale=1.0)
    np.testing.assert_allclose(np.asarray(out).ravel(), [111 * weight], rtol=1e-6)


@pytest.mark.smoke
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


@pytest.mark.smoke
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
    out = attention(q, [listed(keys, index)], np.zeros(1, np.float32), tiles_of([1], 1), scale=0.5)
    assert np.asarray(out).ravel().tolist() == [np.float32(1e18)] * 4


@pytest.mark.smoke
def test_bfloat16_rounds_probabilities_but_not_their_sum():
    """Against float64 with the named roundings: almost every output bit by bit; with other roundings many differ."""
    count, keys = 40, 60
    q, table = queries(count).astype(jnp.bfloat16), bf16(normal(keys, 16))
    index, tiles = np.tile(np.arange(keys, dtype=np.int32), (count, 1)), tiles_of([count], 4)
    ours = attention(q, [listed(table, index)], np.zeros(3, np.float32), tiles, scale=0.25)
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
    values = ((np.arange(rows)[:, None] + 1) * normal(rows, width)).astype(np.float32)
    packed = np.asarray(jax.jit(fmt.pack)(jnp.asarray(values)))
    layout, table, seq = RowLayout(name, width, 3, 4), np.array([[5, 0, 3]], np.int32), np.zeros(rows, np.int32)
    arena = np.full((6, 3 + 4 * packed.shape[1] + 9), 0xFF, np.uint8)
    (written,) = kv_insert(
        (jnp.asarray(arena),),
        [Insert(jnp.asarray(values), None, None, seq * 0 + np.arange(rows, dtype=np.int32), seq, table, layout)],
    )
    shuffled = RNG.permutation(rows).astype(np.int32)
    page, offset = (x[:, 0] for x in PagedRows(arena, jnp.asarray(table), seq, layout).address(shuffled[:, None]))
    back = jax.jit(read_rows, static_argnums=3)(written, page, offset, layout)
    expected = np.stack([unpack_row(name, row.tobytes(), width) for row in packed])
    assert np.array_equal(back, expected[shuffled])
    untouched = np.ones(arena.shape, bool)
    untouched[table[0], 3 : 3 + 4 * packed.shape[1]] = False
    assert (np.asarray(written)[untouched] == 0xFF).all()


@pytest.mark.smoke
def test_a_negative_page_writes_nothing_and_reads_exactly_zero():
    """B100: in JAX index -1 wraps to the last page even with mode="drop"; padding must leave every byte alone."""
    arena, layout = jnp.full((3, 16), 0xFF, jnp.uint8), RowLayout("fp32", 4, 0, 1)
    table, seq, index = np.array([[-1, 1]], np.int32), np.zeros(3, np.int32), np.array([0, 1, -1], np.int32)
    (out,) = kv_insert((arena,), [Insert(jnp.zeros((3, 4)), None, None, index, seq, table, layout)])
    assert (np.asarray(out)[1] == 0).all() and (np.asarray(out)[[0, 2]] == 0xFF).all()
    assert (np.asarray(arena.at[-1].set(0, mode="drop"))[-1] == 0).all(), "the JAX behaviour this guards against"
    read = np.asarray(read_rows(arena, jnp.array([-1, 0]), jnp.array([0, 0]), layout))
    assert (read[0] == 0).all() and np.isnan(read[1]).all()


@pytest.mark.smoke
def test_addresses_stay_inside_32_bits():
    """B35: page and offset are separate numbers; only their product passes 2^31, and it is never formed.

    The arena meets nothing but one gather and one scatter with two indices each: flattened, an index would not fit.
    """
    arena = jax.ShapeDtypeStruct((40_000, 113_920), jnp.uint8)
    place = jax.ShapeDtypeStruct((7,), jnp.int32)
    values = jax.ShapeDtypeStruct((7, 512), jnp.float32)
    layout, table = RowLayout("fp4_e4m3", 512, 0, 64), jnp.arange(40_000, dtype=jnp.int32)[None]
    assert arena.shape[0] * arena.shape[1] > 2**31
    read = jax.make_jaxpr(lambda a, p, o: read_rows(a, p, o, layout))(arena, place, place)

    def write(arena, values, index):
        insert = Insert(values, None, None, index, jnp.zeros_like(index), table, layout)
        return kv_insert((arena,), [insert], implementation="xla")

    written = jax.make_jaxpr(write)(arena, values, place)
    for jaxpr, name, dims in (
        (read, "gather", "start_index_map"),
        (written, "scatter", "scatter_dims_to_operand_dims"),
    ):
        users = [e for e in jaxpr.jaxpr.eqns if jaxpr.jaxpr.invars[0] in e.invars]
        assert [e.primitive.name for e in users] == [name]
        assert getattr(users[0].params["dimension_numbers"], dims) == (0, 1)
        assert users[0].invars[1].aval.dtype == jnp.int32 and users[0].invars[1].aval.shape == (7, 2)
