"""Prefill of a causal encoder-decoder: what "all", "replay" and "exact" share, and what each of them sees."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step, rows_to_run
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.rope import model_tables
from dsflash_jax.replay import decoder_rows, encoder_restart, tail_rows
from dsflash_jax.weights.names import from_released
from tests.model import oracle_golden
from tests.model.comparing import EQUAL_CODES_ATOL, FLIPPED_ATOL, count_flips, unrounded
from tests.model.running import Run, parameters, poisoned, prompt, record_rows, stored_rows, tiny
from tests.oracles import model as oracle

WINDOW, PAGES, SLOTS = 4, 8, 2
DEPTH = 3  # decoder layers below: owner and candidates, reuse, reindex
DEEP = tiny(num_hidden_layers=5, compress_ratios=(0, 2, 1, 1, 1), kv_source_layer_ids=(1, 2),
            index_source_layer_ids=(1, 2, 4), candidate_source_layer_id=2)  # fmt: skip
POOLED = DEEP.replace(compress_ratios=(0, 2, 2, 2, 2))  # the decoder's entries are pooled too
TABLES = {0: [3, 0, 6, 1, 7, 4], 1: [11, 8, 14, 9, 15, 12]}
ROWS = 64


def new_cache(cfg, decoder, poison=True):
    cache = ModelCache.empty(cfg, 16, SLOTS, decoder=decoder)
    return poisoned(cache) if poison else cache


def run(cfg, tokens, decoder, sizes=None, slot=0, cache=None, first=0, **facts):
    """(logits of the last token, cache) after the prompt in chunks of `sizes`, from token `first` on."""
    params = parameters(cfg)
    cache = new_cache(cfg, decoder) if cache is None else cache
    at, logits = first, None
    for size in sizes or (len(tokens) - first,):
        chunk = Chunk(
            slot, tokens[at : at + size], at, TABLES[slot], previous_token=tokens[at - 1] if at else -1,
            last_chunk=at + size == len(tokens), **facts,
        )  # fmt: skip
        step = make_step([chunk], cfg, rows=ROWS, pages=PAGES)
        logits, cache = steps.prefill(params, cache, step, cfg, decoder=decoder)
        at += size
    return np.asarray(logits[0]), cache


def stored(cfg, cache, length, slot=0):
    return stored_rows(cfg, cache, slot, TABLES[slot], length)


def traced(cfg, tokens):
    """The traced full pass of a prompt, whose captures say what lay before each rounding."""
    step = make_step([Chunk(0, tokens, 0, TABLES[0])], cfg, rows=ROWS, pages=PAGES)
    logits, _, captures = steps.trace_step(parameters(cfg), new_cache(cfg, "all"), step, cfg)
    whole = Run()
    record_rows(whole, np.asarray(logits), jax.device_get(captures), range(len(tokens)))
    return whole


def assert_same_pages(one, other):
    """Main and index rows, and what compression keeps of an open group, bit for bit."""
    keys = [key for key in one if key[0] in ("main", "index", "open")]
    assert keys and all(np.array_equal(one[key], other[key], equal_nan=True) for key in keys)


# Off every multiple of window 4, page 8 and ratio 2; the halo of three layers of window 4 is 10 rows. Prompts shorter
# than the halo compile a step each.
EITHER = [
    pytest.param(DEEP, (23,), id="ratio-1"),
    pytest.param(DEEP, (11, 37), id="ratio-1 at other lengths", marks=pytest.mark.slow),
    pytest.param(DEEP, (5, 9, 10), id="ratio-1 within the halo", marks=pytest.mark.slow),
    pytest.param(POOLED, (5, 10, 11, 23, 37), id="ratio-2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cfg", "lengths"), EITHER)
def test_pages_are_the_same_bits_in_every_mode(cfg, lengths):
    for length in lengths:
        tokens = prompt(length)
        pages = [stored(cfg, run(cfg, tokens, mode)[1], length) for mode in ("all", "replay", "exact")]
        assert_same_pages(pages[0], pages[1])
        assert_same_pages(pages[0], pages[2])


@pytest.mark.parametrize(("cfg", "lengths"), EITHER)
def test_exact_gives_the_logits_and_the_rings_of_all(cfg, lengths):
    for length in lengths:
        tokens = prompt(length, seed=1)
        (logits, cache), (others, other) = (run(cfg, tokens, mode) for mode in ("all", "exact"))
        inputs = functools.partial(unrounded, cfg, parameters(cfg), traced(cfg, tokens))
        flips = count_flips(cfg, stored(cfg, cache, length), stored(cfg, other, length), inputs)
        assert flips <= 1
        assert np.abs(logits - others).max() <= (FLIPPED_ATOL if flips else EQUAL_CODES_ATOL)


@pytest.mark.slow
def test_prompts_within_the_window_are_the_same_in_every_mode():
    for length in (1, WINDOW - 1, WINDOW):
        tokens = prompt(length, seed=2)
        (logits, cache), *others = (run(DEEP, tokens, mode) for mode in ("all", "replay", "exact"))
        for other, its_cache in others:
            assert np.abs(logits - other).max() <= EQUAL_CODES_ATOL
            mine, theirs = stored(DEEP, cache, length), stored(DEEP, its_cache, length)
            assert all(np.array_equal(mine[key], theirs[key], equal_nan=True) for key in mine)


def test_replay_of_a_longer_prompt_is_another_function():
    tokens = prompt(23, seed=3)
    assert np.abs(run(DEEP, tokens, "all")[0] - run(DEEP, tokens, "replay")[0]).max() > 10 * EQUAL_CODES_ATOL


def seen_positions(cfg, tokens, decoder):
    """Decoder layer -> its rows (position, window positions it sees), of the traced asymmetric prefill."""
    step = make_step([Chunk(0, tokens, 0, TABLES[0])], cfg, rows=ROWS, pages=PAGES)
    cache = new_cache(cfg, decoder)
    out = steps.trace_asymmetric(parameters(cfg), cache, step, cfg, rows_to_run(step, cfg, decoder))
    layers = jax.device_get(out[2])[-1 - DEPTH : -1]
    return [
        [(int(p), [int(k) for k in keys if k >= 0]) for p, keys in zip(layer["positions"], layer["window_positions"],
                                                                       strict=True) if p >= 0]
        for layer in layers
    ]  # fmt: skip


@pytest.mark.slow
def test_the_replayed_window_starts_at_the_first_replayed_token():
    expected = [(10, [10]), (11, [10, 11]), (12, [10, 11, 12]), (13, [10, 11, 12, 13])]
    assert seen_positions(DEEP, prompt(14), "replay") == [expected] * DEPTH


@pytest.mark.slow
def test_the_exact_halo_loses_a_window_less_one_at_each_layer():
    layers = seen_positions(DEEP, prompt(23), "exact")
    assert [[row[0] for row in rows] for rows in layers] == [
        list(range(13, 23)), list(range(16, 23)), list(range(19, 23))
    ]  # fmt: skip
    for rows in layers:
        first = rows[0][0]
        assert [keys for _, keys in rows] == [list(range(max(first, p - 3), p + 1)) for p, _ in rows]


@pytest.mark.slow
def test_the_halo_is_clipped_at_the_start_of_the_prompt():
    layers = seen_positions(DEEP, prompt(9), "exact")
    assert [rows[0][0] for rows in layers] == [0, 2, 5]


REFERENCE = {
    "dim": 32, "n_layers": 5, "n_heads": 4, "head_dim": 32, "q_lora_rank": 32, "rope_head_dim": 8, "o_groups": 2,
    "o_lora_rank": 16, "moe_inter_dim": 32, "n_routed_experts": 4, "n_activated_experts": 2, "n_shared_experts": 1,
    "score_func": "sqrtsoftplus", "gate_temp": 1.0, "norm_topk_prob": True, "route_scale": 1.5, "swiglu_limit": 1.5,
    "window_size": 4, "compress_ratios": [0, 2, 1, 1, 1], "kv_source_layers": [1, 2], "index_source_layers": [1, 2, 4],
    "candidate_source_layer": 2, "candidate_topk_blocks": 3, "candidate_block_size": 2, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 4, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "original_seq_len": 16, "rope_factor": 4, "beta_fast": 32, "beta_slow": 1, "max_seq_len": 64, "vocab_size": 96,
    "hc_mult": 2, "hc_sinkhorn_iters": 4, "hc_eps": 1e-6, "norm_eps": 1e-20,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 22])
def test_a_replayed_ring_is_the_oracles_with_a_truncated_context(length):
    cfg = ModelConfig.from_json(REFERENCE).replace(page_size=8)
    weights = oracle_golden._weights(cfg, np.random.default_rng(5))
    weights = {n: w * 0.1 if n.endswith(("wo_b.weight", "w2.weight")) else w for n, w in weights.items()}
    tables = model_tables(cfg)
    freqs = {f"{table}/{part}": values for table, parts in tables.items() for part, values in parts.items()}
    tokens = prompt(length, seed=4)
    expected = oracle.run(weights, REFERENCE, freqs, tokens, decoded=WINDOW)
    params = from_released(weights, steps.abstract_params(cfg)) | {"freqs": tables}
    step = make_step([Chunk(0, tokens, 0, TABLES[0])], cfg, rows=32, pages=PAGES)
    logits, cache = steps.prefill(params, new_cache(cfg, "replay"), step, cfg, decoder="replay")
    assert np.abs(np.asarray(logits[0]) - expected["logits"][-1]).max() < 2e-4
    rows = stored_rows(cfg, cache, 0, TABLES[0], length)
    for member in cache_layout(cfg).ring:
        mine = np.asarray(member.format.unpack(rows["window", member.layer], member.width))
        theirs = expected["layers"][member.layer]["window_rows"][-WINDOW:]
        off = np.abs(mine - theirs) > 1e-6
        assert off.mean() < 1e-2, f"layer {member.layer}: {off.sum()} values differ"


@pytest.mark.parametrize("decoder", ["replay", pytest.param("exact", marks=pytest.mark.slow)])
def test_chunks_keep_the_encoder_states_that_the_last_one_needs(decoder):
    tokens = prompt(23, seed=6)
    logits, cache = run(DEEP, tokens, decoder)
    for sizes in ((1, 2, 5, 15), (20, 3), (7, 7, 7, 2), (22, 1)):
        others, other = run(DEEP, tokens, decoder, sizes)
        mine, theirs = stored(DEEP, cache, 23), stored(DEEP, other, 23)
        same = all(np.array_equal(mine[key], theirs[key], equal_nan=True) for key in mine)
        assert np.abs(logits - others).max() <= (EQUAL_CODES_ATOL if same else FLIPPED_ATOL)
        assert sum(np.sum(mine[key] != theirs[key]) for key in mine if key[0] != "open") <= 2


@pytest.mark.slow
def test_only_the_last_chunk_of_a_prompt_has_logits():
    tokens = prompt(11, seed=7)
    cache, params = new_cache(DEEP, "replay"), parameters(DEEP)
    ending = Chunk(0, tokens, 0, TABLES[0])
    going_on = Chunk(1, tokens, 0, TABLES[1], last_chunk=False)
    logits, cache = steps.prefill(
        params, cache, make_step([going_on, ending], DEEP, rows=32, pages=PAGES), DEEP, decoder="replay"
    )
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    alone, _ = run(DEEP, tokens, "replay")
    assert np.abs(np.asarray(logits[1]) - alone).max() <= EQUAL_CODES_ATOL
    ring = np.asarray(cache.ring)
    assert (ring[1] == 0xFF).any(), "the decoder's rings of a prompt that goes on are not written"


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["replay", "exact"])
def test_decoding_behind_a_replay_and_a_second_prompt_behind_that(decoder):
    """Decoded tokens leave their encoder states too: a later prompt shorter than the window starts from them."""
    tokens = prompt(26, seed=8)
    params, (_, cache) = parameters(DEEP), run(DEEP, tokens[:17], decoder)
    for at in range(17, 24):
        step = make_step([Chunk(0, tokens[at : at + 1], at, TABLES[0], previous_token=tokens[at - 1])], DEEP,
                         rows=1, pages=PAGES)  # fmt: skip
        _, cache = steps.decode(params, cache, step, DEEP)
    logits, _ = run(DEEP, tokens, decoder, (2,), cache=cache, first=24)
    whole, _ = run(DEEP, tokens, decoder)
    if decoder == "replay":  # its rows see the same four tokens either way
        assert np.abs(logits - whole).max() <= FLIPPED_ATOL
    else:
        assert np.abs(logits - run(DEEP, tokens, "all")[0]).max() <= FLIPPED_ATOL


@pytest.mark.parametrize("decoder", ["all", "exact"])
def test_an_exact_encoder_replay_continues_like_a_cold_prompt(decoder):
    """U4: pages 0..15 are there, windows are gone: entries before the hit keep their bytes, all else is the same."""
    tokens, hit = prompt(37, seed=9), 16
    logits, cold = run(DEEP, tokens, decoder)
    before = stored(DEEP, cold, 37)
    start = encoder_restart(DEEP, hit, 37, encoder="exact", decoder=decoder)
    lost = dataclasses.replace(cold, ring=np.full_like(cold.ring, 0xFF), state=np.full_like(cold.state, np.nan))
    others, warm = run(DEEP, tokens, decoder, (37 - start,), cache=lost, first=start, replay_start=start,
                       write_floor=hit)  # fmt: skip
    assert_same_pages(before, stored(DEEP, warm, 37))
    assert np.abs(logits - others).max() <= FLIPPED_ATOL


def test_a_prefix_hit_in_another_slot_reads_no_window_of_the_first():
    """B93: the same prompt again over the cached pages of its first 16 tokens, with the first slot's rows poisoned."""
    tokens, hit = prompt(37, seed=9), 16
    logits, cold = run(DEEP, tokens, "exact")
    start = encoder_restart(DEEP, hit, 37, encoder="exact", decoder="exact")
    lost = dataclasses.replace(cold, ring=np.full_like(cold.ring, 0xFF), state=np.full_like(cold.state, np.nan))
    chunk = Chunk(1, tokens[start:], start, TABLES[0][:2] + TABLES[1][2:], previous_token=tokens[start - 1],
                  last_chunk=True, replay_start=start, write_floor=hit)  # fmt: skip
    step = make_step([chunk], DEEP, rows=ROWS, pages=PAGES)
    others, _ = steps.prefill(parameters(DEEP), lost, step, DEEP, decoder="exact")
    assert np.abs(logits - np.asarray(others[0])).max() <= FLIPPED_ATOL


