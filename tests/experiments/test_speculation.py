"""The speculation study: its prompts, what it counts, its gate, its files."""

import json

import numpy as np
import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.sampling import Sampling
from dsflash_jax.shipped import config_path
from dsflash_jax.speculate import Block
from dsflash_jax.speculative import CostTable
from dsflash_jax.training.calibration import fit_temperatures
from dsflash_jax.training.settings import DraftSettings, TrainSettings
from experiments import speculation, speculation_report
from experiments.gate import LEARNED, NOT_A_RESULT, NOT_LEARNED
from experiments.speculation import BLOCK, NOT_IDENTICAL, Budget, judge, with_drafts
from experiments.speculation_measures import (
    CONTROL,
    FITTED,
    KINDS,
    MEASURED,
    PLAIN,
    Decoder,
    Mode,
    Trace,
    acceptance,
    calibration,
    held_out_prompts,
    rounds_of,
    summary,
)
from tests.experiments.stand_in import CORPUS, Progress
from tests.model import running

LAB = ModelConfig.from_json(config_path("lab")).replace(max_position_embeddings=256)
SMALL = running.single(
    vocab_size=192, max_position_embeddings=64, num_nextn_predict_layers=1, dspark_block_size=5, dspark_markov_rank=8,
    dspark_target_layer_ids=(0,), dspark_noise_token_id=1, dspark_n_routed_experts=2, dspark_num_experts_per_tok=1,
)  # fmt: skip
SETTINGS = TrainSettings(steps=2, rows=4, context=64, pairs=4)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_end_where_their_row_asks_and_the_two_draws_differ(kind):
    found = held_out_prompts(LAB, SETTINGS, CORPUS, kind, 4, 64, MEASURED)
    assert len(found) == 4 and all(33 <= len(prompt.tokens) <= 64 for prompt in found)
    assert all((prompt.answer is None) == (kind == "text") for prompt in found)
    if kind in ("recall", "needle"):  # the key was shown before, with the value that is the answer
        for prompt in found:
            *before, key = prompt.tokens
            assert before[max(n for n, token in enumerate(before) if token == key) + 1] == prompt.answer
    if kind == "copy":  # the first of the span, whose second stands behind its first occurrence
        assert all(p.tokens[p.tokens.index(p.tokens[-1]) + 1] == p.answer for p in found)
    assert found == held_out_prompts(LAB, SETTINGS, CORPUS, kind, 4, 64, MEASURED)
    assert found != held_out_prompts(LAB, SETTINGS, CORPUS, kind, 4, 64, FITTED)


def test_too_short_rows_are_refused():
    with pytest.raises(ValueError, match="length=32 gives 0 needle prompts of 33 tokens, 2 are asked"):
        held_out_prompts(LAB, SETTINGS, CORPUS, "needle", 2, 32, MEASURED)


TRACE = Trace([1] * 9, 0.5, [Block(verified, accepted, np.zeros(3)) for verified, accepted in ((3, 3), (3, 1), (1, 1))])


def test_acceptance_counts_rounds_by_position():
    """Of three rounds two verified a second draft, both had accepted the first, one accepted the second."""
    assert acceptance([TRACE], 3) == {"verified": [3, 2, 2], "reached": [3, 2, 1], "accepted": [3, 1, 1]}
    assert summary([TRACE, TRACE], 3)["tokens"] == 16 and summary([TRACE], 3)["rounds"] == 3
    plain = summary([Trace([1] * 9, 0.5)], 3)
    assert plain["rounds"] == plain["tokens"] == 8 and "accepted" not in plain


def test_calibration_fits_on_one_draw_and_measures_the_other():
    sure = np.array([2.0])
    never = rounds_of([Trace([], 0.0, [Block(1, 0, sure)] * 40)])
    half = rounds_of([Trace([], 0.0, [Block(1, 0, sure), Block(1, 1, sure)] * 20)])
    found = calibration(half, never, fit_temperatures(half))
    assert found["temperatures"] == [pytest.approx(10.0)]  # the one of the grid that is nearest to a half
    assert found["before"]["error"] == [pytest.approx(1 / (1 + np.exp(-2.0)))]
    assert found["after"]["error"][0] == pytest.approx(1 / (1 + np.exp(-0.2)), abs=1e-3)
    assert found["after"]["bins"] == [[40, pytest.approx(0.54983, abs=1e-4), 0.0]] and found["rounds"] == [40, 40]


def rows(seed=0, first=60, control=1, same=10, answered=10):
    """Rows of one seed, made up: 10 prompts of each kind."""
    found = [{"kind": "costs", "seed": seed, "rows": [1, 6], "seconds": [1e-3, 2e-3]}]
    names = [PLAIN, *(f"fixed {n}" for n in range(BLOCK + 1)), "confidence", "calibrated", CONTROL]
    for temperature in (0.0, 1.0):
        half = {"error": [0.2, None], "floor": [0.05, None], "bins": [[8, 0.5, 0.3]]}
        found.append({"kind": "calibration", "seed": seed, "temperature": temperature, "temperatures": [2.0, 1.0],
                      "rounds": [8, 8], "before": half, "after": half})  # fmt: skip
        for kind in KINDS:
            for name in names:
                row = {"kind": "mode", "seed": seed, "prompts_of": kind, "mode": name, "temperature": temperature,
                       "prompts": 10, "tokens": 200, "rounds": 100, "seconds": 0.4}  # fmt: skip
                if name == PLAIN:
                    row |= {"answered": answered} if kind != "text" else {}
                else:
                    accepted = [control if name == CONTROL else first, 0, 0, 0, 0]
                    row |= {"verified": [100] * BLOCK, "reached": [100, *accepted[:-1]], "accepted": accepted}
                    row |= {"identical": same} if temperature == 0 else {}
                found.append(row)
    return found


