"""Sampling: what may be drawn and how often, ties, and refusals on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.sampling import Sampling, check_logits, check_seed, filter_logits, greedy, sample

LOGITS = jnp.log(jnp.array([0.4, 0.1, 0.3, 0.2]))
INF = np.inf


def left(logits, top_k=0, top_p=1.0) -> list[int]:
    """Ids that the filters leave."""
    return np.flatnonzero(np.isfinite(filter_logits(jnp.asarray(logits, jnp.float32), top_k, top_p))).tolist()


def test_greedy_takes_the_lowest_of_equals():
    assert greedy(jnp.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [-3.0, -2.0, -1.0]])).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("top_k", "ids"), [(0, [0, 1, 2, 3]), (1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k_leaves_the_best(top_k, ids):
    assert left(LOGITS, top_k) == ids


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [(1e-6, [0]), (0.39, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.71, [0, 2, 3]), (0.91, [0, 1, 2, 3])],
)
def test_top_p_leaves_the_fewest_that_reach_it(top_p, ids):
    assert left(LOGITS, top_p=top_p) == ids


@pytest.mark.parametrize("top_p", [1e-30, 1e-38, 1e-39, 1e-50])
def test_the_best_token_stays_however_small_top_p(top_p):
    """float32 flushes the last three to zero, and no share is below zero."""
    assert left([0.0, 1.0, 5.0, 2.0], top_p=Sampling(temperature=1.0, top_p=top_p).top_p) == [2]


def test_top_p_counts_among_what_top_k_left():
    # 0.4 and 0.3 of 0.7 are 0.571 and 0.429.
    assert left(LOGITS, top_k=2, top_p=0.56) == [0]
    assert left(LOGITS, top_k=2, top_p=0.58) == [0, 2]


def test_equal_logits_at_the_border_go_by_id():
    assert left(jnp.zeros(6), top_k=2) == [0, 1]
    assert left(jnp.zeros(4), top_p=0.5) == [0, 1]


def test_left_logits_are_unchanged():
    kept = filter_logits(LOGITS, 3, 1.0)
    assert np.asarray(kept[jnp.array([0, 2, 3])]).tobytes() == np.asarray(LOGITS[jnp.array([0, 2, 3])]).tobytes()


def test_top_p_of_one_drops_nothing():
    # Sums of shares reach 1 before the last token here.
    logits = 5 * np.random.default_rng(0).normal(size=(8, 500)).astype(np.float32)
    assert np.isfinite(filter_logits(jnp.asarray(logits, jnp.float32), 0, 1.0)).all()


@functools.partial(jax.jit, static_argnames="n")
def draws(logits, key, n, temperature, top_k=0, top_p=1.0):
    return sample(jnp.broadcast_to(logits, (n, logits.shape[-1])), key, temperature, top_k, top_p)


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ((1.0,), [0.4, 0.1, 0.3, 0.2]),
        ((0.5,), [0.16 / 0.30, 0.01 / 0.30, 0.09 / 0.30, 0.04 / 0.30]),
        ((1.0, 2), [4 / 7, 0, 3 / 7, 0]),
        ((1.0, 0, 0.8), [4 / 9, 0, 3 / 9, 2 / 9]),
    ],
)
def test_tokens_are_drawn_as_often_as_the_settings_say(settings, shares):
    n = 4000
    counts = np.bincount(draws(LOGITS, jax.random.key(0), n, *settings), minlength=4)
    spread = np.sqrt(n * np.array(shares) * (1 - np.array(shares)))
    assert (np.abs(counts - n * np.array(shares)) <= 4 * spread).all()
    assert (counts[np.array(shares) == 0] == 0).all()


def test_temperature_zero_is_greedy_whatever_the_key():
    logits = jnp.array([[0.0, 0.1], [3.0, 3.0]])
    for seed in range(5):
        assert sample(logits, jax.random.key(seed), 0.0).tolist() == greedy(logits).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-38, 1e-6])
def test_a_tiny_temperature_draws_the_best(temperature):
    logits = jnp.array([1e4, -1e4, 9.9e3])
    assert set(draws(logits, jax.random.key(1), 50, temperature).tolist()) == {0}


def test_keys_decide():
    first, again, other = (draws(LOGITS, jax.random.key(seed), 64, 1.0).tolist() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1 must be 0 \(greedy\) or positive and finite"),
        ({"temperature": INF}, "temperature=inf must be 0"),
        ({"temperature": np.nan}, "temperature=nan must be 0"),
        ({"temperature": 1e39}, r"temperature=1e\+39 must be 0 \(greedy\) or positive and finite in float32"),
        ({"top_p": 0.0}, r"top_p=0\.0 must lie above 0 and at most at 1"),
        ({"top_p": 1.1}, r"top_p=1\.1 must lie above 0 and at most at 1"),
        ({"top_p": np.nan}, "top_p=nan must lie above 0"),
        ({"top_k": -1}, r"top_k=-1 must be 0 \(all tokens\) or a positive whole number"),
        ({"top_k": 1.5}, r"top_k=1\.5 must be 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, 1.0, True])
def test_a_seed_that_a_key_would_cut_is_refused(seed):
    """Without 64-bit types JAX drops the upper half: 2 ** 40 would draw as 0 does."""
    check_seed(0)
    check_seed(2**32 - 1)
    with pytest.raises(ValueError, match=rf"seed={seed} must be a whole number in 0\.\.4294967295"):
        check_seed(seed)


@pytest.mark.parametrize(
    ("row", "kind"),
    [([0, np.nan], "NaN"), ([INF, 0], r"\+inf"), ([INF, np.nan], "NaN"), ([-INF, -INF], "nothing but -inf")],
)
def test_logits_that_nothing_can_follow_are_named(row, kind):
    logits = np.array([[0, 1], row, [np.nan, 0]], np.float32)  # the last row is padding
    with pytest.raises(FloatingPointError, match=f"logits of sequence 'b' at position 41 hold {kind}: no token can"):
        check_logits(logits, ["a", "b"], [7, 41])


def test_masked_tokens_are_allowed():
    check_logits(jnp.array([[0.0, -INF]]), ["a"], [0])
