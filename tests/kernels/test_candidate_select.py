"""`candidate_select`: kernel (interpreted), plain path and reference against a repeated search with a pin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.candidate_select import reference
from pallas_kernels.candidate_select.api import candidate_select
from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.topk_select.config import TopkConfig
from tests.oracles.kernels_candidate_select import best_blocks

SIZE = 4
KERNEL = {"implementation": "pallas_triton", "interpret": True}
WAYS = {
    "reference": None,
    "xla": {"implementation": "xla"},
    "kernel": KERNEL | {"config": TopkConfig(bits=4)},
    "kernel in rounds": KERNEL | {"config": TopkConfig(block=32)},
}


def run(scores, visible, count, way):
    return np.asarray(_jitted(way, count)(jnp.asarray(scores), jnp.asarray(visible, jnp.int32)))


@functools.cache
def _jitted(way, count):
    sizes = {"block_size": SIZE, "topk_blocks": count}
    if WAYS[way] is None:
        return jax.jit(functools.partial(reference.candidate_select, **sizes))
    return jax.jit(functools.partial(candidate_select, **sizes, **WAYS[way]))


def rows(width, seed=0):
    """Scores that decide by position, with few legal values, none, both zeros, NaN, +inf and the largest float."""
    rng = np.random.default_rng(seed)
    table = np.round(rng.normal(size=(9, width)), 1).astype(np.float32)
    table[1, 3:] = -np.inf
    table[2] = -np.inf
    table[3] = np.where(rng.random(width) < 0.5, -0.0, 0.0)
    table[4, ::3] = np.nan
    table[5] = np.nan
    table[6] = np.inf
    table[7, ::2] = np.inf
    table[7, 1::2] = np.finfo(np.float32).max
    last = SIZE * width
    # The newest entry opens, fills or ends a block; nothing is visible; all is, and more than there are blocks.
    return table, np.array([last, 1, last - 3, SIZE, 7, last - 5, last - 1, 0, last + 1], np.int32)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("way", "width", "count"), [*((way, 100, 15) for way in WAYS), *((way, 7, 9) for way in WAYS if way != "kernel")]
)
def test_equals_a_repeated_search(way, width, count):
    scores, visible = rows(width)
    want = [best_blocks(row, int(v), SIZE, count) for row, v in zip(scores.tolist(), visible, strict=True)]
    np.testing.assert_array_equal(run(scores, visible, count, way), want)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("width", "count"), [(64, 1), (7, 9)])
def test_other_widths_equal_a_repeated_search(way, width, count):
    test_equals_a_repeated_search(way, width, count)


@pytest.mark.parametrize("way", WAYS)
def test_the_pin_precedes_infinite_scores_and_needs_no_score_itself(way):
    scores = np.full((9, 100), np.inf, np.float32)  # a shape that the search above has compiled
    scores[0, 90], scores[1, 90] = -np.inf, np.nan
    visible = [SIZE * 90 + 1] * 9
    assert run(scores, visible, 15, way).tolist() == [[*range(14), 90]] * 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_scores": jnp.zeros((2, 8), jnp.bfloat16)}, r"block_scores must be float32\[T, NB\]"),
        ({"block_scores": jnp.zeros((2, 0))}, "NB >= 1"),
        ({"visible": jnp.zeros(3, jnp.int32)}, r"visible must be int32\[2\]"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"topk_blocks": 0}, "topk_blocks=0 must be at least 1"),
    ],
)
def test_other_inputs_are_refused(changes, words):
    fields = {"block_scores": jnp.zeros((2, 8)), "visible": jnp.zeros(2, jnp.int32), "block_size": 4, "topk_blocks": 2}
    with pytest.raises(ValueError, match=words):
        candidate_select(**fields | changes)


def test_a_named_kernel_says_why_it_cannot_serve():
    with pytest.raises(UnsupportedError, match="k=40 of rows longer than block=32 .*; the platform is cpu"):
        candidate_select(
            jnp.zeros((1, 200)), jnp.zeros(1, jnp.int32), block_size=4, topk_blocks=40,
            implementation="pallas_triton", config=TopkConfig(block=32),
        )  # fmt: skip