def test_a_bounded_encoder_replay_leaves_cached_entries_alone_and_is_another_function():
    """U4: an approximation that no test may hold to equal bits; what was cached keeps its bytes."""
    tokens, hit = prompt(18, seed=9), 16
    logits, cold = run(DEEP, tokens, "replay")
    before = stored(DEEP, cold, 18)
    start = encoder_restart(DEEP, hit, 18)
    assert start == hit - WINDOW
    lost = dataclasses.replace(cold, ring=np.full_like(cold.ring, 0xFF), state=np.full_like(cold.state, np.nan))
    others, warm = run(DEEP, tokens, "replay", (18 - start,), cache=lost, first=start, replay_start=start,
                       write_floor=hit)  # fmt: skip
    after = stored(DEEP, warm, 18)
    for (kind, layer), rows in before.items():
        if kind in ("main", "index"):
            entries = hit // DEEP.layer_ratios[layer]
            assert np.array_equal(rows[:entries], after[kind, layer][:entries])
    assert np.isfinite(others).all() and np.abs(logits - others).max() > EQUAL_CODES_ATOL


@pytest.mark.slow
def test_toy_halo_of_three_layers_of_four_is_ten_rows():
    """B94: W + (L - 1)(W - 1) trailing tokens (vllm#57281); a row less changes the last token's output."""
    assert decoder_rows(DEEP, "exact") == (10, 7, 4)
    tokens = prompt(23, seed=10)
    step = make_step([Chunk(0, tokens, 0, TABLES[0])], DEEP, rows=ROWS, pages=PAGES)

    def logits(rows):
        return np.asarray(steps.trace_asymmetric(parameters(DEEP), new_cache(DEEP, "exact"), step, DEEP, rows)[0][0])

    whole, _ = run(DEEP, tokens, "all")
    assert np.abs(logits((10, 7, 4)) - whole).max() <= EQUAL_CODES_ATOL
    assert np.abs(logits((9, 6, 3)) - whole).max() > EQUAL_CODES_ATOL


