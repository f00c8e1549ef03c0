"""`topk_select`: kernel (interpreted), XLA path and reference against a repeated search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.topk_select import reference
from pallas_kernels.topk_select.api import topk_select
from pallas_kernels.topk_select.config import TopkConfig
from tests.oracles.kernels_topk_select import topk_positions

ROUNDS = TopkConfig(block=32)  # rows of 100 take two rounds or more


def run(scores, k, way):
    """One of the three implementations, jitted where a user would."""
    if way == "reference":
        return np.asarray(reference.topk_select(scores, k))
    if way == "xla":
        return np.asarray(jax.jit(lambda s: topk_select(s, k, implementation="xla"))(scores))
    config = ROUNDS if way == "kernel in rounds" else TopkConfig(bits=4)
    return np.asarray(topk_select(scores, k, implementation="pallas_triton", interpret=True, config=config))


WAYS = ("reference", "xla", "kernel", "kernel in rounds")


def rows(width, seed=0):
    """Rows that decide by position, hold few legal values, none, both zeros, both NaNs and both infinities."""
    rng = np.random.default_rng(seed)
    table = np.round(rng.normal(size=(8, width)), 1).astype(np.float32)
    table[1, 3:] = -np.inf
    table[2] = -np.inf
    table[3] = np.where(rng.random(width) < 0.5, -0.0, 0.0)
    table[4, ::3] = np.nan
    table[5, ::3] = -np.float32(np.nan)
    table[6, rng.integers(0, width, 2)] = np.inf
    table[7] = np.float32(np.nan)
    return table


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 9), (100, 5), (100, 16), (64, 1)])
def test_equals_a_repeated_search(way, width, k):
    """Pitfall U4: -0 and +0 are equal, so position decides between them; NaN of either sign is never selected.

    B104: widths off every tile.
    """
    scores = rows(width)
    want = [topk_positions(row, k) for row in scores.tolist()]
    np.testing.assert_array_equal(run(jnp.asarray(scores), k, way), want)


@pytest.mark.parametrize("way", ("xla", "kernel", "kernel in rounds"))
def test_neighbouring_floats_are_told_apart(way):
    """Values that differ in the last bit of the mantissa only, subnormals and the largest finite value included."""
    ladder = np.array([1, 1 + 2**-23, -1, -1 - 2**-23, 3e38, np.finfo(np.float32).max, -3e38], np.float32)
    scores = np.tile(ladder, (1, 9))
    want = [topk_positions(scores[0].tolist(), 15)]
    np.testing.assert_array_equal(run(jnp.asarray(scores), 15, way), want)


def test_rounds_keep_the_lowest_positions_of_equal_scores():
    scores = jnp.zeros((1, 1000), jnp.float32)
    assert run(scores, 14, "kernel in rounds")[0].tolist() == list(range(14))


def test_every_bit_width_decides_alike():
    scores = jnp.asarray(rows(90, seed=3))
    got = [
        topk_select(scores, 12, implementation="pallas_triton", interpret=True, config=TopkConfig(bits=bits))
        for bits in (1, 2, 4)
    ]
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


@pytest.mark.parametrize(
    ("scores", "k", "words"),
    [
        (np.zeros((2, 4), np.float64), 1, "float32"),
        (np.zeros(4, np.float32), 1, "float32"),
        (np.zeros((2, 0), np.float32), 1, "N >= 1"),
        (np.zeros((2, 4), np.float32), 0, "k=0"),
    ],
)
def test_other_shapes_are_refused(scores, k, words):
    with pytest.raises(ValueError, match=words):
        topk_select(scores, k)


def test_named_kernel_says_why_it_cannot_serve():
    scores = jnp.zeros((1, 200), jnp.float32)
    with pytest.raises(UnsupportedError, match="k=40 of rows longer than block=32 .*; the platform is cpu"):
        topk_select(scores, 40, implementation="pallas_triton", config=ROUNDS)


@pytest.mark.parametrize(
    ("fields", "words"), [({"block": 48}, "block=48"), ({"bits": 3}, "bits=3"), ({"num_warps": 3}, "num_warps=3")]
)
def test_config_names_the_field_and_the_rule(fields, words):
    with pytest.raises(ValueError, match=words):
        TopkConfig(**fields)
