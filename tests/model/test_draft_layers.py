"""Parts of the draft step one by one: where a block stands, what it sees, and which row predicts what."""

import dataclasses

import jax
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.draft_step import Anchor, make_draft_step
from dsflash_jax.modules.dspark import draft_attention, draft_heads, enter_block
from dsflash_jax.sampling import greedy
from tests.model import running

VOCAB, CONTEXT = 96, 32
CFG = running.single(
    num_nextn_predict_layers=2, dspark_block_size=3, dspark_target_layer_ids=(0,), dspark_markov_rank=8,
    dspark_noise_token_id=9, dspark_n_routed_experts=3, dspark_num_experts_per_tok=1, max_position_embeddings=CONTEXT,
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return running.parameters(CFG)


@pytest.mark.parametrize("length", [1, 6, 29])
def test_a_block_stands_behind_all_committed_tokens(params, length):
    """B80: the next token at position `length`, not at the last committed one's, however long the context is."""
    _, _, context = enter_block(steps.bind(params, CFG), make_draft_step([Anchor(0, 5, length)], CFG))
    for found, table in zip(context.rope, params["freqs"]["swa"].values(), strict=True):
        assert np.array_equal(found[0], table[length : length + 3])
    assert context.window[0].tolist() == [p if p >= 0 else -1 for p in range(length - CFG.sliding_window, length)]


@jax.jit
def attention(params, cache, step, x):
    """Output [S, block, d] of the first draft layer's attention for the rows x."""
    model = steps.bind(params, CFG)
    return draft_attention(model.mtp[0].attn, x, enter_block(model, step)[2], step, cache)


def attended(params, ring, anchor, x):
    """Output [block, d] behind one anchor, with that ring."""
    cache = dataclasses.replace(ModelCache.empty(CFG, 1, 1), ring=ring)
    return np.asarray(attention(params, cache, make_draft_step([anchor], CFG), x[None]))[0]


def test_window_rows_that_nobody_wrote_are_masked(params):
    """B83: behind a hit only positions from the floor on were written; below it lies NaN, which must not come out."""
    rng, member = np.random.default_rng(0), cache_layout(CFG).ring[1]
    x = rng.normal(size=(3, CFG.hidden_size)).astype(np.float32)
    ring = np.zeros(ModelCache.empty(CFG, 1, 1).ring.shape, np.uint8)
    rows = np.asarray(member.format.pack(rng.normal(size=(10, member.width)).astype(np.float32)))
    for position, row in enumerate(rows):
        ring[0, member.row_offset(position) + np.arange(member.row_bytes)] = row
    poisoned = ring.copy()
    for position in range(8):
        poisoned[0, member.row_offset(position) + np.arange(member.row_bytes)] = running.POISON_BYTE
    seen = attended(params, poisoned, Anchor(0, 5, 10, floor=8), x)
    assert np.isfinite(seen).all()
    assert np.array_equal(seen, attended(params, ring, Anchor(0, 5, 10, floor=8), x))
    assert not np.array_equal(seen, attended(params, ring, Anchor(0, 5, 10), x)), "the rows below would have counted"
    assert np.isnan(attended(params, poisoned, Anchor(0, 5, 10, floor=7), x)).all(), "one row further down is read"


def test_rows_beyond_the_context_end_are_no_keys(params):
    """B28: two positions are left for a block of three; RoPE would read the table's last row for the third."""
    rng, length = np.random.default_rng(1), CONTEXT - 2
    x = rng.normal(size=(3, CFG.hidden_size)).astype(np.float32)
    other = np.concatenate([x[:2], 1 - x[2:]])
    ring = np.zeros(ModelCache.empty(CFG, 1, 1).ring.shape, np.uint8)
    ends = [attended(params, ring, Anchor(0, 5, length), rows)[:2] for rows in (x, other)]
    assert np.array_equal(*ends)
    whole = [attended(params, ring, Anchor(0, 5, length - 1), rows)[:2] for rows in (x, other)]
    assert not np.array_equal(*whole), "inside the context every row sees the third"


def heads_with(params, *, head, embed, correction):
    """`params` with another output head, and other Markov tables in the last draft layer, whose norm is left out."""
    last = params["mtp"][1]
    markov = {"embed": {"weight": embed}, "head": {"weight": correction}}
    last = last | {"norm": {"weight": np.ones(CFG.hidden_size, np.float32)}, "markov_head": markov}
    return params | {"head": {"weight": head}, "mtp": params["mtp"] | {1: last}}


def drafted_behind(params, token):
    """Tokens of one block whose row i has the unit vector i as its state."""
    hidden = np.eye(3, CFG.hidden_size, dtype=np.float32)[None]
    out = draft_heads(steps.bind(params, CFG), hidden, np.array([token]), lambda _, logits: greedy(logits))
    return out.tokens[0].tolist()


def test_row_i_predicts_the_token_behind_the_blocks_ith_and_row_two_of_three_is_used(params):
    """B81: base logits of row i are best at 10 + i, Markov weights zero: 10, 11, 12."""
    head = np.zeros((VOCAB, CFG.hidden_size), np.float32)
    head[[10, 11, 12], [0, 1, 2]] = 1
    zero = np.zeros((VOCAB, 8), np.float32)
    assert drafted_behind(heads_with(params, head=head, embed=zero, correction=zero), 5) == [10, 11, 12]


def test_every_row_is_corrected_by_the_token_right_before(params):
    """B81: base logits zero, and the Markov head wants t + 1 behind t: 5 is followed by 6, 7, 0."""
    head, embed = np.zeros((VOCAB, CFG.hidden_size), np.float32), np.eye(VOCAB, 8, dtype=np.float32)
    correction = np.zeros((VOCAB, 8), np.float32)
    correction[(np.arange(8) + 1) % 8, np.arange(8)] = 1
    assert drafted_behind(heads_with(params, head=head, embed=embed, correction=correction), 5) == [6, 7, 0]


def test_draft_layers_have_no_compressor_and_no_indexer():
    """B82: layer 0 of the backbone owns entries and selects; neither draft layer has a weight for that."""
    shapes = steps.abstract_params(CFG)
    assert {"compressor", "indexer"} <= shapes["layers"][0]["attn"].keys()
    assert all(not {"compressor", "indexer"} & shapes["mtp"][j]["attn"].keys() for j in range(2))
