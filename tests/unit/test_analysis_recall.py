"""Recall, bits per byte and coverage from per-token records."""

import numpy as np
import pytest

from dsflash_jax.analysis.recall import (
    LagBuckets,
    answers_by_row,
    bits_by_row,
    bits_per_byte,
    coverage_summary,
    informed_guess,
    paired_difference,
    recall,
    recall_by_lag,
    wilson,
)

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


def test_no_bin_of_the_curve_mixes_two_distances():
    edges = BUCKETS.edges(context=128)
    assert edges == [1, 9, 16, 25, 33, 43, 53, 63, 79, 96, 113, 129]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        assert len(set(BUCKETS.of(np.arange(low, high)).tolist())) == 1


@pytest.mark.parametrize("context", [16, 40, 62, 64, 256])
def test_bins_cover_every_lag_once_at_any_context(context):
    for buckets in (BUCKETS, LagBuckets.for_model(window=16, layers=1)):
        edges = buckets.edges(context)
        assert edges[0] == 1 and edges[-1] == context + 1 and edges == sorted(set(edges))


def test_wilson_interval_is_that_of_the_books():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for correct, asked, low, high in (
        (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(correct, asked)
        assert found.value == correct / asked
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert wilson(29, 29).high == 1.0 and wilson(0, 0) is None


def test_a_paired_difference_varies_by_what_the_models_do_not_share():
    hard = np.arange(20) % 3  # both models miss the same: nothing of it is in the interval
    asked = np.full(20, 4)
    same = paired_difference(asked - hard, asked - hard, asked)
    assert same == (0.0, 0.0, 0.0)
    ours = asked - hard - (np.arange(20) == 7)
    found = paired_difference(ours, asked - hard, asked)
    assert found.value == -1 / 80
    # By hand: residuals -1 + 4/80 once and 4/80 nineteen times; sqrt(20/19 * sum of squares) / 80.
    error = (20 / 19 * ((1 - 0.05) ** 2 + 19 * 0.05**2)) ** 0.5 / 80
    assert found.high - found.value == pytest.approx(1.959964 * error)


def test_a_paired_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):
        asked = rng.integers(1, 6, 120)
        luck = rng.normal(0, 0.1, 120)  # of a row: its answers depend on each other
        ours, theirs = (rng.binomial(asked, np.clip(share + luck, 0, 1)) for share in (0.6, 0.7))
        found = paired_difference(ours, theirs, asked)
        held.append(found.low <= -0.1 <= found.high)
    assert 0.91 <= np.mean(held) <= 0.985


def test_different_questions_are_not_paired():
    with pytest.raises(ValueError, match="clusters=3, 3, 2 must be as many"):
        paired_difference([1, 2, 3], [1, 2, 3], [1, 1])
    assert paired_difference([1], [0], [1]) is None


def test_an_informed_guess_is_one_of_the_values_shown_so_far():
    values = [[-1, 5, -1, 5, -1, 7, -1, -1], [3, -1, -1, -1, 4, -1, 6, -1]]
    asked = [[0, 0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1]]
    lag = [[0, 0, 1, 0, 2, 0, 70, 0], [0, 0, 0, 0, 0, 0, 0, 70]]
    found = informed_guess(values, asked, lag, BUCKETS)
    assert found["near"] == 1.0 and found["far"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert found["mid"] is None and found["relay"] is None


def test_answers_of_a_class_are_counted_row_by_row():
    asked = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 1]], bool)
    lag = np.array([[70, 80, 2], [2, 70, 70], [0, 90, 99]])
    correct = np.array([[1, 0, 1], [1, 1, 1], [1, 1, 1]], bool)
    assert answers_by_row(correct, asked, lag, "far", BUCKETS) == {"asked": [2, 2], "correct": [1, 2]}


def test_bits_of_rows_average_to_bits_per_byte_where_rows_are_equally_long():
    nll = np.random.default_rng(1).gamma(2.0, size=(6, 8))
    mask = np.ones((6, 8), bool)
    mask[2] = False
    rows = bits_by_row(nll, mask)
    assert len(rows) == 5 and np.mean(rows) == pytest.approx(bits_per_byte(nll, mask), abs=1e-3)


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
