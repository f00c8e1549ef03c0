"""However a prompt is cut into chunks, every selection and every stored row is the same."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import running
from tests.model.comparing import Tally, assert_same_run
from tests.model.running import run_chunks

# Window rows unrounded: they leave the ring during a run, so one that rounded the other way would go unseen at its end.
CFG = running.shallow(window_format="fp32")
LENGTH = 40


@st.composite
def chunkings(draw, length=LENGTH):
    """Chunk sizes that add up to `length`; short and ring-exceeding chunks alike."""
    sizes, left = [], length
    while left:
        size = min(left, draw(st.sampled_from([1, 1, 2, 3, 5, 9, 11, 16])))
        sizes.append(size)
        left -= size
    return sizes


@functools.cache
def whole(seed):
    """The prompt of that seed in one chunk: (run, stored rows)."""
    session = run_chunks(CFG, running.parameters(CFG), running.prompt(LENGTH, seed), [LENGTH])
    return session.runs[0], session.stored(0)


@pytest.mark.smoke
@settings(max_examples=25)
@given(sizes=chunkings(), seed=st.integers(0, 2))
def test_chunking_never_changes_a_selection(sizes, seed):
    parts = run_chunks(CFG, running.parameters(CFG), running.prompt(LENGTH, seed), sizes)
    tally = Tally()
    assert_same_run((CFG, running.parameters(CFG)), whole(seed), (parts.runs[0], parts.stored(0)), tally)
    tally.check()


@settings(max_examples=10)
@given(sizes=chunkings(), seed=st.integers(0, 2))
def test_garbage_in_unwritten_rows_is_never_read(sizes, seed):
    """Every byte that the sequence has not written decodes to NaN."""
    parts = run_chunks(CFG, running.parameters(CFG), running.prompt(LENGTH, seed), sizes, poison=True)
    assert_same_run((CFG, running.parameters(CFG)), whole(seed), (parts.runs[0], parts.stored(0)))
