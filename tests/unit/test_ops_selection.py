"""Index scores, top-k and candidate blocks against the loop oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.ops.compressor import visible_entries
from dsflash_jax.ops.indexer import block_entries, block_mask, mask_invisible
from dsflash_jax.ops.topk import listed, topk_mask
from pallas_kernels.candidate_select.api import candidate_select
from pallas_kernels.compress_pool.xla import pool
from pallas_kernels.indexer_scores.xla import block_maxima
from pallas_kernels.indexer_scores.xla import scores_of as index_scores
from pallas_kernels.topk_select.xla import topk_select as select_topk
from tests.oracles import compressor as compressor_oracle
from tests.oracles import indexer as oracle

pytestmark = pytest.mark.smoke


def candidate_blocks(scores, visible, size, count):
    """Candidate blocks of masked scores as the model chooses them."""
    visible = jnp.asarray(visible, jnp.int32)
    maxima = block_maxima(scores, size)
    return candidate_select(maxima, visible, block_size=size, topk_blocks=count, implementation="xla")


RNG = np.random.default_rng(1)
# Values that meet each other: exact ties, both zeros, both infinities, both NaNs.
AWKWARD = [0.0, -0.0, 1.0, 1.0, 2.0, -1.0, 1e-30, -np.inf, np.inf, np.nan, float(np.copysign(np.nan, -1.0))]
# Fixed shape, so that each op compiles once.
ROWS, WIDTH = 200, 13


def awkward_rows(seed):
    """Rows of AWKWARD values, a third of them among plain numbers that rarely tie."""
    draws = np.random.default_rng(seed)
    plain = draws.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = draws.choice(np.array(AWKWARD, np.float32), (ROWS, WIDTH))
    return np.where(np.arange(ROWS)[:, None] % 3 == 0, np.where(draws.random(rows.shape) < 0.3, rows, plain), rows)


@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 32, 13), (5, 3, 8, 1), (2, 1, 5, 7), (7, 2, 6, 20)])
def test_scores(shape, per_query):
    batch, heads, width, entries = shape
    q = RNG.normal(size=(batch, heads, width)).astype(np.float32)
    weights = RNG.normal(size=(batch, heads)).astype(np.float32)
    keys = RNG.normal(size=(batch, entries, width) if per_query else (entries, width)).astype(np.float32)
    ours = np.asarray(index_scores(q, weights, keys, "float32"))
    for b in range(batch):
        expected = oracle.scores(q[b], keys[b] if per_query else keys, weights[b])
        np.testing.assert_allclose(ours[b], expected, rtol=0, atol=2e-5)
    assert ours.min() < 0, "weights are signed, so some scores must be negative"


@pytest.mark.parametrize("batch", [1, 2])
def test_relu_is_per_head_and_before_the_sum(batch):
    """B29: per-head dots [-2, 3] with weights [1, 1] give 3, not relu(1); a negative weight gives a negative score."""
    q = np.tile(np.array([[[1.0], [1.0]]], np.float32), (batch, 1, 1)) * np.array([[-2.0], [3.0]], np.float32)
    key = np.ones((1, 1), np.float32)
    for weights, expected in (([1.0, 1.0], 3.0), ([1.0, -1.0], -3.0), ([-5.0, 0.0], 0.0)):
        rows = np.tile(np.array([weights], np.float32), (batch, 1))
        assert np.asarray(index_scores(q, rows, key, "float32")).ravel().tolist() == [expected] * batch


def test_scores_accumulate_in_float32_and_do_not_overflow():
    """B44: 1.001, 1.002, 1.003, 1.0 keep their order; in bfloat16 they tie. Large logits stay finite."""
    keys = np.array([[1.001], [1.002], [1.003], [1.0]], np.float32)
    one = np.ones((1, 1, 1), np.float32)
    exact = index_scores(one, one[..., 0], keys, "float32")
    assert np.asarray(select_topk(exact, 2)).tolist() == [[1, 2]]
    rounded = index_scores(one, one[..., 0], keys, "bfloat16")
    assert np.asarray(select_topk(rounded, 2)).tolist() == [[0, 1]]
    q, weights, keys = np.full((2, 8, 4), 250, np.float32), np.ones((2, 8), np.float32), np.full((3, 4), 60, np.float32)
    large = index_scores(q, weights, keys, "float32")
    assert np.asarray(large).ravel().tolist() == [8 * 60000.0] * 6


@pytest.mark.parametrize("batch", [1, 3])
def test_bfloat16_scores_round_dot_product_and_head_sum(batch):
    q, weights = RNG.normal(size=(batch, 4, 16)).astype(np.float32), RNG.normal(size=(batch, 4)).astype(np.float32)
    keys = RNG.normal(size=(9, 16)).astype(np.float32)

    def bf16(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)

    ours = np.asarray(index_scores(q, weights, keys, "bfloat16"))
    for b in range(batch):
        dots = bf16(q[b] @ keys.T)
        products = bf16(np.maximum(dots, 0) * weights[b][:, None])
        np.testing.assert_allclose(ours[b], bf16(products.sum(axis=0)), rtol=2**-7, atol=1e-6)
    assert (ours == bf16(ours)).all()


@pytest.mark.parametrize("k", [1, 4, 13, 20])
def test_topk(k):
    """B30 (k above the width pads with -1), B32 (lowest among equals), B33 (+0 = -0), B34 (NaN never, +inf legal)."""
    scores = awkward_rows(k)
    ours = np.asarray(TOPK(scores, k))
    assert ours.tolist() == [oracle.top_k(row, k).tolist() for row in scores]
    mask = np.asarray(MASK(scores, k))
    for row, picked in zip(mask, ours, strict=True):
        assert np.flatnonzero(row).tolist() == picked[picked >= 0].tolist()
    assert np.asarray(listed(mask, k)).tolist() == ours.tolist()


TOPK = jax.jit(select_topk, static_argnums=1)
MASK = jax.jit(topk_mask, static_argnums=1)


def test_ties_zeros_and_nan_by_hand():
    """B32, B33, B34, B41 as numbers."""
    pick = lambda row, k: np.asarray(select_topk(np.array([row], np.float32), k))[0].tolist()  # noqa: E731
    assert pick([1, 2, 2, 2, 1], 2) == [1, 2]
    assert pick([-0.0, -0.0, 0.0, -1.0, 0.0], 2) == [0, 1]
    assert pick([1.0, np.nan, 3.0, 2.0], 2) == [2, 3]
    assert pick([1.0, np.inf, 3.0, 2.0], 2) == [1, 2]
    assert pick([5.0, 4.0, -np.inf, -np.inf], 4) == [0, 1, -1, -1]
    assert pick([-np.inf] * 3, 2) == [-1, -1]
    assert pick([1.0, 2.0, 3.0], 5) == [0, 1, 2, -1, -1]


def test_an_entry_is_visible_only_when_its_last_token_has_been_processed():
    """B01 and B31 as pictures: the bound is floor((p + 1) / m), 0 for padding; rows are queries, columns entries."""

    def picture(ratio, queries, entries):
        visible = visible_entries(jnp.arange(queries), ratio)
        return np.isfinite(mask_invisible(jnp.zeros((queries, entries)), visible)).astype(int).tolist()

    assert picture(2, 6, 3) == [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert picture(1, 3, 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert picture(4, 9, 2) == [[0, 0]] * 3 + [[1, 0]] * 4 + [[1, 1]] * 2
    for ratio in (1, 2, 4):
        positions = np.arange(-1, 20)
        expected = oracle.visible_counts(positions, ratio)
        assert np.asarray(visible_entries(positions, ratio)).tolist() == expected.tolist()


@pytest.mark.parametrize(("size", "count"), [(2, 3), (5, 2), (1, 4), (20, 1), (3, 9)])
def test_candidate_blocks(size, count):
    """The newest block is pinned and counts; ties go to the lower block; masks cover whole blocks; B34."""
    scores, visible = awkward_rows(size), np.random.default_rng(count).integers(0, WIDTH + 1, ROWS)
    masked = np.asarray(mask_invisible(scores, visible))
    ours = np.asarray(BLOCKS(masked, visible, size, count))
    expected = [oracle.candidate_blocks(masked[r], int(visible[r]), size, count).tolist() for r in range(ROWS)]
    assert ours.tolist() == expected
    newest = (visible - 1) // size
    assert all(n in row for n, row in zip(newest, expected, strict=True) if n >= 0)
    if (size, count) in ((2, 3), (5, 2), (1, 4)):
        dropped = [len([b for b in row if b >= 0]) <= n for row, n in zip(expected, newest, strict=True)]
        assert sum(dropped) > ROWS // 8, "blocks are left out, or nothing is chosen"
    for row, blocks in zip(np.asarray(block_mask(ours, WIDTH, size)), ours, strict=True):
        assert row.tolist() == oracle.candidate_mask([b for b in blocks if b >= 0], WIDTH, size).tolist()
    for entries, blocks in zip(np.asarray(block_entries(ours, size)), ours, strict=True):
        assert entries.tolist() == [b * size + i if b >= 0 else -1 for b in blocks for i in range(size)]


BLOCKS = jax.jit(candidate_blocks, static_argnums=(2, 3))


def test_the_newest_block_is_pinned_even_if_it_scores_worst():
    scores = np.array([[5.0, 5.0, 4.0, 4.0, 3.0, 3.0, -9.0, -np.inf]], np.float32)
    assert np.asarray(candidate_blocks(scores, np.array([7]), 2, 2)).tolist() == [[0, 3]]
    infinite = np.array([[np.inf] * 6 + [0.0, -np.inf]], np.float32)
    assert np.asarray(candidate_blocks(infinite, np.array([7]), 2, 2)).tolist() == [[0, 3]]
    nothing = np.full((1, 8), -np.inf, np.float32)
    assert np.asarray(candidate_blocks(nothing, np.array([0]), 2, 2)).tolist() == [[-1, -1]]


def test_one_nan_does_not_take_its_block_along():
    """B34: entry 0 is the best finite score; the NaN beside it must not drop their block from the pool."""
    scores = np.array([[9.0, np.nan, 1.0, 1.0, 2.0, 2.0, 0.0, 0.0]], np.float32)
    assert np.asarray(candidate_blocks(scores, np.array([8]), 2, 2)).tolist() == [[0, 3]]


def test_a_pool_smaller_than_topk_leaves_minus_one():
    """B39: two blocks of 8 with one visible row in the pinned one hold 9 rows; 7 of 16 picks are -1."""
    scores = np.where(np.arange(40) < 33, 0.0, -np.inf)[None].astype(np.float32)
    blocks = candidate_blocks(scores, np.array([33]), 8, 2)
    assert np.asarray(blocks).tolist() == [[0, 4]]
    kept = np.where(np.asarray(block_mask(blocks, 40, 8)), scores, -np.inf)
    assert np.asarray(select_topk(kept, 16)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 32] + [-1] * 7]


@pytest.mark.parametrize(("groups", "ratio", "width"), [(3, 2, 5), (1, 4, 3), (2, 3, 1), (4, 1, 2)])
def test_pool(groups, ratio, width):
    values, gate = (RNG.normal(size=(groups, ratio, width)).astype(np.float32) * 3 for _ in range(2))
    expected = np.stack([compressor_oracle.pool_group(v, g) for v, g in zip(values, gate, strict=True)])
    np.testing.assert_allclose(pool(values, gate), expected, rtol=0, atol=2e-6)


def test_the_gate_is_per_channel():
    """B15: two tokens, two channels; one gate per token would give [1.2384, 11.1920]."""
    values = np.array([[1.0, 10.0], [3.0, 20.0]], np.float32)
    scores = np.array([[0.0, 2.0], [0.0, -2.0]], np.float32)
    np.testing.assert_allclose(pool(values, scores), [2.0, 10.1799], atol=1e-4)
    first = 1 / (1 + np.exp(scores[1] - scores[0]))
    np.testing.assert_allclose(pool(values, scores), first * values[0] + (1 - first) * values[1], rtol=1e-6)
