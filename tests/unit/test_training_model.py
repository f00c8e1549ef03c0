"""Training and evaluation of the package's own model, at the smallest size."""

from pathlib import Path

import jax
import numpy as np
import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.training import checkpoints
from dsflash_jax.training.corpus import build_corpus
from dsflash_jax.training.evaluate import evaluate, held_out_batches, make_predictor
from dsflash_jax.training.loop import run_to_end, train
from dsflash_jax.training.model import package_model
from dsflash_jax.training.settings import TrainSettings
from dsflash_jax.training.vocabulary import VOCAB_SIZE

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.json"
CFG = ModelConfig.from_json(TINY).replace(
    vocab_size=VOCAB_SIZE, num_hidden_layers=3, compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2), candidate_source_layer_id=-1, token_shift=True,
)
CORPUS = build_corpus((f"file{i}.py", f"def f{i}(x):\n    return x + {i}\n".encode() * 20) for i in range(30))
SETTINGS = TrainSettings(steps=4, rows=4, context=32, pairs=4, dense_until=100.0)  # top-k from the second step on


# The real model compiles for long; the stand-in model of test_training_loop.py trains and resumes in every run.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, metrics, result) of an uninterrupted run."""
    out, metrics = tmp_path_factory.mktemp("run"), []
    return out, metrics, run_to_end(train(CFG, SETTINGS, CORPUS, out, checkpoint_every=2), metrics.append)


def test_every_trained_parameter_moves_and_no_buffer_does(finished):
    before = package_model().init(CFG, SETTINGS.seed)
    after = finished[2].params
    assert jax.tree.structure(before) == jax.tree.structure(after)
    moved = {
        jax.tree_util.keystr(path): not np.array_equal(old, new)
        for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    }
    still = {name for name, changed in moved.items() if not changed}
    # Nothing but the rope tables and the selection bias of the experts, which no gradient reaches, stays.
    assert all("freqs" in name or "'gate']['bias']" in name for name in still), still
    assert any("freqs" in name for name in still) and any("indexer" in name for name in moved)


def test_metrics_hold_the_indexer_loss_and_both_phases(finished):
    metrics = finished[1]
    assert [record.dense for record in metrics] == [True, False, False, False]
    assert all(record.indexer_kl > 0 and np.isfinite(record.loss) for record in metrics)
    assert len(metrics[0].coverage) == 2 and 0 < metrics[0].coverage[0] < 1
    assert metrics[-1].coverage == pytest.approx((1.0, 1.0), abs=1e-4)  # self-confirming under top-k


def test_resume_of_the_real_model_is_bit_identical(finished, tmp_path):
    steps = train(CFG, SETTINGS, CORPUS, tmp_path, checkpoint_every=2)
    for _ in range(3):
        next(steps)
    steps.close()
    resumed = run_to_end(train(CFG, SETTINGS, CORPUS, tmp_path, checkpoint_every=2))
    for one, other in zip(jax.tree.leaves(finished[2].params), jax.tree.leaves(resumed.params), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_checkpoint_read_without_structure_evaluates_like_the_run_itself(finished):
    out, _, result = finished
    stored = checkpoints.load_plain(out / "checkpoints")
    cfg = ModelConfig.from_json(stored.facts["config"])
    assert cfg == CFG
    params = {**stored.tree["params"], "freqs": package_model().init(cfg, 0)["freqs"]}
    predict = make_predictor(cfg, SETTINGS.rows)
    batches = held_out_batches(cfg, SETTINGS, CORPUS, recall_rows=8, text_rows=8).recall
    own, read = evaluate(predict, result.params, batches), evaluate(predict, params, batches)
    np.testing.assert_array_equal(own.nll, read.nll)
    without = evaluate(predict, result.params, batches, use_global=False)
    assert np.abs(own.nll - without.nll).max() > 1e-6
