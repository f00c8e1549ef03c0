"""Recall, bits per byte and coverage from per-token records."""

import numpy as np
import pytest

from dsflash_jax.analysis.recall import LagBuckets, bits_per_byte, coverage_summary, recall, recall_by_lag

BUCKETS = LagBuckets.for_model(window=16, layers=4)


def test_bucket_edges_follow_from_window_and_depth():
    # Window 16: a pair 15 back lies whole inside the window. Four layers carry a value 4 * 15 tokens, a token shift
    # one more, and the value itself stands one after its key: 62 tokens back can be relayed, 63 cannot.
    names = ["near", "mid", "relay", "far"]
    assert [names[i] for i in BUCKETS.of(np.array([2, 15, 16, 32, 33, 62, 63, 127]))] == [
        "near", "near", "mid", "mid", "relay", "relay", "far", "far",
    ]


def test_shallow_models_have_no_relay_bucket():
    assert LagBuckets.for_model(window=16, layers=1).relay == LagBuckets.for_model(window=16, layers=1).mid


def test_recall_counts_only_what_was_asked():
    lag = np.array([[4, 20, 70, 80]])
    asked = np.array([[True, True, True, False]])
    correct = np.array([[True, False, True, True]])
    aligned = np.array([[True, True, False, False]])
    result = recall(correct, asked, lag, aligned, BUCKETS)
    assert result.overall == (2, 3)
    assert {name: tuple(share) for name, share in result.by_bucket.items()} == {
        "near": (1, 1), "mid": (0, 1), "relay": (0, 0), "far": (1, 1)}
    assert tuple(result.by_alignment["aligned"]) == (1, 2)
    assert tuple(result.by_both["far"]["split"]) == (1, 1)
    assert result.by_bucket["relay"].value is None
    assert result.as_json()["by_bucket"]["mid"] == {"value": 0.0, "correct": 0, "asked": 1}


def test_curve_bins_are_half_open():
    rows = recall_by_lag([1, 0, 1], [True, True, True], [2, 8, 9], edges=[2, 8, 16])
    assert [(row["asked"], row["correct"]) for row in rows] == [(1, 1), (2, 1)]


def test_bits_per_byte_of_a_uniform_guess_is_its_entropy():
    nll = np.full((2, 3), np.log(128.0))
    nll[0, 0] = 99.0
    mask = np.ones((2, 3), bool)
    mask[0, 0] = False
    assert bits_per_byte(nll, mask) == pytest.approx(7.0)
    assert bits_per_byte(nll, np.zeros((2, 3), bool)) is None


def test_coverage_reports_the_maximum_beside_the_mean():
    summary = coverage_summary([[0.98, 0.0], [0.96, 0.02]])
    assert summary["max"] == pytest.approx(0.97) and summary["mean"] == pytest.approx(0.49)
    assert coverage_summary(np.zeros((3, 0))) == {"per_layer": [], "mean": None, "max": None}
