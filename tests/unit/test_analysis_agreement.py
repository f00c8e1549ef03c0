"""Distances of distributions: known values, and refusals."""

import math

import numpy as np
import pytest

from dsflash_jax.analysis.agreement import kl_divergence, log_softmax, same_best


def test_kl_of_two_coins():
    p, q = np.log([0.75, 0.25]), np.log([0.5, 0.5])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl_divergence(p[None], q[None])[0] == pytest.approx(expected, rel=1e-12)
    assert kl_divergence(q[None], p[None])[0] != pytest.approx(expected, rel=1e-3), "it is not symmetric"


def test_equal_logits_are_no_distance_apart_also_when_shifted():
    logits = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    assert kl_divergence(logits, logits + 3).max() < 1e-6
    assert kl_divergence(logits, logits).shape == (3, 5)


def test_log_softmax_of_large_logits_is_finite():
    assert log_softmax(np.array([1000.0, 0.0])).tolist() == [0.0, -1000.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(FloatingPointError, match="others hold values that are not finite"):
        kl_divergence(np.zeros((1, 2)), np.array([[0.0, bad]]))


def test_the_lowest_of_equal_best_tokens_counts():
    assert same_best(np.array([[1, 1, 0], [0, 1, 2]]), np.array([[2, 0, 0], [0, 1, 0]])).tolist() == [True, False]
