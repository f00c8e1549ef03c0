"""Speculation changes nothing but the number of steps: greedy output and caches are those of plain decoding."""

import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.draft_step import check_draft_params
from dsflash_jax.generate import generate_tokens
from dsflash_jax.modules.dspark import draft_roles, window_positions
from dsflash_jax.sampling import Sampling
from dsflash_jax.session import Session
from dsflash_jax.speculate import Speculator, speculate_tokens
from dsflash_jax.types import DraftStep
from tests.model import running
from tests.model.running import stored_rows

pytestmark = pytest.mark.slow  # draft and verify steps of several sizes are compiled

CFG = running.single(
    num_nextn_predict_layers=2, dspark_block_size=3, dspark_target_layer_ids=(0,), dspark_markov_rank=8,
    dspark_noise_token_id=9, dspark_n_routed_experts=3, dspark_num_experts_per_tok=1, max_position_embeddings=32,
)  # fmt: skip


def session(**options):
    return Session(running.parameters(CFG), CFG, num_pages=16, table_pages=4, **options)


@pytest.mark.parametrize("length", [4, 7])
def test_greedy_output_is_that_of_plain_decoding(length):
    params, prompt = running.parameters(CFG), running.prompt(length)
    plain = list(generate_tokens(params, CFG, prompt, 12))
    assert list(speculate_tokens(params, CFG, prompt, 12)) == plain


def test_drafts_stop_at_the_context_end():
    """B28: the last verified position is the context's last; the output is as long as asked for."""
    params, prompt = running.parameters(CFG), running.prompt(25)
    assert list(speculate_tokens(params, CFG, prompt, 7)) == list(generate_tokens(params, CFG, prompt, 7))


@pytest.mark.parametrize("length", [6, 7])
def test_every_accepted_length_leaves_the_serial_state(length):
    """B89, B91: 0 to 3 accepted drafts at both parities: rings of draft layers, state, entries and next logits."""
    tokens = running.prompt(16)
    for accepted in range(4):
        serial, spec = session(), session()
        for one in (serial, spec):
            one.append({"a": tokens[:length]})
        true = tokens[length : length + 1 + accepted]
        rows = spec.verify({"a": true + [(t + 7) % 96 for t in tokens[: 3 - accepted]]})["a"]
        spec.commit({"a": 1 + accepted})
        serial_logits = [serial.append({"a": [token]})[0] for token in true]
        np.testing.assert_allclose(rows[: len(true)], np.stack(serial_logits), atol=1e-5)
        end = length + 1 + accepted
        states = [stored_rows(CFG, one.cache, one.slot("a"), one.pool.pages("a"), end) for one in (serial, spec)]
        assert ("window", 2) in states[0]  # the last draft layer's ring
        for key, value in states[0].items():
            if key[0] == "open":
                np.testing.assert_allclose(value, states[1][key], atol=1e-6)
            else:
                assert np.array_equal(value, states[1][key]), (accepted, key)
        after = [one.append({"a": [5]})[0] for one in (serial, spec)]
        np.testing.assert_allclose(*after, atol=1e-5)


def test_draft_layers_are_window_layers_whatever_the_backbone_is():
    """B82: layer 0 of the backbone has ratio 2; draft layer 0 has none, and the RoPE table of window layers."""
    assert CFG.layer_ratios == (2,)
    assert [(r.layer, r.ratio, r.rope, r.owns_kv) for r in draft_roles(CFG)] == [
        (1, 0, "swa", False),
        (2, 0, "swa", False),
    ]
    assert [m.layer for m in cache_layout(CFG).ring] == [0, 1, 2]


def test_a_draft_sees_committed_positions_that_were_written():
    """B80, B83: the block starts behind `length` committed tokens and sees none of them below the floor."""
    step = DraftStep(*(np.array(v, np.int32) for v in ([1, 1, 1], [2, 9, 9], [0, 1, 2], [0, 0, 7])))
    assert window_positions(step, 4).tolist() == [[-1, -1, 0, 1], [5, 6, 7, 8], [-1, -1, 7, 8]]


def test_a_draft_head_of_another_model_is_refused():
    other = steps.abstract_params(CFG.replace(dspark_markov_rank=4))
    with pytest.raises(ValueError, match=r"mtp\.1\.confidence_head\.proj\.weight of shape .* belong to another model"):
        check_draft_params(other, CFG)


def test_several_sequences_of_one_batch_are_those_run_alone():
    """B92: other lengths, parities and seeds in one verify step, greedy."""
    prompts = [running.prompt(n, n) for n in (4, 7)]
    together = Speculator(session(sequences=2))
    out = {n: [together.open(n, p, 8, Sampling(), n)] for n, p in enumerate(prompts)}
    while emitted := together.round():
        for n, tokens in emitted.items():
            out[n] += tokens
    for n, prompt in enumerate(prompts):
        assert out[n] == list(speculate_tokens(running.parameters(CFG), CFG, prompt, 8, seed=n))
