"""prefill(n) against prefill(k) followed by decode, for every n up to past three windows and every k."""

import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import make_step
from dsflash_jax.cache.model_cache import ModelCache
from tests.model import running
from tests.model.comparing import Tally, assert_close_logits, assert_same_run, count_flips
from tests.model.running import Session, run_chunks

CFG = running.tiny()
# Half the layers, window rows unrounded: for tests that compare more positions than the ring holds.
UNROUNDED = running.shallow(window_format="fp32")
LONGEST = 3 * CFG.sliding_window + 3


def check_every_split(cfg, params, seed, longest, splits=None):
    """Compares every (n, k); one pass of decode steps per k visits every n. Returns the tally of stored codes."""
    tokens, tally = running.prompt(longest, seed), Tally()
    # One bucket for all prefills: two would round rows that nothing compares in two ways.
    bucket = next(rows for rows in running.ROW_BUCKETS if rows >= longest)
    whole = {}
    for n in range(1, longest + 1):
        session = run_chunks(cfg, params, tokens[:n], [n], row_bucket=bucket)
        whole[n] = session.runs[0], session.stored(0)
    for k in splits or range(1, longest):
        session, flips = run_chunks(cfg, params, tokens, [k], row_bucket=bucket), 0
        for n in range(k + 1, longest + 1):
            session.feed({0: tokens[n - 1 : n]})
            flips += assert_same_run((cfg, params), whole[n], (session.runs[0], session.stored(0)), tally, flips)
    return tally


@pytest.mark.smoke
def test_prefill_equals_every_split_into_prefill_and_decode():
    """The main property; also B05 (odd and even n) and B04 (entries and index keys of all earlier calls are there)."""
    tally = check_every_split(CFG, running.parameters(CFG), 0, LONGEST)
    tally.check()
    assert tally.codes > 180_000


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prefill_equals_every_split_for_other_weights_and_prompts(seed):
    check_every_split(CFG, running.parameters(CFG, seed), seed, LONGEST).check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 11))
def test_prefill_equals_every_split_at_length(seed):
    """Long enough for several pages, many candidate blocks, and every ring row to be reused several times."""
    check_every_split(CFG, running.parameters(CFG, seed), seed, 60, splits=[1, 2, 3, 17, 32, 59]).check()


@pytest.mark.smoke
@pytest.mark.slow
def test_without_the_calming_scale_the_first_selection_is_the_same():
    """Everything up to the first index source, at full size: two window layers before it, both sides of its caches.

    The models above have sub-layer outputs scaled by 0.1. Unscaled, one flipped code changes all that follows it, so
    only what no later rounding touches is compared: attention outputs, stored rows and selections up to that layer.
    """
    cfg = running.tiny(
        num_hidden_layers=3, compress_ratios=(0, 0, 2), kv_source_layer_ids=(2,), index_source_layer_ids=(2,),
        candidate_source_layer_id=-1, window_format="fp32",
    )  # fmt: skip
    params, tokens, first = running.parameters(cfg, 4, calm=1.0), running.prompt(16, 4), 2
    whole, parts = (run_chunks(cfg, params, tokens, sizes) for sizes in ([16], [5, 7, 1, 1, 1, 1]))
    run, other = whole.runs[0], parts.runs[0]
    assert np.array_equal(run.stack(first, "selection"), other.stack(first, "selection"))
    for layer in range(first + 1):
        np.testing.assert_allclose(other.stack(layer, "attn_out"), run.stack(layer, "attn_out"), rtol=0, atol=1e-5)
    for kind in ("main", "index"):
        assert np.array_equal(whole.stored(0)[kind, first], parts.stored(0)[kind, first])
    assert np.abs(run.stack(first, "attn_out")).max() > 0.5, "not scaled down"


@pytest.mark.slow
@pytest.mark.smoke
def test_the_served_steps_equal_the_traced_ones():
    """`prefill` and `decode` keep no scores and may read only the candidate pool's keys; `trace_step` scores all."""
    params, tokens = running.parameters(UNROUNDED), running.prompt(LONGEST + 30, 3)
    for first in (1, 2, LONGEST):
        traced, served = run_chunks(UNROUNDED, params, tokens, [first], row_bucket=16), Session(UNROUNDED, params)
        cache = ModelCache.empty(UNROUNDED, served.num_pages, 4)
        sizes = [first] + [1] * (len(tokens) - first)
        at = 0
        for size in sizes:
            chunk = served.chunk(0, tokens[at : at + size])
            step = make_step([chunk], UNROUNDED, rows=1 if at else 16, pages=running.PAGES)
            call = steps.decode if at else steps.prefill
            logits, cache = call(params, cache, step, UNROUNDED)
            if at:
                traced.feed({0: tokens[at : at + 1]})
            assert_close_logits([traced.runs[0].logits[-1]], np.asarray(logits))
            served.runs[0].tokens += tokens[at : at + size]
            at += size
        stored = running.stored_rows(UNROUNDED, cache, 0, served.tables[0], at)
        assert count_flips(UNROUNDED, traced.stored(0), stored, None) == 0
        assert cache.length.tolist() == [at, 0, 0, 0]


def test_a_last_token_of_the_context_can_be_decoded():
    """Position max_position_embeddings - 1 has a RoPE row and a page; the next one is refused on the host (B28)."""
    params, tokens = running.parameters(UNROUNDED), running.prompt(128, 5)
    parts = run_chunks(UNROUNDED, params, tokens, [63, 64, 1])
    whole = run_chunks(UNROUNDED, params, tokens, [64, 64])
    assert_same_run((UNROUNDED, params), (whole.runs[0], whole.stored(0)), (parts.runs[0], parts.stored(0)))
    with pytest.raises(ValueError, match="max_position_embeddings=128"):
        make_step([parts.chunk(0, [1])], UNROUNDED)
