"""The gate on made-up rows: every way to fail, and the one way to pass."""

import pytest

from experiments.gate import LEARNED, NOT_A_RESULT, NOT_LEARNED, judge
from tests.experiments.made_up import row, rows

SEEDS = (0, 1, 2)


def passed(found, seeds=SEEDS):
    return [check.passed for check in judge(found, seeds).checks]


def changed(found, schedule, seed, **changes):
    """The rows with one of them replaced."""
    encoder, decoder = schedule or (None, None)
    new = row(schedule, seed, **changes)
    return [new if (r["encoder"], r["decoder"], r["seed"]) == (encoder, decoder, seed) else r for r in found]


def without(found, schedule, seed):
    encoder, decoder = schedule or (None, None)
    return [r for r in found if (r["encoder"], r["decoder"], r["seed"]) != (encoder, decoder, seed)]


def test_a_solved_study_is_learned():
    gate = judge(rows(), SEEDS)
    assert gate.status == LEARNED and all(check.passed for check in gate.checks)
    assert "5 of 5 schedules" in gate.checks[2].sentence


def test_window_only_must_solve_near_recall_in_every_seed():
    assert passed(changed(rows(), None, 1, near=0.949, far=0.04)) == [False, True, True]
    assert passed(changed(rows(), None, 1, near=0.95, far=0.04)) == [True, True, True]


def test_window_only_must_fail_far_recall_in_every_seed():
    assert passed(changed(rows(), None, 2, near=0.97, far=0.2)) == [True, False, True]
    assert passed(changed(rows(), None, 2, near=0.97, far=0.19)) == [True, True, True]


def test_one_schedule_must_beat_it_by_20_points_in_every_seed():
    every = {schedule: 0.20 for schedule in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))}
    found = rows(far=every)
    assert passed(found) == [True, True, False]
    for seed in SEEDS[:2]:  # in two of three seeds is not in every seed
        found = changed(found, (4, 4), seed, far=0.9)
    assert passed(found) == [True, True, False]
    found = changed(found, (4, 4), 2, far=0.25)
    assert passed(found) == [True, True, True]
    assert "1 of 5 schedules" in judge(found, SEEDS).checks[2].sentence


def test_different_schedules_in_different_seeds_do_not_make_one():
    every = {schedule: 0.1 for schedule in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))}
    found = rows(far=every)
    for seed, schedule in enumerate(((1, 1), (2, 1), (2, 2))):
        found = changed(found, schedule, seed, far=1.0)
    assert passed(found) == [True, True, False]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_control_fails_everything(seed):
    assert passed(without(rows(), None, seed)) == [False, False, False]


def test_a_missing_seed_of_the_only_good_schedule_fails():
    every = {schedule: 0.1 for schedule in ((2, 1), (2, 2), (4, 2), (4, 4))}
    assert passed(rows(far=every)) == [True, True, True]
    assert passed(without(rows(far=every), (1, 1), 1)) == [True, True, False]


def test_a_diverged_run_counts_as_missing():
    lost = {"group": "main", "encoder": None, "decoder": None, "seed": 1, "diverged": "the loss is not finite."}
    gate = judge([*without(rows(), None, 1), lost], SEEDS)
    assert gate.status == NOT_LEARNED and "97.0%, missing, 97.0%" in gate.checks[0].sentence


def test_rows_of_other_groups_do_not_count():
    assert passed([*rows(), row(None, 0, near=0.1, far=0.9, group="large")]) == [True, True, True]


def test_no_rows_and_no_seeds_fail():
    assert passed([]) == [False, False, False]
    assert judge(rows(), ()).status == NOT_LEARNED


def test_a_bucket_in_which_nothing_was_asked_counts_as_missing():
    found = rows()
    found[0]["recall"]["by_bucket"]["near"]["value"] = None
    assert passed(found) == [False, True, True]


def test_a_check_is_never_a_result():
    assert judge(rows(), SEEDS, is_check=True).status == NOT_A_RESULT
