"""The rule of `comparing.py` itself: what it lets pass and what it must catch."""

import numpy as np
import pytest

from dsflash_jax.cache.layout import cache_layout
from tests.model import running
from tests.model.comparing import Tally, assert_same_run, count_flips, split_codes, unrounded
from tests.model.running import Run

CFG = running.tiny()
MAIN = next(m for m in cache_layout(CFG).members if m.kind == "main")


def with_logits(value, selection=(0, 1)):
    return Run(logits=[np.full(3, value, np.float32)], layers={(2, "selection"): [np.array(selection)]})


def rows_of(x):
    return {("main", MAIN.layer): np.asarray(MAIN.format.pack(np.asarray(x, np.float32)))}


def flat_row(value):
    """One row whose first element is `value`, in a group with scale 1 and a margin of 6e-6."""
    return np.array([[value, 6.0] + [0.0] * 30], np.float32)


def compare(x, y, tally=None):
    return count_flips(CFG, rows_of(x), rows_of(y), lambda *_: x, tally)


def test_equal_codes_ask_for_close_logits_and_equal_selections():
    same = rows_of(flat_row(1.0))
    assert_same_run((CFG, None), (with_logits(0.0), same), (with_logits(9e-6), same))
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_run((CFG, None), (with_logits(0.0), same), (with_logits(2e-5), same))
    with pytest.raises(AssertionError, match="selection"):
        assert_same_run((CFG, None), (with_logits(0.0), same), (with_logits(0.0, (0, 2)), same))
    with pytest.raises(AssertionError, match="finite"):
        assert_same_run((CFG, None), (with_logits(np.nan), same), (with_logits(np.nan), same))


def test_a_flip_counts_only_at_a_rounding_boundary():
    assert compare(flat_row(1.0), flat_row(1.0)) == 0
    assert compare(flat_row(1.25 - 5e-6), flat_row(1.25 + 5e-6)) == 1
    with pytest.raises(AssertionError, match="no rounding boundary"):
        compare(flat_row(1.25 - 7e-6), flat_row(1.25 + 7e-6))


def test_a_flip_by_two_steps_fails():
    with pytest.raises(AssertionError, match="2 steps"):
        compare(flat_row(1.0), flat_row(2.0))


def test_another_scale_fails():
    with pytest.raises(AssertionError, match="scales"):
        compare(flat_row(1.0), 2 * flat_row(1.0))


def test_flips_are_counted_against_all_codes():
    tally = Tally()
    compare(flat_row(1.25 - 5e-6), flat_row(1.25 + 5e-6), tally)
    assert (tally.codes, tally.flips) == (32, 1)
    with pytest.raises(AssertionError, match="1 of 32"):
        tally.check()
    tally.codes = 1000
    tally.check()


def test_one_comparison_alone_keeps_to_the_limit_too(monkeypatch):
    monkeypatch.setattr("tests.model.comparing.unrounded", lambda *_: flat_row(1.25 - 5e-6))
    pair = [(with_logits(0.0), rows_of(flat_row(1.25 + off))) for off in (-5e-6, 5e-6)]
    with pytest.raises(AssertionError, match="1 of 32"):
        assert_same_run((CFG, None), *pair)
    tally = Tally(codes=1000)
    assert assert_same_run((CFG, None), *pair, tally) == 1 and tally.flips == 1


def test_codes_are_ordered_like_their_values():
    x = np.array([[-6.0, -0.5, -0.0, 0.0, 0.5, 6.0] + [0.0] * 26], np.float32)
    codes, scales = split_codes(MAIN.format, 32, np.asarray(MAIN.format.pack(x)))
    assert codes[0, :6].tolist() == [-8, -2, -1, 0, 1, 7] and scales.shape == (1, 2)


@pytest.mark.slow
def test_recomputed_inputs_are_what_the_model_stored():
    """Otherwise the boundary check would look at other numbers than those that were rounded."""
    params = running.parameters(CFG)
    session = running.run_chunks(CFG, params, running.prompt(15), [15])
    layout, stored = cache_layout(CFG), session.stored(0)
    for member in layout.members + layout.ring:
        x = unrounded(CFG, params, session.runs[0], member.kind, member.layer)
        rows = stored[member.kind, member.layer]
        packed = np.asarray(member.format.pack(x[-len(rows) :].astype(np.float32)))
        assert np.array_equal(packed, rows), (member.kind, member.layer)
