"""The decoder-replay study: what it measures on a small model, its gate, its files."""

import json

import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.replay import token_layers
from dsflash_jax.shipped import config_path
from dsflash_jax.training.evaluate import held_out_batches
from dsflash_jax.training.settings import TrainSettings
from experiments import decoder_replay, replay_report
from experiments.decoder_replay import Budget, judge
from experiments.gate import LEARNED, NOT_A_RESULT, NOT_LEARNED
from experiments.replay_measures import TRUNCATED, agreement_rows, answers
from tests.experiments.stand_in import CORPUS, Progress

LAB = ModelConfig.from_json(config_path("lab")).replace(max_position_embeddings=256)
SETTINGS = TrainSettings(steps=2, rows=4, context=64, pairs=4)


@pytest.fixture(scope="module")
def rows():
    batches = held_out_batches(LAB, SETTINGS, CORPUS, 4, 4).recall
    return list(agreement_rows(steps.init_params(LAB), LAB, batches, (16, 45), 2))


def found(rows, mode, length):
    return next(row for row in rows if (row["mode"], row["length"]) == (mode, length))


@pytest.mark.slow
def test_exact_is_the_full_pass_and_replay_lies_between_it_and_the_control(rows):
    replay, control = found(rows, "replay", 45), found(rows, TRUNCATED, 45)
    assert found(rows, "exact", 45)["prompt"]["kl_max"] < 1e-9
    assert 1e-9 < replay["prompt"]["kl_mean"] < control["prompt"]["kl_mean"]
    assert replay["prompt"]["positions"] == 4 and replay["decoded"]["positions"] == 8


@pytest.mark.slow
def test_a_prompt_of_one_window_is_the_same_in_every_mode(rows):
    assert all(found(rows, mode, 16)["prompt"]["kl_max"] < 1e-9 for mode in ("exact", "replay", TRUNCATED))


@pytest.mark.slow
def test_answers_behind_decoded_tokens_are_those_of_a_longer_prompt():
    batch = held_out_batches(LAB, SETTINGS, CORPUS, 4, 4).recall[0]
    params = steps.init_params(LAB)
    behind, longer = (answers(params, LAB, batch, n, "all", 2) for n in (30, 32))
    assert np.abs(behind[2] - longer[0]).max() < 1e-3


def test_rows_too_short_for_what_is_decoded_are_refused():
    batches = held_out_batches(LAB, SETTINGS, CORPUS, 4, 4).recall
    with pytest.raises(ValueError, match="length=63 and follow=2 exceed rows of 64 tokens"):
        list(agreement_rows({}, LAB, batches, (63,), 2))


def row(seed, near, far, mode="all"):
    shares = {name: {"correct": c, "asked": 100, "value": c / 100} for name, c in (("near", near), ("far", far))}
    none = {"correct": 0, "asked": 0, "value": None}
    part = {"positions": 4, "kl_mean": 0.1, "kl_max": 0.2, "same_best": 3}
    return {
        "kind": "agreement", "seed": seed, "length": 17, "mode": mode, "prompt": part, "decoded": part,
        "recall": {**shares, "mid": none, "relay": none},
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "status"), [
    ([row(0, 99, 95), row(1, 96, 91)], LEARNED),
    ([row(0, 99, 95), row(1, 96, 89)], NOT_LEARNED),
    ([row(0, 94, 95)], NOT_LEARNED),
    ([row(0, 99, 95), row(0, 0, 0, "replay")], LEARNED),
])  # fmt: skip
def test_the_gate_asks_the_full_pass_for_near_and_far_recall(rows, status):
    assert judge(rows).status == status
    assert judge(rows, is_check=True).status == NOT_A_RESULT


def test_token_layers_of_the_released_model_are_the_reports_half():
    released = ModelConfig.from_json(config_path("v41_flash"))
    shares = {n: token_layers(released, n, "replay") / token_layers(released, n, "all") for n in (512, 2048, 16384)}
    assert [round(share, 3) for share in shares.values()] == [0.625, 0.531, 0.504]


def timed(mode, seconds):
    return {
        "kind": "time", "model": "lab", "tokens": 128, "mode": mode, "token_layers": 512, "first_call_s": 1.0,
        "best_s": seconds, "median_s": seconds, "repeats": 1,
    }  # fmt: skip


def test_figures_and_report_of_a_run_that_is_no_result_say_so(tmp_path):
    rows = [row(0, 99, 95, mode) for mode in ("all", "exact", "replay", TRUNCATED)]
    rows += [timed("all", 2e-3), timed("replay", 1e-3), timed("exact", 1e-3)]
    names = replay_report.write_figures(tmp_path, rows, judge(rows, is_check=True))
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    plan = decoder_replay._plan("quick", Budget((0,), SETTINGS, lengths=(17,)), LAB, CORPUS.summary())
    manifest = {"seeds": [0], "machine": {"cores": 2, "processor": "x"}, "versions": {"jax": "1"}, "sessions": []}
    text = replay_report.render(plan, manifest, rows, judge(rows, is_check=True), names)
    assert "**not a result**" in text and "| lab | 128 | replay | 512 | 1.000 | 1.0 | 1.0 | 2.00x | 1.0 |" in text
    assert "| replay | 17 | 0.1 | 0.2 | 75.00 | 0.1 | 0.2 | 75.00 |" in text


@pytest.mark.slow
def test_a_run_writes_its_files_and_a_finished_seed_is_read(tmp_path):
    budget = Budget((0,), SETTINGS, prompts=4, lengths=(17,), follow=1, timed=(32,), timed_bench=(), repeats=1)
    options = {"budget": budget, "base": LAB, "corpus_of": lambda: CORPUS}
    folder = decoder_replay.run("quick", tmp_path / "run", Progress(), **options)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == NOT_A_RESULT and [r["mode"] for r in result["rows"][:2]] == ["all", "exact"]
    assert {"config.json", "manifest.json", "report.md", "kl_by_length.png"} <= {p.name for p in folder.iterdir()}
    again = Progress()
    decoder_replay.run("quick", tmp_path / "run", again, **options)
    assert not any("training" in str(call) for call in again.calls)
