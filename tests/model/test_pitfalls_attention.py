"""Reported defects of indexer, window and attention, restated for this model (numbers: docs/pitfalls.md)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import make_step
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.layer import StepContext, attention_step
from dsflash_jax.modules.step_index import make_tiles
from dsflash_jax.roles import layer_roles
from dsflash_jax.types import Published
from dsflash_jax.weights.names import to_released
from pallas_kernels.kv_insert.api import kv_insert
from tests.model import running
from tests.model.comparing import assert_close_logits, assert_same_discrete, assert_same_run
from tests.model.running import PAGES, Session, run_chunks
from tests.oracles import indexer as oracle
from tests.oracles import norms, rope
from tests.oracles.attention import grouped_output
from tests.oracles.attention import sparse_attention as attend

pytestmark = pytest.mark.smoke
CFG = running.shallow(window_format="fp32")
LENGTH = 40


@pytest.fixture(scope="module")
def params():
    return running.parameters(CFG)


@pytest.fixture(scope="module")
def long_run(params):
    """Forty tokens in chunks of sixteen: ten blocks of candidates, of which three are kept."""
    return run_chunks(CFG, params, running.prompt(LENGTH, 0), [16, 16, 8], row_bucket=16)


def test_every_selection_is_the_oracles(long_run):
    """B32, B39, B41: ascending, unique, -1 at the end only, visible, and what the loop oracle picks from the scores."""
    run = long_run.runs[0]
    for role in layer_roles(CFG):
        scores, picked = run.stack(role.layer, "index_score"), run.stack(role.layer, "selection")
        for t in range(LENGTH):
            visible, row = oracle.visible_count(t, role.ratio), scores[t]
            assert picked[t].tolist() == oracle.top_k(row, CFG.index_topk).tolist()
            assert not np.isfinite(row[visible:]).any() and picked[t].max() < visible
            if role.reads_candidates:
                assert set(picked[t][picked[t] >= 0] // 2) <= set(run.stack(role.layer, "candidates")[t].tolist())
            if role.builds_candidates:
                blocks = oracle.candidate_blocks(row, visible, CFG.candidate_block_size, CFG.candidate_topk_blocks)
                assert run.stack(role.layer, "candidates")[t].tolist() == blocks.tolist()
    dropped = run.stack(2, "index_score")[-1]
    assert np.isfinite(dropped).sum() < LENGTH, "the pool leaves entries out, or nothing is tested"


def test_every_visible_entry_of_a_kept_block_stays_selectable(long_run):
    """B40: counts are the consumer's own; the partial tail of the newest block is in, invisible entries are not."""
    run = long_run.runs[0]
    blocks, scores = run.stack(2, "candidates"), run.stack(2, "index_score")
    for t in range(LENGTH):
        kept = {b for b in blocks[t] if b >= 0}
        expected = [e for e in range(t + 1) if e // CFG.candidate_block_size in kept]
        assert np.flatnonzero(np.isfinite(scores[t])).tolist() == expected
        assert t // CFG.candidate_block_size in kept


@pytest.mark.slow
def test_reading_only_the_pool_selects_the_same(params, long_run):
    """One decode row reads just the pool's keys, a traced step scores all: B30 for -1 padding in the former too."""
    tokens = running.prompt(LENGTH, 0)
    for length in (1, 3, 7, 20, 39):
        sizes = [16] * (length // 16) + [length % 16]
        session = run_chunks(CFG, params, tokens, sizes, row_bucket=16)
        step = make_step([session.chunk(0, tokens[length : length + 1])], CFG, rows=1, seqs=1, pages=PAGES)
        logits, _ = steps.decode(params, session.cache, step, CFG)
        assert_close_logits([long_run.runs[0].logits[length]], np.asarray(logits))


@pytest.mark.slow
def test_two_prompts_in_one_prefill_count_from_their_own_entries(params):
    """B36: 6 and 8 tokens packed; the second sequence's indices start at 0 and equal those of its own run."""
    first, second = running.prompt(6, 1), running.prompt(8, 2)
    packed = Session(CFG, params)
    packed.feed({0: first, 1: second}, rows=16)
    alone = Session(CFG, params)
    alone.feed({1: second}, rows=16)
    assert_same_discrete(packed.runs[1], alone.runs[1])
    assert packed.runs[1].stack(1, "selection")[0].tolist() == [0, -1, -1, -1]


def test_no_selection_leaks_from_an_earlier_call(params):
    """B37: a long sequence, then a short one in other slots: its indices stay below its own visible count."""
    session = run_chunks(CFG, params, running.prompt(LENGTH, 0), [16, 16, 8], row_bucket=16)
    session.feed({1: running.prompt(3, 4)}, rows=16)
    for role in layer_roles(CFG):
        for t, row in enumerate(session.runs[1].stack(role.layer, "selection")):
            assert row.max() < max(oracle.visible_count(t, role.ratio), 1)


def test_a_consumer_before_any_source_is_refused():
    """B37: reuse before a source."""
    with pytest.raises(ValueError, match="consumer before its source"):
        running.tiny(compress_ratios=(0, 2, 2, 2, 1, 1))


def test_too_large_a_selection_for_the_pool_is_refused():
    """B39: (3 - 1) * 2 + 1 = 5 entries at worst."""
    with pytest.raises(ValueError, match="index_topk=6 exceeds the smallest candidate pool 5"):
        running.tiny(index_topk=6)
    released = ModelConfig.from_json(running.CONFIGS / "v41_flash.json")
    assert (released.candidate_topk_blocks - 1) * released.candidate_block_size + 1 == 16377 >= released.index_topk


OTHER_SIZES = [pytest.param(sizes, marks=pytest.mark.slow) for sizes in ([6, 7], [1] * 13)]


@pytest.mark.parametrize("sizes", [[13], [3, 9, 1], *OTHER_SIZES])
def test_the_window_is_the_last_positions_in_every_layer(params, sizes):
    """B49: with W = 4 position 9 sees exactly 6, 7, 8, 9, in prefill, chunks and decode, in every layer kind."""
    cfg = running.tiny()
    session = run_chunks(cfg, running.parameters(cfg), running.prompt(13, 0), sizes, row_bucket=16)
    for layer in range(cfg.num_hidden_layers):
        seen = session.runs[0].stack(layer, "window_positions")
        for t in range(13):
            assert sorted(p for p in seen[t].tolist() if p >= 0) == list(range(max(0, t - 3), t + 1))


@pytest.mark.slow
def test_a_chunk_longer_than_the_ring_keeps_the_tail_of_the_one_before(params):
    """B50: chunks 12, 14, 14 against a ring of 10 rows; the first queries of a chunk still see three old keys."""
    tokens = running.prompt(LENGTH, 0)
    parts = run_chunks(CFG, params, tokens, [12, 14, 14], row_bucket=16)
    single = run_chunks(CFG, params, tokens, [1] * LENGTH)
    assert_same_run((CFG, params), (single.runs[0], single.stored(0)), (parts.runs[0], parts.stored(0)))


def test_a_replay_does_not_see_before_its_start(params):
    """`replay_start`: window keys below it are not seen, so garbage there cannot matter."""
    tokens, outs = running.prompt(12, 0), []
    for poison in (False, True):
        session = run_chunks(CFG, params, tokens[:8], [8], row_bucket=16)
        if poison:
            ring = np.full_like(session.cache.ring, running.POISON_BYTE)
            session.cache = dataclasses.replace(session.cache, ring=jnp.asarray(ring))
        chunk = dataclasses.replace(session.chunk(0, tokens[8:]), replay_start=8)
        step = make_step([chunk], CFG, rows=16, seqs=1, pages=PAGES)
        logits, _, captures = steps.trace_step(params, session.cache, step, CFG)
        outs.append(np.asarray(logits)[:4])
        assert np.asarray(captures[0]["window_positions"])[0].tolist() == [-1, -1, -1, 8]
    assert np.isfinite(outs[1]).all() and np.array_equal(outs[0], outs[1])


def test_a_replay_leaves_shared_entries_alone(params):
    """`write_floor`: entries whose group ends below it keep their bytes, later ones are written."""
    tokens = running.prompt(12, 0)
    session = run_chunks(CFG, params, tokens[:8], [8], row_bucket=16)
    before = session.stored(0, 8)
    chunk = dataclasses.replace(session.chunk(0, [1] * 8), start=4, replay_start=4, write_floor=8)
    step = make_step([chunk], CFG, rows=16, seqs=1, pages=PAGES)
    _, session.cache, _ = steps.trace_step(params, session.cache, step, CFG)
    after = session.stored(0, 12)
    for kind, layer in before:
        if kind in ("main", "index"):
            ratio = layer_roles(CFG)[layer].ratio
            assert np.array_equal(before[kind, layer], after[kind, layer][: 8 // ratio])
            assert after[kind, layer][8 // ratio :].any()


def attention_of(layer, params, x, positions_from=0, compiled=True):
    """(module, its output for rows x at consecutive positions) on an empty cache, one window layer."""
    cfg = layer.attn.cfg
    session = Session(cfg, params)
    chunk = dataclasses.replace(session.chunk(0, [0] * len(x)), start=positions_from, replay_start=positions_from)
    step = make_step([chunk], cfg, rows=len(x), seqs=1, pages=PAGES)
    model = steps.bind(params, cfg)
    context = StepContext(jax.tree.map(jnp.asarray, step), make_tiles(step, 1), model.freqs.by_name(), in_ring=False)
    cache = ModelCache.empty(cfg, 64, 4)
    attn = model.layers[0].attn
    run = lambda x, context, cache: attention_step(attn, x, context, cache, Published(None, None))[0]  # noqa: E731
    return attn, np.asarray((jax.jit(run) if compiled else run)(jnp.asarray(x), context, cache))


@pytest.fixture(scope="module")
def window_layer():
    """One layer with window attention only and unrounded rows."""
    cfg = running.single(compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=(), window_format="fp32")
    params = running.parameters(cfg)
    return cfg, params, steps.bind(params, cfg).layers[0]


def test_the_output_is_rotated_back(window_layer):
    """B23: one visible key, no sink: each head's output is the unrotated latent, at any position."""
    cfg, params, layer = window_layer
    params = jax.tree.map(lambda v: v, params)
    params["layers"][0]["attn"]["attn_sink"] = jnp.full((cfg.num_attention_heads,), -jnp.inf)
    x = np.random.default_rng(0).normal(size=(1, cfg.hidden_size)).astype(np.float32)
    attn, out = attention_of(layer, params, x, positions_from=64)
    latent = np.asarray(attn.kv_norm(attn.wkv(x)))
    heads = np.repeat(latent[:, None], cfg.num_attention_heads, axis=1)
    zero = (jnp.ones((1, cfg.qk_rope_head_dim // 2)), jnp.zeros((1, cfg.qk_rope_head_dim // 2)))
    np.testing.assert_allclose(out, attn.output(jnp.asarray(heads), zero), rtol=0, atol=1e-5)


def test_a_long_chunk_writes_each_ring_row_once(window_layer, monkeypatch):
    """B102: sixteen rows for a ring of ten; the order of duplicate scatter targets is undefined."""
    cfg, params, layer = window_layer
    targets = []

    def recording(arenas, inserts, **options):
        page, offset = (x.tolist() for x in inserts[0].address(arenas[0]))
        targets.append([(p, o) for p, o in zip(page, offset, strict=True) if p >= 0])
        return kv_insert(arenas, inserts, **options)

    monkeypatch.setattr("dsflash_jax.modules.window.kv_insert", recording)
    attention_of(layer, params, np.ones((16, cfg.hidden_size), np.float32), compiled=False)
    chunk, ring = targets
    assert len(ring) == len(set(ring)) == cache_layout(cfg).ring_rows
    assert len(chunk) == len(set(chunk)) == 16, "in between all rows are kept: the first see what the last overwrite"


def test_shifting_all_positions_changes_nothing(window_layer):
    """B23, B24: only distances matter, with the sink in place."""
    cfg, params, layer = window_layer
    x = np.random.default_rng(1).normal(size=(6, cfg.hidden_size)).astype(np.float32)
    near, far = (attention_of(layer, params, x, positions_from=at)[1] for at in (0, 64))
    np.testing.assert_allclose(near, far, rtol=0, atol=2e-5)


def test_the_softmax_scale_has_no_yarn_factor():
    """B24: head_dim^-0.5 in every layer; factor 16 must not multiply it by 1.63."""
    for cfg in (running.tiny(), running.tiny(rope_scaling=None)):
        layers = steps.bind(running.parameters(cfg), cfg).layers
        assert {layer.attn.scale for layer in layers} == {32**-0.5}


class ByHand:
    """One layer of ratio 1 with unrounded caches, from its raw weights, the oracles and tables of the config's numbers.

    x: attention inputs [T, E] of positions 0..T-1, and what the step selected for them.
    """

    def __init__(self, cfg, params, run):
        self.cfg, self.x, self.selection = cfg, run.stack(0, "attn_in"), run.stack(0, "selection")
        tensors = to_released({"layers": params["layers"]})
        self.w = {name.removeprefix("layers.0.attn."): value for name, value in tensors.items()}
        scaling, length = cfg.rope_scaling, len(self.x)
        yarn = scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow
        self.own = rope.tables(cfg.qk_rope_head_dim, length, cfg.compress_rope_theta, yarn)
        self.window_layers = rope.tables(cfg.qk_rope_head_dim, length, cfg.rope_theta)

    def norm(self, x, name):
        return norms.rms_norm(x, self.w[f"{name}.weight"], self.cfg.rms_norm_eps)

    def turned(self, rows, table, inverse=False):
        """Rows [T, ..., D] rotated, each by its own position."""
        return np.stack([rope.rotate(row, *(part[t] for part in table), inverse) for t, row in enumerate(rows)])

    def latents(self):
        return self.norm(self.x @ self.w["compressor.wkv.weight"].T, "compressor.norm")

    def query(self, name, heads):
        latent = self.norm(self.x @ self.w["wq_a.weight"].T, "q_norm")
        return (latent @ self.w[f"{name}wq_b.weight"].T).reshape(len(self.x), heads, -1)

    def attention(self, query_table):
        """attn_out [T, E] with queries turned by `query_table` and everything else by the layer's own table."""
        cfg, rows = self.cfg, []
        q = self.turned(self.query("", cfg.num_attention_heads), query_table)
        near = self.turned(self.norm(self.x @ self.w["wkv.weight"].T, "kv_norm"), self.own)
        far = self.turned(self.latents(), self.own)
        for t, picked in enumerate(self.selection):
            keys = np.concatenate([near[max(0, t - cfg.sliding_window + 1) : t + 1], far[picked[picked >= 0]]])
            index = np.arange(len(keys))[None]
            rows.append(attend(q[t : t + 1], keys, index, self.w["attn_sink"], cfg.head_dim**-0.5)[0])
        back = self.turned(rows, self.own, inverse=True)
        output = self.w["wo_a.weight"], self.w["wo_b.weight"], cfg.o_groups
        return np.stack([grouped_output(row, *output) for row in back])

    def scores(self, turn=lambda vector: vector):
        """Index scores [T, T]; `turn` is applied to the queries only."""
        cfg = self.cfg
        q = turn(self.turned(self.query("indexer.", cfg.index_n_heads), self.own))
        keys = self.turned(self.norm(self.latents() @ self.w["indexer.wk.weight"].T, "indexer.k_norm"), self.own)
        projected = self.x @ self.w["indexer.weights_proj.weight"].T
        weights = [oracle.head_weights(row, cfg.index_head_dim) for row in projected]
        return np.stack([oracle.scores(q[t], keys, weights[t]) for t in range(len(q))])


@pytest.fixture(scope="module")
def by_hand():
    """(run of nine tokens through that layer, the same by hand)."""
    formats = {f"{cache}_format": "fp32" for cache in ("window", "main", "index")}
    cfg = running.single(compress_ratios=(1,), page_size=8, **formats)
    params = running.parameters(cfg, calm=1.0)
    run = run_chunks(cfg, params, running.prompt(9, 0), [9], row_bucket=16).runs[0]
    return run, ByHand(cfg, params, run)


def test_queries_of_compressed_layers_use_their_own_table(by_hand):
    """U2: everything in a layer with entries turns by theta 160000; a query at theta 10000 gives another output."""
    run, hand = by_hand
    out = run.stack(0, "attn_out")
    np.testing.assert_allclose(out, hand.attention(hand.own), rtol=0, atol=1e-5)
    assert np.abs(out - hand.attention(hand.window_layers))[4:].max() > 1e-3
    assert [role.rope for role in layer_roles(running.tiny())] == ["swa"] * 2 + ["compressed"] * 4


def test_doubling_the_query_projection_doubles_the_query(window_layer):
    """B52: only the low-rank latent is normed, no norm per head."""
    cfg, params, layer = window_layer
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, cfg.hidden_size)), jnp.float32)
    rope = tuple(jnp.asarray(params["freqs"]["swa"][part])[:3] for part in ("cos", "sin"))
    q, _ = layer.attn.query(x, rope)
    doubled = jax.tree.map(lambda v: v, params)
    doubled["layers"][0]["attn"]["wq_b"]["weight"] = 2 * params["layers"][0]["attn"]["wq_b"]["weight"]
    q2, _ = steps.bind(doubled, cfg).layers[0].attn.query(x, rope)
    np.testing.assert_allclose(q2, 2 * q, rtol=1e-6)


def test_index_queries_and_keys_are_not_mixed(by_hand):
    """B27: the score of query and key is that of the plain vectors; a Hadamard rotation of one side gives another."""
    run, hand = by_hand
    seen = np.tril(np.ones((9, 9), bool))
    scores = run.stack(0, "index_score")[:, :9]
    np.testing.assert_allclose(scores[seen], hand.scores()[seen], rtol=0, atol=1e-5)
    mix = np.array([[1.0]])
    while len(mix) < hand.cfg.index_head_dim:
        mix = np.block([[mix, mix], [mix, -mix]]) / np.sqrt(2)
    one_side = hand.scores(lambda q: (q @ mix).astype(np.float32))
    assert np.abs(scores - one_side)[seen].max() > 0.1
