"""`indexer_scores`: kernel (interpreted), plain path and reference against loops over entries and heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common import tiles
from pallas_kernels.common.devices import Target, device_for
from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.common.formats import PagedRows, RowLayout
from pallas_kernels.indexer_scores import pallas_triton, reference
from pallas_kernels.indexer_scores.api import indexer_scores
from pallas_kernels.indexer_scores.config import IndexerConfig
from tests.kernels.index_keys import FORMATS, make_keys
from tests.oracles.kernels_indexer_scores import block_maxima, index_scores, score_bf16

WAYS = {
    "reference": None,
    "xla": {"implementation": "xla"},
    "xla by pages": {"implementation": "xla", "scratch_bytes": 1},
    "kernel": {"implementation": "pallas_triton", "interpret": True, "config": IndexerConfig(entries=16)},
}
RELEASED = ("mxfp4", "fp8_fp32", "bf16")
# Six rows of three sequences, 42 entries: none, one, all, and lengths off every tile, block and page boundary.
VISIBLE = np.array([[0, 1], [42, 17], [29, 30]], np.int32)
SEQ = [2, 0, 1]
FILLED = (42, 30, 1)  # keys of each sequence, as many as its rows may see


@dataclasses.dataclass
class Problem:
    q: jax.Array
    weights: jax.Array
    keys: object
    visible: np.ndarray = dataclasses.field(default_factory=lambda: VISIBLE)

    def run(self, way, **options):
        rows = self.keys.rows(SEQ)
        operands = (self.q, self.weights, rows, jnp.asarray(self.visible))
        call = reference.indexer_scores if WAYS[way] is None else functools.partial(indexer_scores, **WAYS[way])
        return jax.tree.map(np.asarray, jax.jit(functools.partial(call, **options))(*operands))

    def want(self, **options):
        k = self.keys
        q, weights = np.asarray(self.q, np.float64), np.asarray(self.weights, np.float64)
        return index_scores(k.arena, k.table, SEQ, k.place, q, weights, self.visible, **options)


def problem(fmt, *, heads=3, dtype=jnp.float32, seed=0, **sizes):
    rng = np.random.default_rng(seed)
    keys = make_keys(rng, fmt, FILLED, **sizes)
    q = jnp.asarray(rng.normal(size=(*VISIBLE.shape, heads, keys.place["width"])), jnp.float32).astype(dtype)
    return Problem(q, jnp.asarray(rng.normal(size=(*VISIBLE.shape, heads)), jnp.float32), keys)


def maxima(scores, block_size):
    return np.array([[block_maxima(row, block_size) for row in tile] for tile in scores])


def assert_close(got, want, tolerance=1e-5):
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    at = np.isfinite(want)
    np.testing.assert_allclose(got[at], want[at], rtol=0, atol=tolerance * np.abs(want[at]).max())


def every(formats):
    return [pytest.param(f, w, id=f"{f} {w}") for f in formats for w in ("xla", "kernel")]


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
def test_equals_loops_over_entries_and_heads(way):
    """Pages are shuffled and every row that no query may see is NaN, in codes and scales. B104: no length is whole."""
    case = problem("mxfp4")
    scores, best = case.run(way, block_size=4)
    want = case.want()
    assert_close(scores, want)
    assert_close(best, maxima(want, 4))


@pytest.mark.parametrize(("fmt", "way"), every([f for f in RELEASED if f != "mxfp4"]))
def test_every_released_format(fmt, way):
    case = problem(fmt)
    assert_close(case.run(way), case.want())


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "way"), every(FORMATS) + [pytest.param(f, "reference") for f in FORMATS])
@pytest.mark.parametrize("sizes", [{"width": 64, "rows_per_page": 7, "pages": 6}, {"rows_per_page": 3, "pages": 14}])
def test_every_format_in_other_pages(fmt, way, sizes):
    case = problem(fmt, heads=4, seed=5, **sizes)
    scores, best = case.run(way, block_size=8)
    want = case.want()
    assert_close(scores, want)
    assert_close(best, maxima(want, 8))


@pytest.mark.parametrize("way", ("xla", "xla by pages", "kernel"))
def test_maxima_alone_are_the_same_maxima(way):
    case = problem("mxfp4")
    best = case.run(way, block_size=4, blocks_only=True)
    np.testing.assert_array_equal(best, case.run(way, block_size=4)[1])


@pytest.mark.parametrize("fmt", ("mxfp4", "fp8_fp32"))
def test_products_of_bfloat16_queries(fmt):
    """The kernel multiplies codes and applies a row's scale to the sum: nothing is rounded on the way."""
    case = problem(fmt, dtype=jnp.bfloat16)
    assert_close(case.run("kernel"), case.want())
    # The plain path rounds scaled keys to the dtype of the queries first: half a unit of 8 bits.
    assert_close(case.run("xla"), case.want(), tolerance=2**-8 if fmt == "fp8_fp32" else 1e-5)