@pytest.mark.parametrize(("found", "status"), [
    (rows(), LEARNED),
    ([*rows(), *rows(1)], LEARNED),
    ([*rows(), *rows(1, first=20)], NOT_LEARNED),
    (rows(control=6), NOT_LEARNED),
    (rows(answered=9), NOT_LEARNED),
    (rows(same=9), NOT_IDENTICAL),
])  # fmt: skip
def test_the_gate_asks_for_identical_output_first(found, status):
    assert judge(found).status == status
    assert judge(found, is_check=True).status == (NOT_IDENTICAL if status == NOT_IDENTICAL else NOT_A_RESULT)


def test_the_control_is_counted_and_plain_decoding_is_not_compared_with_itself():
    assert "in 360 of 360 generations" in judge(rows()).checks[0].sentence  # 9 modes, 4 kinds, 10 prompts
    assert "60.0%, must be at least 20 points above" in judge(rows()).checks[2].sentence


def test_figures_and_report_of_a_run_that_is_no_result_say_so(tmp_path):
    found = rows()
    plan = speculation._plan(
        "quick", Budget((0,), SETTINGS, DraftSettings(SETTINGS, continued=8)), LAB, CORPUS.summary()
    )
    gate = judge(found, is_check=True)
    names = speculation_report.write_figures(tmp_path, plan, found, gate)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    manifest = {"seeds": [0], "machine": {"cores": 2, "processor": "x"}, "versions": {"jax": "1"}, "sessions": []}
    text = speculation_report.render(plan, manifest, found, gate, names)
    assert "**not a result**" in text and "| greedy | text | 2.00 | 60.0 | 0.0 |" in text
    assert "| fixed 5 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 5.00 | 2.00 | 1.00x |" in text
    assert "| greedy | 0 | 20.0 - | 20.0 - | 20.0 | 20.0 | 5.0 | 2.00 1.00 | 8, 8 |" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert all(line.count("|") == table[0].count("|") for table in tables for line in table)


def test_draft_layers_are_added_to_the_base_and_change_nothing_else():
    assert set(LAB.differences(with_drafts(LAB))) == {
        "num_nextn_predict_layers", "dspark_block_size", "dspark_target_layer_ids", "dspark_markov_rank",
        "dspark_noise_token_id", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
    }  # fmt: skip


@pytest.mark.slow
def test_every_mode_generates_what_plain_decoding_does():
    """Untrained draft layers, whose drafts are rejected, and all ways to say how many are verified."""
    decoder = Decoder(running.parameters(SMALL), SMALL, 64)
    prompt = held_out_prompts(SMALL, SETTINGS, CORPUS, "text", 1, 40, MEASURED)[0].tokens
    costs = decoder.profile(prompt, (0, 5), 1)
    assert costs.rows == (1, 6) and min(costs.seconds) > 0
    plain = decoder.run(prompt, 12, Sampling(), 0, Mode(PLAIN))
    assert len(plain.tokens) == 12 and not plain.blocks
    free = CostTable((1, 6), (1.0, 1.0))
    modes = (
        Mode("none", 0),
        Mode("whole", 5),
        Mode("free", costs=free),
        Mode("cold", costs=free, temperatures=(0.1,) * 5),
    )
    for mode in modes:
        trace = decoder.run(prompt, 12, Sampling(), 0, mode)
        assert trace.tokens == plain.tokens
        assert sum(1 + block.accepted for block in trace.blocks) == 11
    assert [block.verified for block in decoder.run(prompt, 12, Sampling(), 0, modes[0]).blocks] == [0] * 11


@pytest.mark.slow
def test_a_run_writes_its_files_and_a_finished_seed_is_read(tmp_path):
    run = SETTINGS.replace(recall=0.25, near=0.0, needle=0.25, copy=0.25)
    drafts = DraftSettings(run, pool=4, continued=8, anchors=4)
    budget = Budget((0,), SETTINGS, drafts, prompts=1, fitted=1, length=40, new=8, fixed=(0, 5), profiled=1)
    options = {"budget": budget, "base": LAB, "corpus_of": lambda: CORPUS}
    folder = speculation.run("quick", tmp_path / "run", Progress(), **options)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == NOT_A_RESULT and result["gate"][0]["passed"]
    assert {row["kind"] for row in result["rows"]} == {"costs", "calibration", "mode"}
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "manifest.json", "report.md", "acceptance.png", "speed.png", "calibration.png"} <= files
    again = Progress()
    speculation.run("quick", tmp_path / "run", again, **options)
    assert [call[0] for call in again.calls] == ["speculation"]
