"""`sparse_mla`: kernel (interpreted), XLA path and reference against one row at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.formats import FORMATS, PagedRows, RowLayout
from pallas_kernels.common.unpack import unpack_rows
from pallas_kernels.sparse_mla import pallas_triton, reference, sources
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.cases import CASES
from pallas_kernels.sparse_mla.config import SparseMlaConfig, default_config
from pallas_kernels.sparse_mla.row_set import RowSet
from tests.oracles.kernels_sparse_mla import sparse_mla as oracle
from tests.oracles.quant import pack_row, unpack_row

H, D, SCALE = 5, 32, 0.3
SMALL = SparseMlaConfig(block_heads=4, block_rows=8, chunks=2)  # heads and lists end inside a block
TILES = (np.array([[0, 1, 2, 3], [4, 5, -1, -1]], np.int32), np.array([0, 1], np.int32), np.arange(6, dtype=np.int32))
WAYS = ("reference", "xla", "kernel", "kernel split")


def mostly_slow(values, *fast):
    """All values as parameters; those that are not named as fast belong to the slow tests."""
    return [v if v in fast else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow)
            for v in values]  # fmt: skip


def run(q, sets, sink, way, **more):
    """One of the implementations, under jit as a user would."""
    if way == "reference":
        return np.asarray(jax.jit(functools.partial(reference.sparse_mla, scale=SCALE))(q, sets, sink), np.float64)
    if way == "xla":
        options = {"implementation": "xla"} | more
    else:
        config = dataclasses.replace(SMALL, splits=3 if "split" in way else 1)
        options = {"implementation": "pallas_triton", "interpret": True, "config": config}
    return np.asarray(jax.jit(functools.partial(sparse_mla, scale=SCALE, **options))(q, sets, sink), np.float64)


def packed(name, count, rng, width=D):
    """Packed rows uint8[count, row_bytes] of normal values."""
    rows = [pack_row(name, row) for row in rng.normal(size=(count, width)).astype(np.float32)]
    return np.stack([np.frombuffer(row, np.uint8) for row in rows])


def row_set(name, seqs, pages, per_page, picks, rng, margin=7):
    """(what the package takes, what the oracle takes): shuffled pages, 0xFF (NaN codes, NaN scales) wherever nothing
    is listed. Query 2 lists nothing, query 3 one row; rows repeat; the first sequence lacks its last page."""
    size = FORMATS[name].row_bytes(D)
    total = seqs * pages + 2
    arena = np.full((total, margin + per_page * size + 3), 0xFF, np.uint8)
    table = rng.permutation(total)[: seqs * pages].reshape(seqs, pages).astype(np.int32)
    seq = np.array([0, 0, 0, 0, seqs - 1, seqs - 1], np.int32)
    if pages > 1:
        table[0, -1] = -1
    index = rng.integers(-1, pages * per_page + 2, (6, picks)).astype(np.int32)
    index[2], index[3, :-1] = -1, -1
    index[3, -1], index[0, 0], index[0, -1] = 1, 2, 2
    for t in range(6):
        for row in index[t]:
            if 0 <= row < pages * per_page and table[seq[t], row // per_page] >= 0:
                start = margin + row % per_page * size
                arena[table[seq[t], row // per_page], start : start + size] = packed(name, 1, rng)[0]
    layout = RowLayout(name, D, margin, per_page)
    ours = RowSet(PagedRows(jnp.asarray(arena), jnp.asarray(table), jnp.asarray(seq), layout), jnp.asarray(index))
    plain = dict(arena=arena, table=table, seq=seq, index=index, format=name, width=D, offset=margin,
                 rows_per_page=per_page, row_bytes=size)  # fmt: skip
    return ours, plain


@functools.cache
def inputs(name, dtype=jnp.float32, seed=0):
    """A ring of one page per sequence and pages of the named format."""
    rng = np.random.default_rng(seed)
    near, near_plain = row_set("mxfp8", 2, 1, 13, 9, rng)
    far, far_plain = row_set(name, 2, 5, 4, 19, rng)
    q = jnp.asarray(rng.normal(size=(6, H, D)), dtype)
    return q, (near, far), jnp.asarray(rng.normal(size=H), jnp.float32), (near_plain, far_plain)


FAST = (("fp4_e4m3", "kernel split"), ("bf16", "xla"))


@pytest.mark.parametrize(("name", "way"), mostly_slow([(n, w) for n in FORMATS for w in WAYS], *FAST))
def test_equals_one_row_at_a_time(name, way):
    """Every format: NaN where nobody looks, absent pages, rows behind the table, repeats, a query with no row."""
    q, sets, sink, plain = inputs(name)
    ours = run(q, sets, sink, way)
    np.testing.assert_allclose(ours, oracle(np.asarray(q), plain, np.asarray(sink), SCALE), rtol=2e-5, atol=2e-5)
    assert (ours[2] == 0).all()


@pytest.mark.smoke
@pytest.mark.parametrize("way", mostly_slow(WAYS[1:], "kernel"))
def test_bfloat16_within_its_rounding(way):
    q, sets, sink, plain = inputs("fp4_e4m3", jnp.bfloat16)
    want = oracle(np.asarray(q, np.float32), plain, np.asarray(sink), SCALE)
    np.testing.assert_allclose(run(q, sets, sink, way), want, rtol=0, atol=2**-7 * np.abs(want).max())


@pytest.mark.parametrize("way", mostly_slow(WAYS, "xla", "kernel"))
def test_the_sink_takes_weight_and_gives_no_value(way):
    """Alone with one set, a sink per head; without any row the result is 0 and not NaN whatever the sink."""
    q, sets, _, plain = inputs("mxfp8")
    sinks = np.array([0.0, 300.0, np.inf, -np.inf, -300.0], np.float32)
    want = oracle(np.asarray(q), plain[1:], sinks, SCALE)
    ours = run(q, sets[1:], jnp.asarray(sinks), way)
    np.testing.assert_allclose(ours, want, rtol=2e-5, atol=2e-5)
    assert (ours[2] == 0).all()


KINDS = ("Picked", "Table", "MaskedTable")


@pytest.mark.parametrize(("kind", "scratch"), mostly_slow([(k, s) for k in KINDS for s in (1, 2**26)]))
def test_every_way_to_the_keys_gives_the_same(kind, scratch, monkeypatch):
    """Tiles of two sequences with padding; the masked table counts rows that are listed twice."""
    q, sets, sink, plain = inputs("fp4_e4m3")
    monkeypatch.setattr(sources, "DENSE_TILE_ROWS", 1)
    monkeypatch.setattr(sources, "DENSE_KEYS_PER_PICK", 99)
    table = sources.read_tables(sets[1].rows)
    source = {"Picked": sources.Picked(sets[1]), "Table": sources.Table(sets[1], table),
              "MaskedTable": sources.MaskedTable(sets[1], table, sets[1].rows.rows_per_seq)}[kind]  # fmt: skip
    monkeypatch.setattr("pallas_kernels.sparse_mla.xla.choose", lambda s, *_: source)
    ours = run(q, sets[1:], sink, "xla", tiles=TILES, scratch_bytes=scratch)
    want = oracle(np.asarray(q), plain[1:], np.asarray(sink), SCALE)
    np.testing.assert_allclose(ours, want, rtol=2e-5, atol=2e-5)


def test_the_least_work_is_chosen_from_shapes():
    """Band for a run, picking for few lists of many rows, a table for many lists, dense where lists are as long."""
    _, (_, far), _, _ = inputs("fp32")
    chosen = lambda s, *a: type(sources.choose(s, *a)).__name__  # noqa: E731
    assert chosen(dataclasses.replace(far, run=True), 4, True, 2**20) == "Band"
    assert chosen(far, 4, True, 2**20) == "Table"
    assert chosen(far, 16, True, 1) == "Picked"
    longer = dataclasses.replace(far, index=jnp.tile(far.index, (1, 2)))
    assert chosen(longer, 16, True, 2**20) == "MaskedTable"
    assert chosen(longer, 16, False, 2**20) == "Table"
    assert chosen(dataclasses.replace(far, run=True), 1, False, 2**20) == "Table"


@pytest.mark.parametrize("scratch", mostly_slow((1, 2**26), 2**26))
def test_a_run_reads_one_slice_per_tile(scratch):
    """A sliding window over a sequence's rows, garbage before its first; an absent query inside a tile."""
    rng = np.random.default_rng(1)
    rows = packed("mxfp8", 12, rng)
    rows[:3] = 0xFF
    position = np.arange(3, 9)
    index = position[:, None] - 4 + np.arange(5)
    index = np.where((index >= 3) & (position[:, None] != 5), index, -1).astype(np.int32)
    plain = dict(arena=rows.reshape(1, -1), table=np.zeros((1, 1), np.int32), seq=np.zeros(6, np.int32), index=index,
                 format="mxfp8", width=D, offset=0, rows_per_page=12, row_bytes=rows.shape[1])  # fmt: skip
    paged = PagedRows(*(jnp.asarray(plain[k]) for k in ("arena", "table", "seq")), RowLayout("mxfp8", D, 0, 12))
    q, sink = rng.normal(size=(6, H, D)).astype(np.float32), np.zeros(H, np.float32)
    ours = run(jnp.asarray(q), (RowSet(paged, jnp.asarray(index), run=True),), jnp.asarray(sink), "xla", tiles=TILES,
               scratch_bytes=scratch)  # fmt: skip
    np.testing.assert_allclose(ours, oracle(q, [plain], sink, SCALE), rtol=2e-5, atol=2e-5)


