"""The jitted steps in steady state: no retrace, no copy of a pool, only lengths move in a commit."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from dsflash_jax import bench, steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.model_cache import ModelCache
from tests.model import running

CFG = running.shallow(window_format="fp32")
POOLS = ("pages", "ring", "state")


def decode_step(position, token=5, slot=0):
    chunk = Chunk(slot, [token], position, list(range(slot, 32, 2)))
    return make_step([chunk], CFG, rows=1, seqs=1, pages=running.PAGES)


def pointers(cache):
    return {name: getattr(cache, name).unsafe_buffer_pointer() for name in POOLS}


@pytest.mark.smoke
def test_repeated_decode_never_retraces_and_never_moves_a_pool():
    """With the ops' implementations left to the platform, as by default."""
    cfg = CFG.replace(implementation="")
    params, cache = running.parameters(cfg), ModelCache.empty(cfg, 64, 4)
    _, cache = steps.decode(params, cache, decode_step(0), cfg)
    before, compiled = pointers(cache), steps._step._cache_size()
    for position in range(1, 24):
        _, cache = steps.decode(params, cache, decode_step(position, token=position), cfg)
    _, cache = steps.decode(params, cache, decode_step(0, slot=1), cfg)
    assert steps._step._cache_size() == compiled, "a decode call compiled again"
    assert pointers(cache) == before, "a pool was copied"


def test_a_given_away_cache_cannot_be_used_again():
    cache = ModelCache.empty(CFG, 64, 4)
    steps.decode(running.parameters(CFG), cache, decode_step(0), CFG)
    with pytest.raises(RuntimeError, match="deleted|donated"):
        np.asarray(cache.pages)


@pytest.mark.parametrize(
    ("rows", "seqs"),
    [
        pytest.param(1, 1, marks=pytest.mark.smoke),
        pytest.param(4, 4, marks=pytest.mark.slow),
        pytest.param(64, 4, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_step_updates_every_pool_in_place(rows, seqs):
    """Pools of many megabytes beside a step of a few kilobytes: the compiler reuses them and needs no such scratch."""
    big = ModelCache.abstract(CFG, 20_000, 3_000)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), running.parameters(CFG))
    step = make_step([Chunk(0, [5], 0, [0])], CFG, rows=rows, seqs=seqs, pages=running.PAGES)
    compiled = steps._step.lower(params, big, step, CFG, "last", True).compile()
    memory = compiled.memory_analysis()
    sizes = [getattr(big, name).size * getattr(big, name).dtype.itemsize for name in POOLS]
    assert min(sizes) > 2 * 2**20
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < 2**20
    for name in POOLS:
        shape = ",".join(map(str, getattr(big, name).shape))
        copies = [line for line in compiled.as_text().splitlines() if f"[{shape}]" in line and " copy(" in line]
        assert not copies, copies[:2]


def test_commit_moves_lengths_and_nothing_else():
    cache = running.poisoned(ModelCache.empty(CFG, 32, 2))
    cache = jax.tree.map(jax.numpy.asarray, cache)
    step = make_step([Chunk(1, [1, 2, 3], 4, list(range(8)))], CFG, seqs=4)
    before = {name: np.array(getattr(cache, name)) for name in POOLS}
    after = steps.commit(cache, step, np.array([2, 9, 9, 9], np.int32))
    assert after.length.tolist() == [77, 6]
    for name in POOLS:
        assert np.array_equal(before[name], getattr(after, name), equal_nan=True)


def test_verify_leaves_the_committed_length_and_returns_every_row():
    params, cache = running.parameters(CFG), ModelCache.empty(CFG, 64, 4)
    step = make_step([Chunk(1, [1, 2, 3], 0, list(range(8)))], CFG, rows=18, seqs=2, pages=running.PAGES)
    logits, cache = steps.verify(params, cache, step, CFG)
    assert logits.shape == (18, CFG.vocab_size) and logits.dtype == np.float32
    assert cache.length.tolist() == [0, 0, 0, 0]
    cache = steps.commit(cache, step, np.array([3, 5], np.int32))
    assert cache.length.tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "slot 3: tokens is empty"),
        ({"tokens": [96]}, r"token id 96 is outside 0\.\.95"),
        ({"tokens": [-1]}, r"token id -1 is outside 0\.\.95"),
        ({"tokens": [1.5]}, "float64"),
        ({"start": -1}, r"start=-1 must not be negative"),
        ({"start": 128}, r"positions 128\.\.128 exceed max_position_embeddings=128"),
        ({"start": 8}, "block table of 1 pages is too short, 9 tokens need 2 pages of 8"),
        ({"pages": [-1]}, r"pages=\[-1\] must be"),
    ],
)
def test_bad_chunks_are_refused_on_the_host(changes, message):
    good = Chunk(3, [1], 0, [0])
    with pytest.raises(ValueError, match=message):
        make_step([dataclasses.replace(good, **changes)], CFG)


def commit_all(params, cache, step, cfg):
    """`commit` with the signature of the other steps."""
    return None, steps.commit(cache, step, np.ones(step.num_seqs, np.int32))


