"""Who shares a step, where pages lie, what a slot held before and how wide the buckets are never matter."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsflash_jax.cache.layout import cache_layout
from tests.model import running
from tests.model.comparing import Tally, assert_same_run
from tests.model.running import PAGES, Session, poisoned, run_chunks

# Window rows unrounded: they leave the ring during a run, so one that rounded the other way would go unseen at its end.
CFG = running.shallow(window_format="fp32")
LENGTH = 40
SLOTS = 4


@functools.cache
def alone(seed):
    """The prompt of that seed processed by itself in one chunk: (run, stored rows)."""
    session = run_chunks(CFG, running.parameters(CFG), running.prompt(LENGTH, seed), [LENGTH])
    return session.runs[0], session.stored(0)


ONE_STEP = st.tuples(st.permutations(range(SLOTS)), st.tuples(*[st.sampled_from([1, 0, 2, 5, 11, 16])] * SLOTS))


@st.composite
def schedules(draw):
    """Steps that process SLOTS prompts, each an ordered {slot: rows} of at most 16 rows; prefill and decode mixed.

    A few drawn steps are repeated until every prompt is done.
    """
    patterns, left, out = draw(st.lists(ONE_STEP, min_size=1, max_size=5)), dict.fromkeys(range(SLOTS), LENGTH), []
    while any(left.values()):
        step, room = {}, 16
        order, sizes = patterns[len(out) % len(patterns)]
        for slot in order:
            size = min(room, left[slot], sizes[slot])
            if size:
                step[slot], room = size, room - size
        step = step or {slot: 1 for slot in left if left[slot]}
        left = {slot: left[slot] - step.get(slot, 0) for slot in left}
        out.append(step)
    return out


def new_session(**options):
    return Session(CFG, running.parameters(CFG), slots=SLOTS, **options)


def run_schedule(schedule, *, order=range(SLOTS), **options):
    """The session after the schedule; prompt `seed` is in slot order[seed]."""
    session, at = new_session(**options), dict.fromkeys(range(SLOTS), 0)
    prompts = [running.prompt(LENGTH, seed) for seed in range(SLOTS)]
    for step in schedule:
        work = {order[seed]: prompts[seed][at[seed] : at[seed] + size] for seed, size in step.items()}
        session.feed(work, rows=16, seqs=SLOTS)
        at = {seed: at[seed] + step.get(seed, 0) for seed in at}
    return session


def assert_same_as_alone(session, slot=0, seed=0, tally=None):
    model = CFG, running.parameters(CFG)
    assert_same_run(model, alone(seed), (session.runs[slot], session.stored(slot)), tally)


def assert_each_as_alone(session, order=range(SLOTS)):
    tally = Tally()
    for seed, slot in enumerate(order):
        assert_same_as_alone(session, slot, seed, tally)
    tally.check()


@pytest.mark.smoke
@settings(max_examples=15)
@given(schedule=schedules())
def test_batch_partners_never_change_a_selection(schedule):
    """Also B08 (rows of A alone and packed), B36 (indices from the sequence's own entry 0), B09 (one start each)."""
    assert_each_as_alone(run_schedule(schedule))


@settings(max_examples=10)
@given(schedule=schedules(), pages=st.permutations(range(SLOTS * PAGES)), order=st.permutations(range(SLOTS)))
def test_pages_and_slots_may_lie_anywhere(schedule, pages, order):
    """B43: values and scales come back through shuffled block tables, by attention and by indexer."""
    tables = {slot: pages[slot * PAGES : (slot + 1) * PAGES] for slot in range(SLOTS)}
    assert_each_as_alone(run_schedule(schedule, tables=tables, order=order, poison=True), order)


@settings(max_examples=10)
@given(schedule=schedules(), before=st.lists(st.integers(1, 16), min_size=1, max_size=3), poison=st.booleans())
def test_what_a_slot_held_before_never_matters(schedule, before, poison):
    """B11: the earlier sequence ends anywhere, also inside a group; its rows stay, or are replaced by garbage."""
    session = new_session()
    for size in before:
        session.feed({slot: running.prompt(size, 50 + slot)[: 16 // SLOTS] for slot in range(SLOTS)}, rows=16)
    if poison:
        session.cache = poisoned(session.cache)
    fresh = new_session(tables=session.tables)
    fresh.cache = session.cache
    prompts, at = [running.prompt(LENGTH, seed) for seed in range(SLOTS)], [0] * SLOTS
    for step in schedule:
        fresh.feed({s: prompts[s][at[s] : at[s] + size] for s, size in step.items()}, rows=16, seqs=SLOTS)
        at = [at[s] + step.get(s, 0) for s in range(SLOTS)]
    assert_each_as_alone(fresh)


@pytest.mark.smoke
def test_padding_rows_sequences_and_pages_change_nothing():
    """B06, B07: a bucket larger than needed neither pools padding nor writes anything."""
    tokens = running.prompt(LENGTH, 0)
    for rows, seqs, pages in ((16, 1, PAGES), (16, 4, PAGES), (64, 1, PAGES), (16, 4, 2 * PAGES)):
        session = new_session(poison=True)
        for at in range(0, LENGTH, 13):
            session.feed({0: tokens[at : at + 13]}, rows=rows, seqs=seqs, pages=pages)
        assert_same_as_alone(session)
        assert_only_own_rows_written(session, 0, LENGTH)


def assert_only_own_rows_written(session: Session, slot: int, length: int) -> None:
    """Every byte that no token up to `length` owns still is the garbage the session started with."""
    layout = cache_layout(session.cfg)
    pages, ring = np.array(session.cache.pages), np.array(session.cache.ring)
    state = np.array(session.cache.state)
    for member in layout.members:
        for entry in range(length // member.tokens_per_row):
            at = member.offset + entry % member.rows_per_page * member.row_bytes
            pages[session.tables[slot][entry // member.rows_per_page], at : at + member.row_bytes] = running.POISON_BYTE
    for member in layout.ring:
        rows = min(length, member.rows_per_page)
        ring[slot, member.offset : member.offset + rows * member.row_bytes] = running.POISON_BYTE
    state[slot, :, : min(length, layout.state_rows)] = running.POISON_FLOAT
    assert (pages == running.POISON_BYTE).all() and (ring == running.POISON_BYTE).all() and np.isnan(state).all()
    assert session.cache.length.tolist() == [length if s == slot else 77 for s in range(len(session.cache.length))]


@pytest.mark.parametrize("poison", [False, True])
def test_garbage_beside_a_short_table_is_never_read(poison):
    """A table hardly longer than the selection is read whole under a mask; its unwritten rows decode to NaN."""
    tokens, session = running.prompt(LENGTH, 0), new_session(poison=poison)
    for at in (0, 14):
        session.feed({0: tokens[at : at + 14 + at // 7]}, rows=16, pages=4)
    session.feed({0: tokens[30:]}, rows=16)
    assert_same_as_alone(session)


def test_a_partner_far_ahead_never_pulls_in_garbage():
    """Padding of a tile must not select for it: here another sequence's entries, unwritten in this one's pages."""
    tokens, session = [running.prompt(LENGTH, seed) for seed in range(2)], new_session(poison=True)
    shape = {"rows": 64, "seqs": SLOTS, "pages": 4}
    session.feed({0: tokens[0][:25]}, **shape)
    session.feed({0: tokens[0][25:30], 1: tokens[1][:5]}, **shape)
    for slot in range(2):
        session.feed({slot: tokens[slot][session.runs[slot].length :]}, rows=64)
        assert_same_as_alone(session, slot, slot)


def test_an_arena_may_be_larger_and_its_pages_wider():
    """Other groups share the arena: pages beyond the group's bytes, more pages than tables name, none of it touched."""
    tokens, page = running.prompt(LENGTH, 0), cache_layout(CFG).page_bytes
    tables = {0: [90 - 5 * i for i in range(PAGES)]}
    arena = {"tables": tables, "num_pages": 100, "page_bytes": page + 37, "poison": True}
    parts = run_chunks(CFG, running.parameters(CFG), tokens, [7, 16, 1, 16], row_bucket=16, **arena)
    assert_same_as_alone(parts)
    assert (np.asarray(parts.cache.pages)[:, page:] == running.POISON_BYTE).all()
    others = [p for p in range(100) if p not in tables[0][: -(-LENGTH // CFG.page_size)]]
    assert (np.asarray(parts.cache.pages)[others] == running.POISON_BYTE).all()


def test_a_page_narrower_than_the_group_is_refused():
    with pytest.raises(ValueError, match="page_bytes=10"):
        Session(CFG, None, page_bytes=10)