def learned(seed=0):
    """Two sets of float32 arenas, seen as a function of what is learned."""
    rng = np.random.default_rng(seed)
    q, (near, far), sink, _ = inputs("fp32")
    near = dataclasses.replace(near, rows=dataclasses.replace(near.rows, layout=RowLayout("fp32", D, 0, 13)))
    far = dataclasses.replace(far, rows=dataclasses.replace(far.rows, layout=RowLayout("fp32", D, 4, 4)))
    arenas = tuple(jnp.asarray(rng.normal(size=(12, 14 * D)), jnp.float32) for _ in range(2))

    def loss(run, q, arenas, sink):
        sets = tuple(
            dataclasses.replace(s, rows=dataclasses.replace(s.rows, arena=a))
            for s, a in zip((near, far), arenas, strict=True)
        )
        return jnp.sum(jnp.sin(run(q, sets, sink, scale=SCALE) + jnp.arange(D)))

    return loss, (q, arenas, sink)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tiles": TILES}, {"tiles": TILES, "scratch_bytes": 1}, {"kernel": True}])
def test_gradients_equal_those_of_the_reference(options):
    """Of q, both arenas and the sink, in tiles of one query or several; the kernel's are those of the XLA path."""
    loss, args = learned()
    if options.pop("kernel", False):
        options = {"implementation": "pallas_triton", "interpret": True, "config": SMALL}
    want = jax.jit(jax.grad(functools.partial(loss, reference.sparse_mla), (0, 1, 2)))(*args)
    ours = jax.jit(jax.grad(functools.partial(loss, functools.partial(sparse_mla, **options)), (0, 1, 2)))(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_gradients_equal_differences():
    """Along a random direction of everything that is learned."""
    loss, args = learned()
    f = jax.jit(functools.partial(loss, sparse_mla))
    rng = np.random.default_rng(4)
    way = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), args)
    step = 1e-3
    ahead, behind = (f(*jax.tree.map(lambda a, w, s=s: a + s * w, args, way)) for s in (step, -step))
    slopes = jax.tree.map(jnp.vdot, jax.jit(jax.grad(f, (0, 1, 2)))(*args), way)
    np.testing.assert_allclose((ahead - behind) / (2 * step), sum(jax.tree.leaves(slopes)), rtol=5e-3)