def test_released_halo_and_costs():
    released = ModelConfig.from_json("configs/v41_flash.json")
    rows = decoder_rows(released, "exact")
    assert (rows[0], rows[1], rows[-1], sum(rows)) == (2541, 2414, 128, 26690)
    assert sum(decoder_rows(released, "replay")) == 2560
    assert tail_rows(released, "replay") == 134 and tail_rows(released, "all") == 0


@pytest.mark.parametrize(("decoder", "made_for", "sentence"), [
    ("half", "all", "decoder='half' must be one of all, replay, exact."),
    ("replay", "all", "decoder='replay' needs a cache with 10 encoder states per slot, this one has 0"),
    ("exact", "replay", "decoder='exact' needs a cache with 16 encoder states per slot, this one has 10"),
])  # fmt: skip
def test_a_mode_that_the_cache_was_not_made_for_is_refused(decoder, made_for, sentence):
    cache = ModelCache.empty(DEEP, 16, SLOTS, decoder=made_for)
    step = make_step([Chunk(0, prompt(5), 0, TABLES[0])], DEEP, rows=ROWS, pages=PAGES)
    with pytest.raises(ValueError) as refusal:
        steps.prefill(parameters(DEEP), cache, step, DEEP, decoder=decoder)
    assert str(refusal.value).startswith(sentence)
    assert not cache.ring.is_deleted()