def test_released_rounding_is_the_plain_paths():
    case = problem("mxfp4")
    got = case.run("xla", score_dtype="bfloat16")
    # Sums in another order may fall on the other side of a rounding boundary of 8 bits.
    assert_close(got, case.want(one=score_bf16), tolerance=2**-7)
    assert np.array_equal(got, got.astype(jnp.bfloat16).astype(np.float32))
    with pytest.raises(UnsupportedError, match="score_dtype='bfloat16' is for the plain path"):
        case.run("kernel", score_dtype="bfloat16")


@pytest.mark.parametrize(("entries", "queries"), [(8, 1), (64, 4)])
def test_tiles_do_not_matter(entries, queries):
    case = problem("mxfp4")
    config = IndexerConfig(entries=entries, queries=queries)
    got = indexer_scores(
        case.q, case.weights, case.keys.rows(SEQ), jnp.asarray(VISIBLE), block_size=8,
        implementation="pallas_triton", interpret=True, config=config,
    )  # fmt: skip
    want = case.want()
    assert_close(np.asarray(got[0]), want)
    assert_close(np.asarray(got[1]), maxima(want, 8))


@pytest.mark.parametrize("way", ("xla", "kernel"))
def test_an_entry_without_a_page_is_not_visible(way):
    case = problem("mxfp4")
    case.keys.table[0, 2] = -1  # entries 12 to 17 of the second tile's rows
    scores = case.run(way)
    assert np.isneginf(scores[1, 0, 12:18]).all() and np.isfinite(scores[1, 0, 18:]).all()
    assert_close(scores, case.want())


@pytest.mark.parametrize("way", ("xla", "kernel"))
def test_a_block_of_nan_scores_counts_as_unseen(way):
    """A NaN score stays NaN in the scores and is -inf in the maxima, beside a legal score too."""
    case = problem("bf16")
    for entry in (4, 5, 6, 7, 9):
        case.keys.write(0, entry, b"\xff" * 64)
    scores, best = case.run(way, block_size=4)
    assert np.isnan(scores[1, 0, [4, 5, 6, 7, 9]]).all()
    assert np.isneginf(best[1, 0, 1]) and best[1, 0, 2] == np.nanmax(scores[1, 0, 8:12])


def test_rows_in_their_own_dtype_are_the_same_rows():
    case = problem("bf16")
    rows = case.keys.rows(SEQ)
    own = jax.lax.bitcast_convert_type(rows.arena.reshape(rows.arena.shape[0], -1, 2), jnp.bfloat16)
    own = dataclasses.replace(rows, arena=own)
    for way in ("xla", "kernel"):
        got = indexer_scores(case.q, case.weights, own, jnp.asarray(VISIBLE), **WAYS[way])
        assert_close(np.asarray(got), case.want())


def test_no_name_serves_a_cpu_like_the_plain_path():
    case = problem("mxfp4")
    got = jax.jit(functools.partial(indexer_scores, block_size=4))(
        case.q, case.weights, case.keys.rows(SEQ), jnp.asarray(VISIBLE)
    )
    for a, b in zip(got, case.run("xla", block_size=4), strict=True):
        np.testing.assert_array_equal(a, b)


