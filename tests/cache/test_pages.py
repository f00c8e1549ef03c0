"""The host page allocator: every page has at most one holder, and refusals change nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax.cache.pages import PagePool

ROOT = Path(__file__).resolve().parents[2]


def test_a_sequence_grows_page_by_page():
    pool = PagePool(8, page_tokens=4)
    assert pool.pages("a") == ()
    assert pool.reserve("a", 1) == (0,)
    assert pool.reserve("a", 4) == (0,)
    assert pool.reserve("b", 5) == (1, 2)
    assert pool.reserve("a", 5) == pool.pages("a") == (0, 3)
    assert pool.num_free == 4


def test_reserving_less_never_takes_pages_away():
    pool = PagePool(8, page_tokens=4)
    pool.reserve("a", 12)
    assert pool.reserve("a", 1) == (0, 1, 2)


def test_released_pages_are_the_next_given_out():
    pool = PagePool(3, page_tokens=4)
    pool.reserve("a", 8)
    pool.reserve("b", 4)
    assert pool.release("a") == (0, 1)
    assert pool.pages("a") == ()
    assert pool.reserve("c", 8) == (0, 1)


def test_an_exhausted_pool_names_need_and_have_and_gives_nothing():
    pool = PagePool(3, page_tokens=4)
    pool.reserve("a", 8)
    with pytest.raises(ValueError, match=r"sequence 'b' needs 2 more pages of 4 for 5 tokens, have 1 free of 3"):
        pool.reserve("b", 5)
    with pytest.raises(ValueError, match=r"sequence 'a' needs 2 more pages of 4 for 16 tokens, have 1 free of 3"):
        pool.reserve("a", 16)
    assert (pool.num_free, pool.pages("a"), pool.pages("b")) == (1, (0, 1), ())
    with pytest.raises(ValueError, match="'b' holds no pages"):
        pool.release("b")


def test_several_sequences_get_their_pages_together_or_not_at_all():
    pool = PagePool(4, page_tokens=4)
    pool.reserve("a", 4)
    with pytest.raises(ValueError, match=r"sequence 'c' needs 2 more pages of 4 for 8 tokens, have 1 free of 4"):
        pool.reserve_all({"a": 8, "b": 3, "c": 8})
    assert (pool.num_free, pool.pages("a"), pool.pages("b")) == (3, (0,), ())
    pool.reserve_all({"a": 8, "b": 3})
    assert (pool.pages("a"), pool.pages("b")) == ((0, 1), (2,))


def test_a_second_release_is_refused_and_frees_nothing_twice():
    pool = PagePool(2, page_tokens=4)
    pool.reserve("a", 8)
    pool.release("a")
    with pytest.raises(ValueError, match=r"'a' holds no pages: it was released before"):
        pool.release("a")
    assert pool.num_free == 2
    assert pool.reserve("b", 8) == (0, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PagePool(0, 4), "num_pages=0 must be at least 1"),
        (lambda: PagePool(4, 0), "page_tokens=0 must be at least 1"),
        (lambda: PagePool(4, 4).reserve("a", -1), "tokens=-1 of sequence 'a' must not be negative"),
    ],
)
def test_bad_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 20)), max_size=40))
def test_no_history_gives_a_page_to_two_sequences_or_loses_one(history):
    pool = PagePool(6, page_tokens=4)
    for sequence, tokens in history:  # -1 releases
        try:
            pool.release(sequence) if tokens < 0 else pool.reserve(sequence, tokens)
        except ValueError:
            pass
        held = [page for s in range(4) for page in pool.pages(s)]
        assert len(held) == len(set(held)) == pool.num_pages - pool.num_free
        assert all(0 <= page < 6 for page in held)


def test_the_allocator_does_not_import_jax():
    program = "import sys, dsflash_jax.cache.pages\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