@pytest.mark.slow
def test_arenas_of_bytes_have_no_gradient():
    q, sets, sink, _ = inputs("fp4_e4m3")
    grad = jax.jit(jax.grad(lambda q, sink: jnp.sum(sparse_mla(q, sets, sink, scale=SCALE)), (0, 1)))(q, sink)
    assert all(np.isfinite(g).all() for g in grad) and (np.asarray(grad[0][2]) == 0).all()


def test_addresses_of_absent_rows_are_page_zero():
    """Interpretation clamps what a GPU would read elsewhere: -1, rows behind the table, absent pages."""
    _, (_, far), _, _ = inputs("fp32")
    page, column = jax.jit(far.rows.address)(jnp.array([[-1, -5, 20, 2**30, 19, 0]] * 6))
    assert (np.asarray(page)[:4, :5] == -1).all() and (np.asarray(page)[:, 5] >= 0).all()
    assert (np.asarray(column) >= far.rows.layout.offset).all()


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_random_bytes(name):
    """Every finite code and scale, bit by bit except for subnormal results; a NaN scale or code gives NaN."""
    rng, fmt = np.random.default_rng(5), FORMATS[name]
    rows = rng.integers(0, 256, (40, fmt.row_bytes(64)), dtype=np.uint8)
    codes, scales = rows[:, : fmt.code_bytes(64)], rows[:, fmt.code_bytes(64) :]
    if fmt.element == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x7E  # the oracle's tables end before NaN
    if fmt.scale in ("e4m3", "e8m0"):
        scales[...] = rng.integers(0, 127, scales.shape) if fmt.scale == "e4m3" else rng.integers(1, 255, scales.shape)
    if fmt.scale == "float32":
        scales[...] = rng.normal(size=(40, 1)).astype("<f4").view(np.uint8)
    want = np.stack([unpack_row(name, bytes(row), 64) for row in rows])
    unpack = jax.jit(lambda rows: unpack_rows(rows, fmt, 64))
    ours = np.asarray(unpack(rows))
    plain = ~(np.abs(want) < np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(ours[plain], want[plain])
    if fmt.scale in ("e4m3", "e8m0"):
        scales[...] = 255
        codes[codes == 0] = 0x11
        assert np.isnan(unpack(rows)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.zeros((6, H, D), jnp.float16)), "q must be float32 or bfloat16"),
        (dict(sink=jnp.zeros(H + 1)), "sink must be float32"),
        (dict(sets=()), "row_sets holds 0 sets"),
        (dict(q=jnp.zeros((6, H, 64))), "rows of width 32, q is of width 64"),
        (dict(q=jnp.zeros((5, H, D))), "has 6 entries for 5 queries"),
        (dict(scratch_bytes=0), "scratch_bytes=0"),
    ],
)
def test_bad_input_is_named(change, message):
    q, sets, sink, _ = inputs("fp32")
    args = dict(q=q, sets=sets, sink=sink) | change
    with pytest.raises(ValueError, match=message):
        sparse_mla(args.pop("q"), args.pop("sets"), args.pop("sink"), scale=SCALE, **args)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMALL, "block_heads=4 is less than 16.*the platform is cpu"),
        (SparseMlaConfig(chunks=1), "chunks=1 must be even"),
        (SparseMlaConfig(chunks=3), "must give a power of two"),
        (SparseMlaConfig(chunks=2, splits=4), "splits=4 is more than the 2 blocks"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(config, message):
    q, sets, sink, _ = inputs("fp4_e4m3")
    with pytest.raises(UnsupportedError, match=message):
        sparse_mla(q, sets, sink, scale=SCALE, implementation="pallas_triton", config=config)


def test_a_tile_beyond_shared_memory_is_named(monkeypatch):
    from pallas_kernels.common import devices, tiles

    target = devices.Target("gpu", "NVIDIA H200", devices.device_for("h200"))
    monkeypatch.setattr(tiles, "current_target", lambda: target)
    q = jax.ShapeDtypeStruct((1, 64, 512), jnp.bfloat16)
    layout = RowLayout("bf16", 512, 0, 4)
    paged = PagedRows(*(jnp.zeros(s, d) for s, d in (((1, 4096), "uint8"), ((1, 1), "int32"), ((1,), "int32"))), layout)
    sets = (RowSet(paged, jnp.zeros((1, 4), jnp.int32)),)
    reasons = pallas_triton.unsupported(q, sets, SparseMlaConfig(block_heads=64, block_rows=256))
    assert any("232,448 B of shared memory" in reason for reason in reasons)
    assert not pallas_triton.unsupported(q, sets, default_config(1, 64, [4], [layout]))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.short], ids=lambda c: c.name)
def test_small_cases_agree_with_float64(case):
    """What a GPU check does with every case, here interpreted."""
    args = case.args(Draw(3), True)
    want = case.want(*args)
    for options in ({"implementation": "xla"}, {"implementation": "pallas_triton", "interpret": True}):
        ours = np.asarray(jax.jit(functools.partial(case.call, **options))(*args), np.float64)
        assert np.abs(ours - want).max() <= case.tolerance * np.abs(want).max()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_full_cases_have_shapes_for_compilation(case):
    """The kernel serves each of them with its default tiles on every GPU, and counts each byte that it must read."""
    q, sets, _ = case.args(Draw(None), False)
    config = default_config(*q.shape[:2], [s.picks for s in sets], [s.rows.layout for s in sets])
    assert not pallas_triton.unsupported(q, sets, config)
    assert case.cost.flops == 4 * 512 * 64 * 640 * q.shape[0]
    assert {config.splits, *(c.splits for c in case.configs)} <= set(range(1, 11))
