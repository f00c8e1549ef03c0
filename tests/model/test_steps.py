"""The jitted steps in steady state: no retrace, no copy of a pool, only lengths move in a commit."""

import dataclasses

import jax
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, check_capacity, make_step
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
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
    params, cache = running.parameters(CFG), ModelCache.empty(CFG, 64, 4)
    _, cache = steps.decode(params, cache, decode_step(0), CFG)
    before, compiled = pointers(cache), steps._step._cache_size()
    for position in range(1, 24):
        _, cache = steps.decode(params, cache, decode_step(position, token=position), CFG)
    _, cache = steps.decode(params, cache, decode_step(0, slot=1), CFG)
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
        ({"slot": 9}, "outside the cache"),
        ({"pages": [32]}, "page 32 is outside the cache"),
        ({"pages": [-1]}, r"pages=\[-1\] must be"),
    ],
)
def test_bad_chunks_are_refused_on_the_host(changes, message):
    good = Chunk(3, [1], 0, [0])
    with pytest.raises(ValueError, match=message):
        chunk = dataclasses.replace(good, **changes)
        make_step([chunk], CFG)
        check_capacity([chunk], ModelCache.abstract(CFG, 32, 4))


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


def tiny_widths() -> ModelConfig:
    """All 40 layers of the released topology, every width as small as the formats allow."""
    released = ModelConfig.from_json(running.CONFIGS / "v41_flash.json")
    widths = running.tiny()
    names = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "qk_rope_head_dim")
    names += ("o_groups", "o_lora_rank", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
    names += ("index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size")
    names += ("sliding_window", "page_size", "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters", "dtype")
    return released.replace(engram_layer_ids=(), **{name: getattr(widths, name) for name in names})


@pytest.mark.slow
def test_the_released_topology_decodes_at_tiny_widths():
    cfg = tiny_widths()
    assert cfg.num_hidden_layers == 40 and cfg.kv_source_layer_ids == (2, 8, 14, 20)
    params, cache = running.parameters(cfg), ModelCache.empty(cfg, 16, 1)
    tokens = running.prompt(6, 0)
    for position, token in enumerate(tokens):
        step = make_step([Chunk(0, [token], position, list(range(16)))], cfg, rows=1, seqs=1, pages=16)
        logits, cache = steps.decode(params, cache, step, cfg)
    assert logits.shape == (1, cfg.vocab_size) and np.isfinite(logits).all() and np.std(logits) > 0.1
