"""Reported defects of compressors and their state, restated for this model (numbers: docs/pitfalls.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.layout import cache_layout
from tests.model import running
from tests.model.comparing import assert_close_logits, assert_same_run, unrounded
from tests.model.running import Session, run_chunks
from tests.oracles.compressor import pool_group

pytestmark = pytest.mark.smoke
CFG = running.shallow(window_format="fp32")
OWNER = 0  # ratio 2, runs an indexer


@pytest.fixture(scope="module")
def params():
    return running.parameters(CFG)


def chunked(params, tokens, sizes, **options):
    return run_chunks(CFG, params, tokens, sizes, row_bucket=16, **options)


def outcome(session, slot=0):
    return session.runs[slot], session.stored(slot)


def entry_count(session, layer, kind="main"):
    return len(session.stored(0)[kind, layer])


def selected(session, layer, slot=0):
    return [row[row >= 0].tolist() for row in session.runs[slot].stack(layer, "selection")]


def test_a_query_does_not_see_its_own_open_group(params):
    """B01: with another token 3 everything at positions 0..2 stays as it was; visible entries are 0, 1, 1, 2, 2, 3."""
    tokens = running.prompt(6, 0)
    other = tokens[:3] + [(tokens[3] + 1) % 96] + tokens[4:]
    before, after = chunked(params, tokens, [6]), chunked(params, other, [6])
    assert np.array_equal(before.runs[0].logits[:3], after.runs[0].logits[:3])
    assert not np.array_equal(before.runs[0].logits[3], after.runs[0].logits[3])
    assert [len(s) for s in selected(before, OWNER)] == [0, 1, 1, 2, 2, 3]
    assert [len(s) for s in selected(before, 1)] == [1, 2, 3, 4, 4, 4], "ratio 1: up to four selected"


def test_a_split_inside_a_group_gives_no_nan(params):
    """B03: chunks [1],[1],[3],[1] against [6]; nothing is emitted for an open group."""
    tokens = running.prompt(6, 0)
    whole, parts = chunked(params, tokens, [6]), Session(CFG, params)
    counts = []
    for at, size in ((0, 1), (1, 1), (2, 3), (5, 1)):
        parts.feed({0: tokens[at : at + size]}, rows=16)
        counts.append(entry_count(parts, OWNER))
    assert counts == [0, 1, 2, 3]
    assert_same_run((CFG, params), outcome(whole), outcome(parts))


def test_early_entries_stay_selectable_in_later_chunks(params):
    """B04: the third chunk and a decode step may select entries of the first; both kinds of rows grow together."""
    tokens = running.prompt(25, 2)
    session = Session(CFG, params)
    for at in (0, 8, 16, 24):
        session.feed({0: tokens[at : at + 8]}, rows=16)
        assert entry_count(session, OWNER) == entry_count(session, OWNER, "index") == session.runs[0].length // 2
    picks = selected(session, OWNER)
    assert min(min(p) for p in picks[16:24]) < 4, "an entry of the first chunk"
    assert min(picks[24]) < 8, "an entry before the last chunk"


def test_padding_is_never_pooled(params):
    """B06: right-padded lengths 3 and 4; the first ends with one entry and an open partner, the second with two."""
    session = Session(CFG, params, poison=True)
    tokens = running.prompt(4, 0)
    session.feed({0: tokens[:3], 1: tokens}, rows=16)
    assert [len(session.stored(slot)["main", OWNER]) for slot in (0, 1)] == [1, 2]
    assert [len(session.stored(slot)["open", OWNER]) for slot in (0, 1)] == [1, 0]
    pages = np.asarray(session.cache.pages)
    member = cache_layout(CFG).member(OWNER, "main")
    second = pages[session.tables[0][0], member.offset + member.row_bytes :][: member.row_bytes]
    assert (second == running.POISON_BYTE).all(), "entry 1 of the first sequence must not exist"
    session.feed({0: tokens[3:]}, rows=16)
    assert np.array_equal(session.stored(0)["main", OWNER], session.stored(1)["main", OWNER])


def test_a_decode_batch_publishes_only_at_group_ends(params):
    """B09: positions 0, 1, 2 and 7 in one step: entries 0 and 3 appear, the other two sequences only store."""
    session = Session(CFG, params)
    tokens = running.prompt(8, 0)
    session.feed({1: tokens[:1], 2: tokens[:2], 3: tokens[:7]}, rows=16)
    before = [len(session.stored(slot)["main", OWNER]) for slot in range(4)]
    session.feed({0: tokens[:1], 1: tokens[1:2], 2: tokens[2:3], 3: tokens[7:8]}, rows=16)
    after = [len(session.stored(slot)["main", OWNER]) for slot in range(4)]
    assert (before, after) == ([0, 0, 1, 3], [0, 1, 1, 4])
    alone = chunked(params, tokens, [8])
    assert_close_logits([session.runs[3].logits[7]], [alone.runs[0].logits[7]])


def test_a_reused_slot_forgets_its_open_group(params):
    """B11: X ends inside a group; its state and ring are then garbage; Y starts at 0 and equals a fresh run."""
    session, tokens = chunked(params, running.prompt(7, 5), [7]), running.prompt(9, 1)
    session.cache = running.poisoned(session.cache)
    session.restart(0)
    for size in (3, 2, 4):
        at = session.runs[0].length
        session.feed({0: tokens[at : at + size]}, rows=16)
    assert_same_run((CFG, params), outcome(chunked(params, tokens, [9])), outcome(session))


def test_a_group_split_over_two_calls_is_pooled_to_the_same_bits():
    """B16: stored entries, unrounded here, of one call and of three; a partner kept in bfloat16 would show."""
    cfg = running.single(main_format="fp32", index_format="fp32")
    params, tokens = running.parameters(cfg), running.prompt(6, 0)
    whole, parts = (run_chunks(cfg, params, tokens, sizes, row_bucket=16) for sizes in ([6], [1, 2, 3]))
    for kind in ("main", "index"):
        assert np.array_equal(whole.stored(0)[kind, 0], parts.stored(0)[kind, 0])
    assert whole.cache.state.dtype == np.float32
    attn, x = steps.bind(params, cfg).layers[0].attn, whole.runs[0].stack(0, "attn_in")[:2]
    kv, gate = np.asarray(attn.compressor.wkv.f32(x)), np.asarray(attn.compressor.wgate.f32(x))
    entry = whole.stored(0)["main", 0].view(np.float32)[0]
    latent = lambda *rows: np.asarray(attn.compressor.norm(pool_group(*rows)))  # noqa: E731
    np.testing.assert_allclose(entry, latent(kv, gate), rtol=0, atol=1e-5)  # entry 0 lies at position 0: not rotated
    assert np.abs(entry - latent(first_rounded(kv), first_rounded(gate))).max() > 1e-4, "a rounded partner"


def first_rounded(rows):
    """Rows with the first, which an earlier call left behind, rounded to bfloat16."""
    return np.stack([np.asarray(jnp.asarray(rows[0], jnp.bfloat16), np.float32), *rows[1:]])


def test_a_sequence_can_be_continued_only_where_its_ring_still_holds_the_window(params):
    """B18: after T tokens a ring of W + drafts + 1 rows serves any start from T - drafts - 2 on, and none before.

    Nothing on the device can tell: a start further back reads rows of later tokens in the place of its window.
    """
    tokens, layout = running.prompt(16, 0), cache_layout(CFG)
    full = chunked(params, tokens, [16])
    earliest = 16 - (layout.ring_rows - CFG.sliding_window + 1)
    assert earliest == 16 - CFG.num_draft_tokens - 2 == 9
    for start in range(earliest - 1, 16):
        chunk = Chunk(0, tokens[start : start + 1], start, full.tables[0], previous_token=tokens[start - 1])
        step = make_step([chunk], CFG, rows=16, seqs=1, pages=running.PAGES)
        logits, _, _ = steps.trace_step(params, jax.tree.map(jnp.copy, full.cache), step, CFG)
        apart = np.abs(np.asarray(logits)[0] - full.runs[0].logits[start]).max()
        assert apart <= 1e-5 if start >= earliest else apart > 1e-3, (start, apart)


def test_stored_rows_are_what_queries_read_in_the_call_that_wrote_them(params):
    """B58: prefill [8] and [4, 4] agree, so token 5 reads entry 1 rounded in both; unrounded it would differ."""
    tokens = running.prompt(8, 3)
    whole, parts = (chunked(params, tokens, sizes) for sizes in ([8], [4, 4]))
    assert_same_run((CFG, params), outcome(whole), outcome(parts))
    x = unrounded(CFG, params, whole.runs[0], "main", OWNER)
    member = cache_layout(CFG).member(OWNER, "main")
    stored = np.asarray(member.format.unpack(whole.stored(0)["main", OWNER], member.width))
    assert np.abs(stored - x).max() > 0.01, "rounding is visible at this scale"


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_entries_are_rotated_at_their_first_token(ratio):
    """B22: entry j turns by the angle of position j * m, also after a chunk border; B21: score and key depend on it."""
    cfg = running.single(compress_ratios=(ratio,), main_format="fp32", index_format="fp32", page_size=8)
    params, tokens = running.parameters(cfg), running.prompt(13, 0)
    session = run_chunks(cfg, params, tokens, [5, 8], row_bucket=16)
    attn = steps.bind(params, cfg).layers[0].attn
    x, rotated = session.runs[0].stack(0, "attn_in"), cfg.qk_rope_head_dim
    rows = session.stored(0)["main", 0].view(np.float32)
    table = {part: np.asarray(params["freqs"]["compressed"][part]) for part in ("cos", "sin")}
    for entry, row in enumerate(rows):
        group = x[entry * ratio : (entry + 1) * ratio]
        kv = np.asarray(attn.compressor.wkv.f32(group))
        if ratio > 1:
            gate = np.asarray(attn.compressor.wgate.f32(group))
            gate = np.exp(gate - gate.max(axis=0))
            kv = (gate / gate.sum(axis=0) * kv).sum(axis=0, keepdims=True)
        latent = np.asarray(attn.compressor.norm(kv[0]))[-rotated:]
        stored = row[-rotated:]
        turned = (stored[0::2] + 1j * stored[1::2]) / (latent[0::2] + 1j * latent[1::2])
        expected = table["cos"][entry * ratio] + 1j * table["sin"][entry * ratio]
        np.testing.assert_allclose(turned, expected, atol=1e-4)


def test_entries_of_equal_content_score_by_distance():
    """B21: with one repeated token all latents of the first layer are equal, yet scores differ by position."""
    cfg = running.single(compress_ratios=(1,), page_size=8, index_format="fp32")
    params = running.parameters(cfg)
    session = run_chunks(cfg, params, [7] * 13, [13], row_bucket=16)
    last = session.runs[0].stack(0, "index_score")[-1][:13]
    assert len(np.unique(np.round(last, 4))) > 10
