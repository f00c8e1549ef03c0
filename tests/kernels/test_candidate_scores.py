"""`candidate_scores`: kernel (interpreted), plain path and reference against loops over blocks and entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.candidate_scores import reference
from pallas_kernels.candidate_scores.api import candidate_scores
from pallas_kernels.candidate_scores.config import CandidateConfig
from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.common.formats import PagedRows, RowLayout
from tests.kernels.index_keys import FORMATS, make_keys
from tests.oracles.kernels_candidate_scores import candidate_scores as oracle

WAYS = {
    "reference": None,
    "xla": {"implementation": "xla"},
    "xla by queries": {"implementation": "xla", "scratch_bytes": 20_000},
    "xla by blocks": {"implementation": "xla", "scratch_bytes": 1},
    "kernel": {"implementation": "pallas_triton", "interpret": True, "config": CandidateConfig(entries=16)},
}
SIZE = 4  # entries of a block: not a divisor of the 6 rows of a page
SEQ, FILLED = [1, 0, 2, 0], (42, 30, 1)
VISIBLE = np.array([29, 42, 1, 0], np.int32)
# Not sorted, duplicates, absent, a block beyond what is visible, the table's last block (of 2 entries), one beyond it.
BLOCKS = np.array([[7, 0, -1, 7, 3], [10, 2, 11, 5, -1], [0, -1, 4, 0, 1], [0, 1, 2, 3, 4]], np.int32)


def problem(fmt, *, heads=3, dtype=jnp.float32, seed=1, **sizes):
    rng = np.random.default_rng(seed)
    keys = make_keys(rng, fmt, FILLED, **sizes)
    q = jnp.asarray(rng.normal(size=(len(SEQ), heads, keys.place["width"])), jnp.float32).astype(dtype)
    return q, jnp.asarray(rng.normal(size=(len(SEQ), heads)), jnp.float32), keys


def run(case, way, **options):
    q, weights, keys = case
    call = reference.candidate_scores if WAYS[way] is None else functools.partial(candidate_scores, **WAYS[way])
    call = jax.jit(functools.partial(call, block_size=SIZE, **options))
    return np.asarray(call(q, weights, keys.rows(SEQ), jnp.asarray(BLOCKS), jnp.asarray(VISIBLE)))


def want(case):
    q, weights, keys = case
    q, weights = np.asarray(q, np.float64), np.asarray(weights, np.float64)
    return oracle(keys.arena, keys.table, SEQ, keys.place, q, weights, BLOCKS, VISIBLE, SIZE)


def assert_close(got, expected):
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    at = np.isfinite(expected)
    assert at.any()
    np.testing.assert_allclose(got[at], expected[at], rtol=0, atol=1e-5 * np.abs(expected[at]).max())


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
def test_equals_loops_over_blocks_and_entries(way):
    """Pages are shuffled and every row that no query may see is NaN, in codes and scales."""
    case = problem("mxfp4")
    assert_close(run(case, way), want(case))


@pytest.mark.parametrize("way", ("xla", "kernel"))
@pytest.mark.parametrize("fmt", ("fp8_fp32", "bf16"))
def test_other_released_formats(fmt, way):
    case = problem(fmt)
    assert_close(run(case, way), want(case))


@pytest.mark.slow
@pytest.mark.parametrize("way", ("reference", "xla", "kernel"))
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("sizes", [{"width": 64, "rows_per_page": 8, "pages": 6}, {"rows_per_page": 2, "pages": 21}])
def test_every_format_in_other_pages(fmt, way, sizes):
    """Blocks of half a page, which the plain path reads as one piece, and blocks of two pages."""
    case = problem(fmt, heads=4, **sizes)
    assert_close(run(case, way), want(case))


@pytest.mark.parametrize("way", ("xla", "kernel"))
def test_products_of_bfloat16_queries(way):
    case = problem("mxfp4", dtype=jnp.bfloat16)
    assert_close(run(case, way), want(case))


@pytest.mark.parametrize("way", ("xla by queries", "kernel"))
def test_an_entry_without_a_page_is_not_visible(way):
    case = problem("mxfp4")
    case[2].table[1, 4] = -1  # entries 24 to 29: all but one of the first query's blocks 7
    got = run(case, way)
    assert np.isneginf(got[0, :4]).all() and np.isneginf(got[0, 12:16]).all()
    assert_close(got, want(case))


def test_a_program_of_fewer_keys_gives_the_same():
    case = problem("mxfp4")
    options = WAYS["kernel"] | {"config": CandidateConfig(entries=4)}
    got = candidate_scores(
        case[0], case[1], case[2].rows(SEQ), jnp.asarray(BLOCKS), jnp.asarray(VISIBLE), block_size=SIZE, **options
    )
    assert_close(np.asarray(got), want(case))


def test_no_name_serves_a_cpu_like_the_plain_path():
    case = problem("mxfp4")
    call = jax.jit(functools.partial(candidate_scores, block_size=SIZE))
    got = call(case[0], case[1], case[2].rows(SEQ), jnp.asarray(BLOCKS), jnp.asarray(VISIBLE))
    np.testing.assert_array_equal(got, run(case, "xla"))


def small(**changes):
    fields = {
        "q": jnp.zeros((2, 4, 32)), "weights": jnp.zeros((2, 4)), "visible": jnp.zeros(2, jnp.int32),
        "blocks": jnp.zeros((2, 3), jnp.int32), "block_size": 4,
        "keys": PagedRows(
            jnp.zeros((3, 200), jnp.uint8), jnp.zeros((1, 2), jnp.int32), jnp.zeros(2, jnp.int32),
            RowLayout("mxfp4", 32, 24, 8),
        ),
    }  # fmt: skip
    return fields | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": jnp.zeros((1, 2, 4, 32))}, r"q must be \[T, H, D\]"),
        ({"weights": jnp.zeros((2, 4), jnp.bfloat16)}, r"weights must be float32\[2, 4\]"),
        ({"blocks": jnp.zeros((3, 3), jnp.int32)}, r"blocks must be int32\[2, C\]"),
        ({"blocks": jnp.zeros((2, 0), jnp.int32)}, r"blocks must be int32\[2, C\]"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"visible": jnp.zeros(3, jnp.int32)}, r"visible must be int32\[2\]"),
    ],
)
def test_other_inputs_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        candidate_scores(**small(**changes))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "heads \\* queries=4 is less than 16.*; the platform is cpu"),
        ({"block_size": 6, "interpret": True}, "block_size=6 must be a power of two up to entries=128"),
        ({"score_dtype": "bfloat16", "interpret": True}, "score_dtype='bfloat16' is for the plain path"),
    ],
)
def test_a_named_kernel_says_why_it_cannot_serve(options, words):
    with pytest.raises(UnsupportedError, match=words):
        candidate_scores(**small() | options, implementation="pallas_triton")