FUNCTIONS = {"prefill": steps.prefill, "decode": steps.decode, "verify": steps.verify, "commit": commit_all}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"slot": 4}, "slot=4 must lie in 0..3, or be -1 for none: the cache has 4 slots."),
        (
            {"pages": [31, 32]},
            "page of block_tables['global']=32 must lie in 0..31, or be -1 for none: the cache has 32 pages.",
        ),
    ],
)
def test_a_slot_or_page_that_the_cache_lacks_is_refused_and_the_cache_stays(function, changes, sentence):
    """A page past the end would be written nowhere and read from the last page, another sequence's."""
    cache = ModelCache.empty(CFG, 32, 4)
    step = make_step([Chunk(1, [1], 0, [0, 1]), dataclasses.replace(Chunk(3, [1], 0, [2]), **changes)], CFG)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(running.parameters(CFG), cache, step, CFG)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_a_negative_slot_other_than_padding_is_refused():
    """Scatters wrap negative indices: -2 would write the last slot but one."""
    step = dataclasses.replace(make_step([Chunk(1, [1], 0, [0])], CFG), slot=np.array([-2], np.int32))
    with pytest.raises(ValueError, match=r"slot=-2 must lie in 0\.\.3"):
        steps.decode(running.parameters(CFG), ModelCache.empty(CFG, 32, 4), step, CFG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_format": "bf16"}, r"cache\.ring with 1920 per row must be 3840 for this configuration"),
        ({"page_size": 4}, r"cache\.pages with 210 per row must be 420 for this configuration"),
        ({"num_draft_tokens": 8, "sliding_window": 1}, r"cache\.state with \(1, 16, 64\) per row must be \(1, 8, 64\)"),
    ],
)
def test_a_cache_of_another_configuration_is_refused(changes, message):
    cache = ModelCache.empty(CFG.replace(**changes), 32, 4)
    with pytest.raises(ValueError, match=message):
        steps.prefill(running.parameters(CFG), cache, decode_step(0), CFG)
    assert not cache.pages.is_deleted()


def test_verifying_more_rows_than_can_be_rolled_back_is_refused_and_the_cache_stays():
    params, cache = running.parameters(CFG), ModelCache.empty(CFG, 64, 4)
    step = make_step([Chunk(2, [1] * 7, 0, [0]), Chunk(1, [1] * 2, 0, [1])], CFG, rows=18, seqs=2, pages=running.PAGES)
    with pytest.raises(ValueError, match=r"slot 2: 7 rows exceed num_draft_tokens \+ 1 = 6, which ring"):
        steps.verify(params, cache, step, CFG)
    assert not cache.pages.is_deleted()


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ([1, 3], r"slot 0: accepted=3 must lie in 0\.\.2, the rows verified"),
        ([-1, 0], r"slot 3: accepted=-1 must lie in 0\.\.1, the rows verified"),
        ([1], r"accepted of type int64\[1\] must hold one whole number for each of 2 sequences"),
        ([1.0, 1.0], r"accepted of type float64\[2\] must hold one whole number for each of 2 sequences"),
    ],
)
def test_accepting_what_was_not_verified_is_refused_and_the_cache_stays(accepted, message):
    cache = ModelCache.empty(CFG, 32, 4)
    step = make_step([Chunk(3, [1], 4, [0]), Chunk(0, [1, 2], 4, [1])], CFG)
    with pytest.raises(ValueError, match=message):
        steps.commit(cache, step, accepted)
    assert steps.commit(cache, step, [1, 2]).length.tolist() == [6, 0, 0, 5]


def test_steps_on_a_device_are_taken_unseen():
    """Looking into them would wait for the device; the caller who places a step has checked it."""
    cache = ModelCache.empty(CFG, 64, 4)
    step = jax.device_put(dataclasses.replace(decode_step(0), slot=np.array([9], np.int32)))
    logits, _ = steps.decode(running.parameters(CFG), cache, step, CFG)
    assert np.isfinite(logits).all()


def test_logits_of_unknown_rows_are_refused():
    with pytest.raises(ValueError, match='logits=\'some\' must be "last" or "all"'):
        steps._step(running.parameters(CFG), ModelCache.empty(CFG, 64, 4), decode_step(0), CFG, "some", True)


def test_slots_are_distinct_and_buckets_large_enough():
    """B102: two sequences in one slot would scatter to the same rows in one call."""
    chunk = Chunk(0, [1, 2], 0, [0, 1])
    with pytest.raises(ValueError, match=r"slots=\[0, 0\] must be distinct"):
        make_step([chunk, chunk], CFG)
    for name in ("rows", "pages"):
        with pytest.raises(ValueError, match=f"{name}=1 is smaller than the 2"):
            make_step([chunk], CFG, **{name: 1})
    with pytest.raises(ValueError, match="seqs=1 is smaller than the 2"):
        make_step([chunk, Chunk(1, [1], 0, [2])], CFG, seqs=1)


def test_an_empty_step_runs_and_writes_nothing():
    """All rows padding, no sequence: lengths all zero, no NaN (B31)."""
    cache = jax.tree.map(jax.numpy.asarray, running.poisoned(ModelCache.empty(CFG, 64, 4)))
    step = make_step([], CFG, rows=1, seqs=1, pages=running.PAGES)
    logits, after = steps.decode(running.parameters(CFG), cache, step, CFG)
    assert np.isfinite(logits).all() and after.length.tolist() == [77] * 4
    for pool in (after.pages, after.ring):
        assert (np.asarray(pool) == running.POISON_BYTE).all()
    assert np.isnan(after.state).all()


@pytest.mark.slow
def test_the_released_topology_decodes_at_tiny_widths():
    cfg = bench.released_topology()
    params, cache = running.parameters(cfg), ModelCache.empty(cfg, 16, 1)
    tokens = running.prompt(6, 0)
    for position, token in enumerate(tokens):
        step = make_step([Chunk(0, [token], position, list(range(16)))], cfg, rows=1, seqs=1, pages=16)
        logits, cache = steps.decode(params, cache, step, cfg)
    assert logits.shape == (1, cfg.vocab_size) and np.isfinite(logits).all() and np.std(logits) > 0.1
