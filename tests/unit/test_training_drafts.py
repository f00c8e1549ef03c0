"""Training of draft layers: the loss in loop-level NumPy, a backbone that keeps its bits, continuation, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.generate import generate_tokens
from dsflash_jax.lab_text import load_model, stream
from dsflash_jax.modules.draft_sequence import DraftForward
from dsflash_jax.modules.dspark import DraftOutput
from dsflash_jax.training import checkpoints
from dsflash_jax.training.draft_loss import draft_loss
from dsflash_jax.training.drafts import MODEL_FOLDER, draft_pool, draft_rows, train_drafts, with_draft_layers
from dsflash_jax.training.loop import run_to_end
from dsflash_jax.training.metrics import read_metrics
from dsflash_jax.training.settings import DraftSettings, TrainSettings
from tests.experiments.stand_in import CORPUS
from tests.model import running

PLAIN = running.single(vocab_size=192, max_position_embeddings=64)
CFG = PLAIN.replace(
    num_nextn_predict_layers=1, dspark_block_size=3, dspark_target_layer_ids=(0,), dspark_markov_rank=8,
    dspark_noise_token_id=1, dspark_n_routed_experts=2, dspark_num_experts_per_tok=1,
)  # fmt: skip
RUN = TrainSettings(steps=4, rows=2, context=48, pairs=4, learning_rate=1e-2, recall=0.5, near=0.0)
SETTINGS = DraftSettings(RUN, anchors=8, pool=6, continued=0)


@pytest.fixture(scope="module")
def params():
    return with_draft_layers(steps.init_params(PLAIN), CFG)


def drive(params, out=None, settings=SETTINGS, **options):
    seen = []
    return seen, run_to_end(train_drafts(params, CFG, settings, CORPUS, out, **options), seen.append)


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    return folder, *drive(params, folder, checkpoint_every=2)


def same_bits(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), one, other))


@pytest.mark.slow
def test_the_backbone_keeps_its_bits_and_the_draft_layers_learn(params, run):
    _, metrics, result = run
    assert result.params.keys() == params.keys()
    for name, part in params.items():
        assert same_bits(part, result.params[name]) == (name != "mtp"), name
    assert metrics[-1].loss < metrics[0].loss and len(metrics[0].acceptance) == 3


@pytest.mark.slow
def test_optimiser_state_and_checkpoints_hold_draft_layers_only(params, run):
    folder, metrics, result = run
    tree = checkpoints.load_plain(folder / "checkpoints").tree
    drafts, held = jax.tree.leaves(params["mtp"]), [leaf for leaf in jax.tree.leaves(tree) if np.size(leaf) > 1]
    assert sorted(leaf.shape for leaf in held) == sorted(
        leaf.shape for leaf in drafts for _ in range(3) if leaf.size > 1
    )
    assert [record["loss"] for record in read_metrics(folder / "metrics.jsonl")] == [m.loss for m in metrics]
    assert result.facts["settings"]["anchors"] == 8 and result.compile_seconds > 0


@pytest.mark.slow
def test_the_whole_model_is_left_as_generation_reads_it(run):
    folder, _, result = run
    loaded, cfg = load_model(folder / MODEL_FOLDER)
    assert cfg == CFG and loaded.keys() == result.params.keys()
    assert all(same_bits(loaded[name], result.params[name]) for name in loaded if name != "freqs")
    assert len(list(stream(folder / MODEL_FOLDER, "a<k7>b", 4, speculate=2))) <= 4


@pytest.mark.slow
def test_an_interrupted_training_ends_with_the_same_bits(params, run, tmp_path):
    _, whole, result = run
    steps = train_drafts(params, CFG, SETTINGS, CORPUS, tmp_path, checkpoint_every=2)
    for _ in range(3):
        next(steps)
    steps.close()
    jax.clear_caches()
    rest, parts = drive(params, tmp_path, checkpoint_every=2)
    assert [m.step for m in rest] == [3, 4] and [m.loss for m in rest] == [m.loss for m in whole[2:]]
    assert same_bits(parts.params, result.params)


@pytest.mark.slow
def test_a_checkpoint_belongs_to_its_backbone_and_its_settings(params, run):
    other = {**params, "norm": {"weight": params["norm"]["weight"] + 1e-3}}
    with pytest.raises(ValueError, match="another run: backbone_sha256 is"):
        train_drafts(other, CFG, SETTINGS, CORPUS, run[0])
    with pytest.raises(ValueError, match=r"settings\.decay is 4\.0 there, 2\.0 here"):
        train_drafts(params, CFG, dataclasses.replace(SETTINGS, decay=2.0), CORPUS, run[0])


def test_refusals_come_before_any_work(params, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="there are no draft layers to train"):
        train_drafts(params, PLAIN, SETTINGS, CORPUS)
    with pytest.raises(ValueError, match="anchors=46 exceeds the 45 positions"):
        train_drafts(params, CFG, dataclasses.replace(SETTINGS, anchors=46), CORPUS)
    with pytest.raises(ValueError, match="pool=1 must be at least rows=2"):
        train_drafts(params, CFG, dataclasses.replace(SETTINGS, pool=1), CORPUS)
    with pytest.raises(ValueError, match="context=.* is too short"):
        train_drafts(params, CFG, dataclasses.replace(SETTINGS, continued=40), CORPUS)
    with pytest.raises(ValueError, match="quant_method='fp8' must be empty"):
        train_drafts(params, CFG.replace(quant_method="fp8"), SETTINGS, CORPUS)
    with pytest.raises(ValueError, match="cannot be written"):
        train_drafts(params, CFG, SETTINGS, CORPUS, tmp_path / "file" / "run")
    with pytest.raises(ValueError, match="checkpoint_every=0"):
        train_drafts(params, CFG, SETTINGS, CORPUS, tmp_path, checkpoint_every=0)


@pytest.mark.parametrize(("change", "message"), [
    ({"anchors": 0}, "anchors=0 must be at least 1"),
    ({"pool": 0}, "pool=0 must be at least 1"),
    ({"continued": 128}, r"continued=128 must lie in 0\.\.127: a row needs a prompt"),
    ({"decay": 0.0}, "decay=0.0 must be positive"),
    ({"distance": -1.0}, "distance=-1.0 must be finite and not negative"),
    ({"confidence": float("nan")}, "confidence=nan must be finite"),
])  # fmt: skip
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        DraftSettings(**change)


def test_rows_and_anchors_are_drawn_anew_and_leave_room_for_a_block():
    pool = np.arange(6 * 33, dtype=np.int32).reshape(6, 33)
    rows = draft_rows(pool, 4, 3, 29, 0, 0)
    assert (rows.targets == rows.tokens + 1).all() and rows.tokens.shape == (4, 32)
    assert len(set(rows.tokens[:, 0])) == 4  # no row twice in a batch
    assert (rows.anchors == np.arange(1, 30)).all()  # all of them: the last block ends with the row's last target
    few, later = draft_rows(pool, 4, 3, 8, 0, 0), draft_rows(pool, 4, 3, 8, 0, 1)
    assert (np.diff(few.anchors, axis=1) > 0).all() and few.anchors.min() >= 1 and few.anchors.max() <= 29
    assert (few.anchors[0] != few.anchors[1]).any() and (few.anchors != later.anchors).any()
    assert (few.anchors == draft_rows(pool, 4, 3, 8, 0, 0).anchors).all()


def test_a_pool_without_continuations_is_data(params):
    pool = draft_pool({}, PLAIN, SETTINGS, CORPUS)
    assert pool.shape == (6, 49) and pool.dtype == np.int32
    assert (pool == draft_pool({}, PLAIN, SETTINGS, CORPUS)).all()


@pytest.mark.slow
def test_even_rows_are_continued_greedily_and_odd_ones_drawn():
    backbone = steps.init_params(PLAIN)
    settings = dataclasses.replace(SETTINGS, continued=8)
    pool = draft_pool(backbone, PLAIN, settings, CORPUS)
    assert pool.shape == (6, 49) and (pool == draft_pool(backbone, PLAIN, settings, CORPUS)).all()
    for number, row in enumerate(pool.tolist()):
        greedy = list(generate_tokens(backbone, PLAIN, row[:41], 8))
        assert (row[41:] == greedy) == (number % 2 == 0)


def test_the_loss_is_that_of_the_written_out_sums():
    draws = np.random.default_rng(0)
    draft, target = draws.normal(size=(2, 1, 2, 4, 3, 7)) * 2
    confidence, targets = draws.normal(size=(1, 2, 4, 3)), draws.integers(0, 7, (1, 2, 4, 3))
    parts, weights, chances = np.zeros(3), 0.0, np.zeros(3)
    for block in np.ndindex(1, 2, 4):
        for k in range(3):
            p, q = (np.exp(logits[block][k]) / np.exp(logits[block][k]).sum() for logits in (target, draft))
            chance, stated = 1 - np.abs(p - q).sum() / 2, 1 / (1 + np.exp(-confidence[block][k]))
            bce = -chance * np.log(stated) - (1 - chance) * np.log(1 - stated)
            parts += np.exp(-k / 4) * np.array([-np.log(q[targets[block][k]]), np.abs(p - q).sum(), bce])
            weights += np.exp(-k / 4)
            chances[k] += chance / 8
    out = DraftForward(DraftOutput(None, jnp.asarray(draft), jnp.asarray(confidence)), jnp.asarray(target))
    found = jax.jit(draft_loss, static_argnums=2)(out, jnp.asarray(targets), DraftSettings())
    np.testing.assert_allclose([found.cross_entropy, found.distance, found.confidence], parts / weights, rtol=1e-5)
    np.testing.assert_allclose(found.total, [0.1, 0.9, 1.0] @ parts / weights, rtol=1e-5)
    np.testing.assert_allclose(found.acceptance, chances, rtol=1e-5)


def test_the_confidence_does_not_pull_on_the_draft():
    """Its target is a constant: with the other weights at zero no gradient reaches the logits."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1, 1, 3, 7)), jnp.float32)
    only = DraftSettings(cross_entropy=0.0, distance=0.0)

    def loss(draft, confidence):
        out = DraftForward(DraftOutput(None, draft, confidence), logits[1])
        return draft_loss(out, jnp.zeros((1, 1, 3), jnp.int32), only).total

    to_logits, to_confidence = jax.jit(jax.grad(loss, (0, 1)))(logits[0], jnp.zeros((1, 1, 3)))
    assert not np.abs(to_logits).max() and np.abs(to_confidence).min() > 0
