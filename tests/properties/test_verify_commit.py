"""Verified tokens that are rejected leave no trace: continuing equals sequential decoding."""

import dataclasses

import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from tests.model import running
from tests.model.comparing import assert_close_logits, count_flips
from tests.model.running import PAGES, POISON_BYTE, stored_rows

ROWS, SEQS = 36, 4
LENGTH = 34
# Each sequence its own tokens and pages, so that a row taken from another sequence has another value.
PROMPTS = [running.prompt(LENGTH, seed) for seed in range(SEQS)]
TABLES = {slot: list(range(slot, 64, SEQS)) for slot in range(SEQS)}
ROUND = {"window_format": "fp32"}  # window rows leave the ring; only codes that stay to the end are compared


@pytest.fixture(scope="module")
def reference():
    """Per sequence: logits of every position of its true tokens, and stored rows at the end, without verification.

    The ring and the compressor state are sized for the default number of drafts; logical rows are the same for any.
    """
    cfg = running.shallow(**ROUND)
    runs = [running.run_chunks(cfg, running.parameters(cfg), tokens, [16, 16, 2], row_bucket=16) for tokens in PROMPTS]
    return [(session.runs[0].logits, session.stored(0)) for session in runs]


class Speculator:
    """Drives `verify` and `commit` over SEQS sequences, each following its own true tokens at its own length."""

    def __init__(self, cfg, poison):
        self.cfg, self.params, self.poison = cfg, running.parameters(cfg), poison
        self.cache = ModelCache.empty(cfg, 64, SEQS)
        if poison:
            self.cache = running.poisoned(self.cache)
        self.length = [0] * SEQS

    def verify(self, rows, accepted):
        """Verifies rows[s] tokens per sequence, the first accepted[s] of them true: logits of the accepted rows."""
        chunks = []
        for slot in range(SEQS):
            at, good, n, true = self.length[slot], accepted[slot], rows[slot], PROMPTS[slot]
            wrong = [(t + 7) % self.cfg.vocab_size for t in (true + true)[at + good : at + n]]
            if n:
                chunks.append(Chunk(slot, true[at : at + good] + wrong, at, TABLES[slot]))
        step = make_step(chunks, self.cfg, rows=ROWS, seqs=SEQS, pages=PAGES)
        logits, self.cache = steps.verify(self.params, self.cache, step, self.cfg)
        kept = np.zeros(SEQS, np.int32)
        kept[: len(chunks)] = [accepted[c.slot] for c in chunks]
        self.cache = steps.commit(self.cache, step, kept)
        out, row = {}, 0
        for chunk in chunks:
            out[chunk.slot] = np.asarray(logits)[row : row + accepted[chunk.slot]]
            row += len(chunk.tokens)
            self.length[chunk.slot] += accepted[chunk.slot]
            assert self.cache.length[chunk.slot] == self.length[chunk.slot]
        if self.poison:
            self.cache = poison_unreferenced(self.cfg, self.cache, self.length)
        return out

    def check(self, reference, rows, accepted):
        """`verify`, with the logits of all accepted rows compared with those of the sequence run by itself."""
        before = list(self.length)
        for slot, values in self.verify(rows, accepted).items():
            if len(values):
                logits = reference[slot][0]
                assert_close_logits(values, logits[before[slot] : before[slot] + len(values)])

    def check_stored(self, reference):
        """Entries and index keys of every sequence are bit for bit those of the sequence run by itself."""
        for slot, length in enumerate(self.length):
            stored = stored_rows(self.cfg, self.cache, slot, TABLES[slot], length)
            for (kind, layer), rows in stored.items():
                if kind in ("main", "index"):
                    expected = reference[slot][1][kind, layer][: len(rows)]
                    assert np.array_equal(rows, expected), (slot, kind, layer)


