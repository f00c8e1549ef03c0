"""Calibration error and sequential temperature scaling, on blocks whose true chances are known."""

import numpy as np
import pytest

from dsflash_jax.training.calibration import (
    TEMPERATURES,
    Rounds,
    calibration_error,
    error_floor,
    fit_temperatures,
    position_errors,
    reliability,
    survival,
)


def blocks(count, distortion, seed=0):
    """Blocks accepted by the confidences they state, whose logits are then multiplied per position."""
    draws = np.random.default_rng(seed)
    logits = draws.normal(0.7, 1.5, (count, len(distortion)))
    kept = draws.random(logits.shape) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(kept, axis=1).sum(axis=1)
    return Rounds(logits * distortion, np.full(count, len(distortion)), accepted)


def test_the_error_is_the_mean_distance_weighted_by_bins():
    predicted, observed = np.array([0.1, 0.1, 0.1, 0.9]), np.array([True, False, False, True])
    assert calibration_error(predicted, observed, bins=2) == pytest.approx(0.75 * (1 / 3 - 0.1) + 0.25 * 0.1)
    assert [b.count for b in reliability(predicted, observed, bins=2)] == [3, 1]
    assert reliability(np.array([1.0]), np.array([True]))[0] == (1, 1.0, 1.0)
    with pytest.raises(ValueError, match="predicted is empty"):
        calibration_error(np.zeros(0), np.zeros(0, bool))


def test_the_floor_is_what_chance_leaves_of_true_predictions():
    few, many = (np.random.default_rng(2).random(count) for count in (100, 40_000))
    assert 0.05 < error_floor(few) < 0.2 and error_floor(many) < 0.01
    assert error_floor(np.array([0.0, 1.0])) == 0.0


def test_temperatures_that_distorted_the_logits_are_found_from_left_to_right():
    rounds = blocks(40_000, (2.0, 1.0, 0.5))
    found = fit_temperatures(rounds)
    np.testing.assert_allclose(found, (2.0, 1.0, 0.5), rtol=0.2)
    before, after = position_errors(rounds, (1.0,) * 3), position_errors(rounds, found)
    assert max(after) < 0.02 < max(before)


def test_held_out_blocks_gain_too():
    found = fit_temperatures(blocks(4_000, (3.0, 3.0)))
    other = blocks(4_000, (3.0, 3.0), seed=1)
    assert all(
        a < 0.5 * b for a, b in zip(position_errors(other, found), position_errors(other, (1.0, 1.0)), strict=True)
    )


def test_a_later_position_is_fitted_on_the_product_with_the_scaled_ones_before_it():
    """Fitted alone, a position with right confidences keeps them; behind a wrong one that was put right, too."""
    assert fit_temperatures(blocks(40_000, (4.0, 1.0)))[1] == pytest.approx(1.0, rel=0.2)


def test_drafts_that_were_not_verified_teach_nothing():
    rounds = blocks(2_000, (1.0, 1.0))
    cut = rounds._replace(verified=np.ones(2_000, int), accepted=np.minimum(rounds.accepted, 1))
    assert fit_temperatures(cut)[1] == 1.0 and position_errors(cut, (1.0, 1.0))[1] is None


def test_scaling_keeps_the_order_and_equal_errors_keep_one():
    logits = np.array([[-2.0], [0.0], [3.0]])
    assert (np.diff(survival(logits, [7.0])[:, 0]) > 0).all() and 1.0 in np.round(TEMPERATURES, 12)
    assert survival(np.array([[-1e4, 1e4]]), (1.0, 1.0)).tolist() == [[0.0, 0.0]]
    always = Rounds(np.zeros((8, 1)), np.ones(8, int), np.tile([0, 1], 4))
    assert fit_temperatures(always) == (pytest.approx(1.0),)
