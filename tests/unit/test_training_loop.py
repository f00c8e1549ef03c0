"""The loop on a stand-in model: resume, switch of selection, metrics, refusals. The real model is tested elsewhere."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.training import checkpoints, train_step
from dsflash_jax.training.corpus import build_corpus
from dsflash_jax.training.loop import run_to_end, train
from dsflash_jax.training.metrics import MetricsFile, read_events, read_metrics
from dsflash_jax.training.model import Model
from dsflash_jax.training.settings import TrainSettings
from dsflash_jax.training.vocabulary import VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]
CFG = ModelConfig.from_json(ROOT / "configs" / "tiny.json").replace(vocab_size=VOCAB_SIZE)
CORPUS = build_corpus((f"file{i}.py", f"def f{i}(x):\n    return x + {i}\n".encode() * 20) for i in range(30))
SETTINGS = TrainSettings(steps=8, rows=4, context=32, pairs=4, learning_rate=1e-2)


class Output(NamedTuple):
    logits: jax.Array
    indexer_kl: jax.Array
    coverage: jax.Array


def init(cfg, seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "embed": {"weight": jax.random.normal(keys[0], (cfg.vocab_size, 8))},
        "layers": {0: {"mix": jax.random.normal(keys[1], (3, 8, 8)) / 3}},
        "freqs": {"position": jnp.arange(cfg.max_position_embeddings, dtype=jnp.float32)},
    }


def forward(params, tokens, cfg, *, dense, use_global, indexer_target="served"):
    """Mixes a token with its past: the last two tokens, and (with the global branch) the mean of all before."""
    x = params["embed"]["weight"][tokens]
    counts = params["freqs"]["position"][: tokens.shape[1], None] + 1.0
    mean = jnp.where(use_global, jnp.cumsum(x, axis=1) / counts, 0.0) * jnp.where(dense, 1.0, 0.5)
    mix = params["layers"][0]["mix"]
    hidden = jnp.tanh(x @ mix[0] + jnp.roll(x, 1, axis=1) @ mix[1] + mean @ mix[2])
    kl = jnp.mean(mix[2] ** 2) * jnp.mean(x**2)
    return Output(hidden @ params["embed"]["weight"].T, kl, jnp.array([0.25, 0.75]))


STAND_IN = Model(init, forward)


def drive(settings=SETTINGS, out=None, **options):
    """(metrics of every step, result) of a whole run."""
    seen = []
    return seen, run_to_end(train(CFG, settings, CORPUS, out, model=STAND_IN, **options), seen.append)


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_training_lowers_the_loss_and_leaves_buffers_alone():
    metrics, result = drive(SETTINGS.replace(steps=60))
    assert metrics[-1].loss < metrics[0].loss - 0.5
    assert_same_bits(result.params["freqs"], init(CFG, 0)["freqs"])
    assert [record.step for record in metrics] == list(range(1, 61))
    assert metrics[0].coverage == (0.25, 0.75)
    assert metrics[9].tokens_per_second > 0 and metrics[-1].seconds_left == 0
    assert result.compile_seconds > 0 and result.seconds == pytest.approx(sum(m.step_seconds for m in metrics))


def test_metrics_report_the_loss_before_the_update():
    metrics, _ = drive(SETTINGS.replace(steps=1))
    record = metrics[0]
    expected = record.answer_loss + 0.3 * record.text_loss + 1.0 * record.indexer_kl
    assert record.loss == pytest.approx(expected, rel=1e-6)
    assert record.answer_average == record.answer_loss and record.dense


def assert_interrupted_equals_whole(folder, interrupt):
    """A run cut off after some steps and continued ends with the bits, and the losses, of one that was not."""
    settings = SETTINGS.replace(dense_until=100.0, average_decay=0.9)  # switches to top-k after the first step
    whole_metrics, whole = drive(settings, folder / "whole", checkpoint_every=2)
    steps = train(CFG, settings, CORPUS, folder / "parts", model=STAND_IN, checkpoint_every=2)
    for _ in range(interrupt):
        next(steps)
    steps.close()
    train_step._build.cache_clear()  # a resumed run is another process: it compiles for itself
    jax.clear_caches()
    rest, parts = drive(settings, folder / "parts", checkpoint_every=2)
    assert rest[0].step == interrupt - interrupt % 2 + 1
    assert_same_bits(whole.params, parts.params)
    one, other = (checkpoints.load_plain(folder / name / "checkpoints") for name in ("whole", "parts"))
    assert one.step == other.step == settings.steps and one.facts["devices"] == len(jax.devices())
    assert_same_bits(one.tree, other.tree)
    assert parts.switch_step == whole.switch_step == 2
    losses = [record["loss"] for record in read_metrics(folder / "parts" / "metrics.jsonl")]
    assert losses == [record.loss for record in whole_metrics]


@pytest.mark.parametrize("interrupt", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_an_interrupted_run_ends_with_the_same_bits_as_an_uninterrupted_one(tmp_path, interrupt):
    assert_interrupted_equals_whole(tmp_path, interrupt)


def test_a_finished_run_returns_its_result_without_work(tmp_path):
    _, first = drive(out=tmp_path)
    metrics, again = drive(out=tmp_path)
    assert metrics == [] and again.seconds == 0.0
    assert_same_bits(first.params, again.params)


def test_seeds_share_one_compilation():
    traces = []

    def counted(*arguments, **flags):
        traces.append(1)
        return forward(*arguments, **flags)

    model = Model(init, counted)
    for seed in range(3):
        run_to_end(train(CFG, SETTINGS.replace(seed=seed, steps=2), CORPUS, model=model))
    assert len(traces) == 1


def test_selection_switches_once_when_the_average_falls_below_the_threshold():
    start = drive(SETTINGS.replace(steps=1))[0][0].answer_loss
    settings = SETTINGS.replace(steps=40, dense_until=start - 0.5, average_decay=0.5)
    metrics, result = drive(settings)
    below = next(record.step for record in metrics if record.answer_average < settings.dense_until)
    assert 1 < below < 40
    assert [record.dense for record in metrics] == [record.step <= below for record in metrics]
    assert result.switch_step == below + 1
    assert [record.switch_step for record in metrics[below - 2 : below]] == [None, below + 1]


def test_selection_stays_dense_while_the_threshold_is_out_of_reach():
    metrics, result = drive(SETTINGS.replace(dense_until=0.0))
    assert all(record.dense for record in metrics) and result.switch_step is None


def test_a_switch_after_the_last_step_is_none():
    metrics, result = drive(SETTINGS.replace(steps=2, dense_until=100.0, average_decay=0.0))
    assert [record.switch_step for record in metrics] == [2, 2] and result.switch_step == 2
    metrics, result = drive(SETTINGS.replace(steps=1, dense_until=100.0, average_decay=0.0))
    assert metrics[-1].switch_step is None and result.switch_step is None


def test_another_seed_changes_parameters_and_rows():
    (one, _), (other, _) = drive(SETTINGS.replace(steps=1)), drive(SETTINGS.replace(steps=1, seed=1))
    assert one[0].loss != other[0].loss


def test_a_checkpoint_of_another_run_is_refused_by_field_and_value(tmp_path):
    drive(out=tmp_path)
    with pytest.raises(ValueError, match=r"settings\.learning_rate is 0\.01 there, 0\.02 here"):
        drive(SETTINGS.replace(learning_rate=0.02), tmp_path)
    with pytest.raises(ValueError, match=r"config\.index_topk is 4 there, 3 here\. Use the same settings"):
        train(CFG.replace(index_topk=3), SETTINGS, CORPUS, tmp_path, model=STAND_IN)
    with pytest.raises(ValueError, match=r"corpus\.train_documents is"):
        other = build_corpus((f"file{i}.py", b"x = %d\n" % i * 99) for i in range(20))
        train(CFG, SETTINGS, other, tmp_path, model=STAND_IN)


def test_refusals_come_before_any_work(tmp_path):
    def never(*_):
        raise AssertionError("the model was initialised")

    lazy = Model(never, forward)
    (tmp_path / "file").write_text("")
    cases = [
        ({}, {"out": tmp_path / "file" / "run"}, "cannot be written"),
        ({"context": 4096}, {}, "context=4096 exceeds max_position_embeddings=128"),
        ({"rows": 3}, {"devices": 99}, "devices=99 must lie between 1 and"),
        ({}, {"checkpoint_every": 0}, "checkpoint_every=0 must be at least 1"),
    ]
    for change, options, message in cases:
        with pytest.raises(ValueError, match=message):
            train(CFG, SETTINGS.replace(**change), CORPUS, **options, model=lazy)
    with pytest.raises(ValueError, match="vocab_size=96 is below the lab vocabulary of 192"):
        train(CFG.replace(vocab_size=96), SETTINGS, CORPUS, model=lazy)
    memory = dict(
        engram_layer_ids=(0,), engram_num_embeddings=(7,), engram_max_ngram_size=2, engram_vocab_size=7,
        engram_n_heads=1, engram_head_dim=32, engram_compressed_vocab_size=9,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"engram_layer_ids=\[0\] must be empty in training"):
        train(CFG.replace(**memory), SETTINGS, CORPUS, model=lazy)


def test_a_diverged_run_stops_and_writes_no_checkpoint(tmp_path):
    def explode(params, *arguments, **flags):
        out = forward(params, *arguments, **flags)
        return out._replace(logits=jnp.where(params["embed"]["weight"][0, 0] == init(CFG, 0)["embed"]["weight"][0, 0],
                                             out.logits, jnp.nan))

    with pytest.raises(FloatingPointError, match="at step 2 is not finite"):
        run_to_end(train(CFG, SETTINGS, CORPUS, tmp_path, model=Model(init, explode), checkpoint_every=2))
    assert checkpoints.saved_steps(tmp_path / "checkpoints") == []
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_metrics_survive_a_torn_line_and_repeated_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"event": "start", "step": 0}', '{"step": 1, "loss": 2.0}', '{"step": 2, "loss": 1.0}', '{"step": 3, "lo']
    path.write_text("\n".join(lines))
    with MetricsFile(path) as file:
        file.write({"step": 2, "loss": 1.5})
        assert json.loads(path.read_text().splitlines()[-1]) == {"step": 2, "loss": 1.5}  # flushed at once
    assert [(record["step"], record["loss"]) for record in read_metrics(path)] == [(1, 2.0), (2, 1.5)]
    assert read_events(path) == [{"event": "start", "step": 0}]


TWO_DEVICES = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from dsflash_jax.training.devices import use_cpu_devices
use_cpu_devices(2)
import jax, numpy as np
from tests.unit.test_training_loop import SETTINGS, drive
from dsflash_jax.training.devices import use_cpu_devices
(one, first), (two, second) = drive(SETTINGS, devices=1), drive(SETTINGS)
assert len(jax.devices()) == 2 and second.facts["devices"] == 2
for a, b in zip(one, two):
    np.testing.assert_allclose(a.loss, b.loss, rtol=1e-5)
    np.testing.assert_allclose(a.grad_norm, b.grad_norm, rtol=1e-4)
    np.testing.assert_allclose(a.coverage, b.coverage, rtol=1e-6)
for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params)):
    np.testing.assert_allclose(a, b, atol=1e-4)
from dsflash_jax.training.evaluate import evaluate, held_out_batches, make_predictor
from tests.unit.test_training_loop import CFG, CORPUS, STAND_IN
batches = held_out_batches(CFG, SETTINGS, CORPUS, 8, 4).recall
one, two = (evaluate(make_predictor(CFG, SETTINGS.rows, n, STAND_IN), first.params, batches) for n in (1, 2))
np.testing.assert_allclose(one.nll, two.nll, rtol=1e-5)
np.testing.assert_allclose(one.coverage, two.coverage, rtol=1e-6)
# As the command line trains: on two devices, cut off between two checkpoints, continued by what compiles anew.
from tests.unit.test_training_loop import assert_interrupted_equals_whole
assert_interrupted_equals_whole(Path({tmp!r}), interrupt=3)
use_cpu_devices(2)
for wrong, message in ((3, "comes too late: JAX already runs with 2"), (0, "must be at least 1")):
    try:
        use_cpu_devices(wrong)
    except (RuntimeError, ValueError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(wrong)
try:
    drive(SETTINGS.replace(rows=5))
except ValueError as error:
    assert "rows=5 must be divisible by devices=2" in str(error), error
else:
    raise AssertionError("an odd batch was split over two devices")
print("same")
"""


@pytest.mark.slow
def test_two_devices_train_the_same_model_as_one_and_resume_to_the_same_bits(tmp_path):
    program = TWO_DEVICES.format(root=str(ROOT), tmp=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