def poison_unreferenced(cfg, cache, lengths) -> ModelCache:
    """Replaces by garbage every row that the committed tokens do not need for what follows."""
    layout = cache_layout(cfg)
    clean, dirty = [np.array(a) for a in (cache.pages, cache.ring, cache.state)], running.poisoned(cache)
    pages, ring, state = np.array(dirty.pages), np.array(dirty.ring), np.array(dirty.state)
    for slot, length in enumerate(lengths):
        for member in layout.members:
            for entry in range(length // member.tokens_per_row):
                page = TABLES[slot][entry // member.rows_per_page]
                at = member.offset + entry % member.rows_per_page * member.row_bytes
                pages[page, at : at + member.row_bytes] = clean[0][page, at : at + member.row_bytes]
        for member in layout.ring:
            for p in range(max(0, length - cfg.sliding_window + 1), length):
                at = member.offset + p % member.rows_per_page * member.row_bytes
                ring[slot, at : at + member.row_bytes] = clean[1][slot, at : at + member.row_bytes]
        for owner in range(len(layout.state_owners)):
            for p in range(length - length % 2, length):
                state[slot, owner, p % layout.state_rows] = clean[2][slot, owner, p % layout.state_rows]
    assert (pages == POISON_BYTE).any() and (ring == POISON_BYTE).any() and np.isnan(state).any()
    return dataclasses.replace(cache, pages=pages, ring=ring, state=state)


def check_rejections(drafts, reference, poison):
    """Every accepted count 0..drafts + 1 at both parities of the committed length, then two more decoded tokens.

    In each step the four sequences have other lengths, other numbers of rows and other accepted counts (B92).
    """
    cfg = running.shallow(num_draft_tokens=drafts, **ROUND)
    width = drafts + 1
    for first in (5, 6):
        for accepted in range(width + 1):
            spec = Speculator(cfg, poison)
            starts = [first + slot for slot in range(SEQS)]
            while spec.length != starts:
                rows = [min(width, start - at) for start, at in zip(starts, spec.length, strict=True)]
                spec.check(reference, rows, rows)
            rows = [width, max(1, width - 1), max(1, width - 2), width]
            counts = [accepted, min(accepted, rows[1]), rows[2] - min(accepted, rows[2]), width - accepted]
            spec.check(reference, rows, counts)
            for _ in range(2):
                spec.check(reference, [1] * SEQS, [1] * SEQS)
            spec.check_stored(reference)


@pytest.mark.smoke
def test_any_accepted_count_continues_like_sequential_decoding(reference):
    """B13, B14, B89: five drafts, both parities, all counts, everything past the committed length turned to garbage."""
    check_rejections(5, reference, poison=True)


@pytest.mark.parametrize("drafts", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 6, 7, 8)])
def test_any_number_of_drafts_continues_like_sequential_decoding(reference, drafts):
    """B13: room in ring and compressor state follows num_draft_tokens; the plan is not sized for a fixed few."""
    check_rejections(drafts, reference, poison=True)


def test_many_verified_blocks_leave_what_decoding_leaves(reference):
    """Rejected rows stay in the caches here, and are overwritten or never read."""
    cfg, draws = running.shallow(**ROUND), np.random.default_rng(4)
    for _ in range(2):
        spec = Speculator(cfg, poison=False)
        while min(spec.length) < LENGTH:
            rows = [min(int(draws.integers(0, 7)), LENGTH - at) for at in spec.length]
            if not any(rows):
                rows = [int(at < LENGTH) for at in spec.length]
            spec.check(reference, rows, [int(draws.integers(0, r + 1)) for r in rows])
        for slot in range(SEQS):
            stored = stored_rows(cfg, spec.cache, slot, TABLES[slot], LENGTH)
            assert count_flips(cfg, reference[slot][1], stored, None) == 0
        spec.check_stored(reference)


@pytest.mark.parametrize("drafts", range(9))
def test_retained_rows_cover_a_rejected_block_and_no_less(drafts):
    """B14: window - 1 old rows and m - 1 compressor rows survive a wholly rejected block, at every draft width.

    What position p needs is the m - 1 previous positions, whatever the draft width; the rest is rollback room.
    """
    for cfg in (running.tiny(num_draft_tokens=drafts), running.shallow(num_draft_tokens=drafts)):
        layout, ratio = cache_layout(cfg), 2
        for committed in range(1, 40):
            overwritten = {p % layout.ring_rows for p in range(committed, committed + drafts + 1)}
            needed = {p % layout.ring_rows for p in range(max(0, committed - cfg.sliding_window + 1), committed)}
            assert not overwritten & needed and layout.ring_rows == cfg.sliding_window + drafts + 1
            overwritten = {p % layout.state_rows for p in range(committed, committed + drafts + 1)}
            needed = {p % layout.state_rows for p in range(max(0, committed - ratio + 1), committed)}
            assert not overwritten & needed
        # Twice the room would be waste: half the rows do not suffice, unless the floor of 8 rules.
        assert layout.state_rows == 8 or layout.state_rows // 2 < drafts + 2