def test_a_model_without_a_decoder_is_refused_by_name():
    cfg = tiny(compress_ratios=(0,) * 6, kv_source_layer_ids=(), index_source_layer_ids=(),
               candidate_source_layer_id=-1)  # fmt: skip
    step = make_step([Chunk(0, prompt(5), 0, [])], cfg, rows=ROWS, pages=PAGES)
    with pytest.raises(ValueError, match="without kv_source_layer_ids there is none"):
        steps.prefill(parameters(cfg), ModelCache.empty(cfg, 1, 1), step, cfg, decoder="replay")


@pytest.mark.parametrize(("hit", "length"), [(-1, 9), (9, 9)])
def test_a_hit_must_leave_a_token_to_run(hit, length):
    """B96: a prompt that is cached whole still has its last token run, or there would be no logits."""
    with pytest.raises(ValueError, match=f"hit={hit} must lie in 0..length - 1 = {length - 1}"):
        encoder_restart(DEEP, hit, length)


@pytest.mark.slow
def test_a_compiled_asymmetric_prefill_copies_no_pool():
    step = make_step([Chunk(0, prompt(23), 0, TABLES[0])], DEEP, rows=ROWS, pages=PAGES)
    cache = ModelCache.abstract(DEEP, 4096, 64, decoder="exact")
    rows = rows_to_run(step, DEEP, "exact")
    compiled = steps._asymmetric.lower(steps.abstract_params(DEEP), cache, step, DEEP, rows).compile()
    pools = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= pools
    assert analysis.temp_size_in_bytes < pools / 4
