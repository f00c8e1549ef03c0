"""Held-out evaluation, on models whose answers are known beforehand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.analysis.recall import LagBuckets, bits_per_byte, coverage_summary, recall
from dsflash_jax.training.evaluate import evaluate, held_out_batches, make_predictor
from dsflash_jax.training.model import Model
from dsflash_jax.training.vocabulary import VOCAB_SIZE
from tests.unit.test_training_loop import CFG, CORPUS, SETTINGS

WIDE = CFG.replace(sliding_window=8)
EVALUATED = SETTINGS.replace(context=96, rows=8)


class Output(NamedTuple):
    logits: jax.Array
    indexer_kl: jax.Array
    coverage: jax.Array


def lookup(params, tokens, cfg, *, dense, use_global):
    """Knows the rule of the task: repeats what followed the last occurrence, seen through the window or globally."""
    at = jnp.arange(tokens.shape[1])
    reach = jnp.where(use_global, tokens.shape[1], cfg.sliding_window)
    same = tokens[:, :, None] == tokens[:, None, :]
    visible = same & (at[None, :] < at[:, None]) & (at[:, None] - at[None, :] < reach)
    source = jnp.max(jnp.where(visible, at, -1), axis=-1)
    answer = jnp.take_along_axis(tokens, jnp.maximum(source + 1, 0), axis=1)
    logits = params["sharpness"] * jnp.where(source >= 0, 1.0, 0.0)[..., None] * jax.nn.one_hot(answer, cfg.vocab_size)
    return Output(logits, jnp.float32(0), jnp.where(dense, 1.0, 0.5) * jnp.ones(2))


MODEL = Model(init=None, forward=lookup)
SHARP = {"sharpness": jnp.float32(20.0)}


@pytest.fixture(scope="module")
def held_out():
    return held_out_batches(WIDE, EVALUATED, CORPUS, recall_rows=32, text_rows=16)


@pytest.fixture(scope="module")
def predict():
    return make_predictor(WIDE, EVALUATED.rows, model=MODEL)


def scores(records):
    result = recall(records.correct, records.asked, records.lag, records.aligned, LagBuckets.for_model(8, 3))
    return {name: share.value for name, share in result.by_bucket.items()}, result


def test_a_model_that_knows_the_rule_answers_everything(held_out, predict):
    by_bucket, result = scores(evaluate(predict, SHARP, held_out.recall))
    assert set(by_bucket.values()) == {1.0}
    assert result.by_alignment["aligned"].asked > 50 < result.by_alignment["split"].asked


def test_without_the_global_branch_only_the_window_answers(held_out, predict):
    by_bucket, _ = scores(evaluate(predict, SHARP, held_out.recall, use_global=False))
    assert by_bucket["near"] == 1.0
    assert by_bucket["mid"] < 0.2 and by_bucket["far"] == 0.0


def test_dense_reaches_the_model_and_coverage_comes_back(held_out, predict):
    for dense, expected in ((False, 0.5), (True, 1.0)):
        records = evaluate(predict, SHARP, held_out.recall, dense=dense)
        assert coverage_summary(records.coverage)["per_layer"] == [expected, expected]


def test_a_uniform_guess_costs_the_bits_of_the_vocabulary(held_out, predict):
    records = evaluate(predict, {"sharpness": jnp.float32(0.0)}, held_out.text)
    assert bits_per_byte(records.nll, records.text_mask) == pytest.approx(np.log2(VOCAB_SIZE), rel=1e-5)
    assert records.nll.shape == (16, 96)


def test_flags_do_not_recompile(held_out):
    traces = []

    def counted(*arguments, **flags):
        traces.append(1)
        return lookup(*arguments, **flags)

    predictor = make_predictor(WIDE, EVALUATED.rows, model=Model(None, counted))
    for use_global in (True, False):
        for dense in (True, False):
            evaluate(predictor, SHARP, held_out.recall[:1], use_global=use_global, dense=dense)
    assert len(traces) == 1


def test_questions_do_not_depend_on_the_training_seed_and_use_held_out_text(held_out):
    again = held_out_batches(WIDE, EVALUATED.replace(seed=7), CORPUS, recall_rows=32, text_rows=16)
    np.testing.assert_array_equal(held_out.recall[1].tokens, again.recall[1].tokens)
    text = held_out.text[0].tokens[0]
    assert text.astype(np.uint8).tobytes() in CORPUS.held_out.tobytes()
    assert text.astype(np.uint8).tobytes() not in CORPUS.train.tobytes()


def test_a_model_that_lost_its_numbers_is_refused(held_out, predict):
    with pytest.raises(FloatingPointError, match="evaluated tokens have no finite loss"):
        evaluate(predict, {"sharpness": jnp.float32(jnp.nan)}, held_out.recall)


def test_row_counts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="rows=8 must divide the 30 rows"):
        held_out_batches(WIDE, EVALUATED, CORPUS, recall_rows=30, text_rows=16)