def test_addresses_of_rows_that_do_not_exist_lie_in_the_arena():
    """Interpretation clamps addresses, a GPU does not: what is masked must have a legal address all the same."""
    layout = RowLayout("mxfp4", 32, 24, 6)
    table = jnp.array([[4, -1, 0]], jnp.int32)
    index = jnp.array([-1, -(2**31), 0, 5, 6, 12, 17, 18, 2**31 - 1, 100, 101, 102, 103, 104, 105, 106], jnp.int32)

    def kernel(table_ref, index_ref, *out_refs):
        for ref, value in zip(out_refs, common.row_address(layout, 1, table_ref, 0, index_ref[...]), strict=True):
            ref[...] = value.astype(jnp.int32)

    shape = jax.ShapeDtypeStruct(index.shape, jnp.int32)
    page, column, valid = pl.pallas_call(kernel, out_shape=[shape] * 3, interpret=True)(table, index)
    assert valid.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 0] + [0] * 7
    assert page[:8].tolist() == [0, 0, 4, 4, 0, 0, 0, 0] and set(page.tolist()) <= {0, 4}
    assert column.min() >= 24 and column.max() + layout.row_bytes <= 24 + 6 * layout.row_bytes


def small(**changes):
    fields = {
        "q": jnp.zeros((1, 2, 4, 32)), "weights": jnp.zeros((1, 2, 4)), "visible": jnp.zeros((1, 2), jnp.int32),
        "keys": PagedRows(
            jnp.zeros((3, 200), jnp.uint8), jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32),
            RowLayout("mxfp4", 32, 24, 8),
        ),
    }  # fmt: skip
    return fields | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": jnp.zeros((2, 4, 32))}, r"q must be \[N, B, H, D\]"),
        ({"q": jnp.zeros((1, 2, 4, 32), jnp.float16)}, "q must be float32 or bfloat16"),
        ({"q": jnp.zeros((1, 2, 4, 64))}, "keys are 32 wide, queries 64"),
        ({"weights": jnp.zeros((1, 2, 3))}, r"weights must be float32\[1, 2, 4\]"),
        ({"visible": jnp.zeros((2,), jnp.int32)}, r"visible must be int32\[1, 2\]"),
        ({"score_dtype": "float16"}, "score_dtype='float16' is unknown; known: float32, bfloat16"),
        ({"scratch_bytes": 0}, "scratch_bytes=0 must be at least 1"),
        ({"blocks_only": True}, "block_size=0 must be at least 1"),
        ({"block_size": -1}, "block_size=-1 must be at least 0"),
    ],
)
def test_other_inputs_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        indexer_scores(**small(**changes))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "heads \\* queries=8 is less than 16.*; the platform is cpu"),
        ({"block_size": 6, "interpret": True}, "block_size=6 must be a power of two up to entries=128"),
        ({"block_size": 256, "interpret": True}, "block_size=256 must be a power of two up to entries=128"),
    ],
)
def test_a_named_kernel_says_why_it_cannot_serve(options, words):
    with pytest.raises(UnsupportedError, match=words):
        indexer_scores(**small(), implementation="pallas_triton", **options)


def test_what_a_device_cannot_hold_or_address_is_named(monkeypatch):
    h200 = device_for("h200")
    monkeypatch.setattr(tiles, "current_target", lambda: Target("gpu", h200.kind, h200))
    shape = jax.ShapeDtypeStruct
    layout = RowLayout("mxfp4", 128, 105_216, 128)
    rows = PagedRows(shape((20_000, 113_920), jnp.uint8), shape((1, 8), jnp.int32), shape((1,), jnp.int32), layout)
    q = shape((70_000, 16, 32, 128), jnp.bfloat16)
    config = IndexerConfig(entries=512, queries=16)
    words = "; ".join(pallas_triton.unsupported(q, rows, 8, "float32", config, False))
    assert "512 keys and 2 x 16 query rows needs 393,216 B, more than the 232,448 B of shared memory" in words
    assert "2,278,400,000 elements" in words and "70,000 tiles are more than the 65,535 of a grid axis" in words
    fits = dataclasses.replace(rows, arena=shape((8_192, 113_920), jnp.uint8))
    assert (
        pallas_triton.unsupported(shape((32, 128, 32, 128), jnp.bfloat16), fits, 8, "float32", IndexerConfig(), False)
        == ()
    )


def test_a_config_names_the_field_and_the_rule():
    with pytest.raises(ValueError, match="entries=48 must be a power of two; queries=3"):
        IndexerConfig(entries=48, queries=3)
