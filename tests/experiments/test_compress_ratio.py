"""The study on a stand-in model: what its models differ in, its files, its resumption; and the real one, slowly."""

import json
import time

import numpy as np
import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.shipped import config_path
from dsflash_jax.training import devices, loop
from dsflash_jax.training.data import Batch
from dsflash_jax.training.evaluate import held_out_batches
from dsflash_jax.training.metrics import read_events, read_metrics
from experiments import cell as cell_module
from experiments import compress_ratio
from experiments import progress as progress_module
from experiments.artifacts import read_json
from experiments.cell import recall_batches
from experiments.compress_ratio import BUDGETS, SCHEDULES, cells, run, with_schedule
from experiments.registry import get_study
from tests.experiments.stand_in import BUDGET, CORPUS, TOOLS, Progress

LAB = ModelConfig.from_json(config_path("lab"))
LARGE = ModelConfig.from_json(config_path("lab_large"))


def study(out, progress=None, mode="default", tools=TOOLS):
    return run(mode, out, progress or Progress(), budget=BUDGET, tools=tools, corpus_of=lambda: CORPUS)


@pytest.mark.parametrize("base", [LAB, LARGE], ids=["lab", "lab_large"])
def test_schedules_differ_from_the_base_in_their_ratios_alone(base):
    for schedule in SCHEDULES:
        sources = set() if schedule else {"kv_source_layer_ids", "index_source_layer_ids"}
        differing = set(with_schedule(base, schedule).differences(base))
        assert differing == sources | ({"compress_ratios"} if schedule != (2, 1) else set()), schedule
    assert len({with_schedule(base, schedule) for schedule in SCHEDULES}) == 6


def test_ratios_go_to_the_layers_of_their_side():
    assert with_schedule(LAB, (4, 2)).compress_ratios == (0, 4, 2, 2)
    assert with_schedule(LARGE, (4, 2)).compress_ratios == (0, 4, 4, 2, 2, 2)
    assert with_schedule(LAB, (2, 1)) == LAB
    assert with_schedule(LAB, None).compress_ratios == (0, 0, 0, 0)


def test_a_ratio_that_does_not_divide_the_page_is_refused():
    with pytest.raises(ValueError, match="must be 0 or divide page_size=16"):
        with_schedule(LAB, (3, 1))


@pytest.mark.parametrize(("mode", "count"), [("quick", 3), ("default", 6), ("full", 23)])
def test_cells_of_a_mode(mode, count):
    found = list(cells(BUDGETS[mode], LAB, LARGE))
    assert len(found) == len({cell.name for cell in found}) == count
    main = [cell for cell in found if cell.labels["group"] == "main"]
    assert len({cell.settings.replace(seed=0) for cell in main}) == 1, "matched runs share every setting but the seed"
    assert {cell.labels["seed"] for cell in main} == set(BUDGETS[mode].seeds)
    for cell in found:
        assert cell.settings.seed == cell.labels["seed"]
        cell.settings.mix(cell.cfg)  # raises where the model cannot hold the rows
        for rows in (cell.effort.recall_rows, cell.effort.text_rows, cell.effort.probe_rows):
            assert rows % cell.settings.rows == 0
        assert max(cell.effort.decode_contexts) + cell.effort.decode_steps + 8 <= cell.cfg.max_position_embeddings


def test_equal_share_cells_select_the_share_of_ratio_one():
    found = [cell for cell in cells(BUDGETS["full"], LAB, LARGE) if cell.labels["group"] == "equal share"]
    assert [(cell.cfg.compress_ratios[-1], cell.cfg.index_topk) for cell in found] == [(2, 4), (4, 2)]


def test_a_run_writes_its_files_and_each_cell_its_own(tmp_path):
    progress = Progress()
    folder = study(tmp_path / "run", progress)
    assert folder == tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    figures = {"recall_by_distance.png", "quality_vs_bytes.png"}
    assert names == {"config.json", "manifest.json", "result.json", "report.md", "cells"} | figures
    result = read_json(folder / "result.json")
    assert [row["seed"] for row in result["rows"]] == [0, 0, 1, 1]  # seed by seed
    assert result["status"] == "not learned" and len(result["gate"]) == 3
    assert (folder / "report.md").read_text().startswith("# compress-ratio: not learned\n")
    for cell in read_json(folder / "config.json")["cells"]:
        own = {path.name for path in (folder / "cells" / cell["name"]).iterdir()}
        assert own == {"config.json", "metrics.jsonl", "probes.jsonl", "result.json", "checkpoints"}
    assert progress.calls[-1][:3] == ("compress-ratio", 4, 4)
    assert ("window-only-seed0", 6, 6) in [call[:3] for call in progress.calls]


def test_rows_hold_every_measure(tmp_path):
    control, other = read_json(study(tmp_path / "run") / "result.json")["rows"][:2]
    assert {"near", "mid", "relay", "far"} == set(control["recall"]["by_bucket"])
    assert {"aligned", "split"} == set(control["recall"]["by_both"]["far"])
    assert "global_off" not in control and "coverage" not in control, "window only has no global branch"
    assert other["coverage"]["max"] == other["coverage"]["mean"] == 0.5
    assert other["all_entries"]["recall"]["overall"]["asked"] == other["recall"]["overall"]["asked"]
    assert other["global_off"]["bits_per_byte"] != other["bits_per_byte"]
    assert [probe["step"] for probe in other["probes"]] == [2, 4, 6]
    assert other["steps"] == 6 and other["train_seconds"] > 0 and other["solved_at_step"] is None
    assert other["evaluation"]["recall_rows"] == 8 and other["evaluation"]["resting_rows"] == 4
    assert sum(other["far_by_row"]["asked"]) == other["recall"]["by_bucket"]["far"]["asked"]
    assert sum(other["far_by_row"]["correct"]) == other["recall"]["by_bucket"]["far"]["correct"]
    assert sum(other["bits_by_row"]) / 4 == pytest.approx(other["bits_per_byte"], abs=1e-3)
    assert 1 / 4 <= other["informed_guess"]["near"] <= 1, "four pairs show at most four values"
    asked = other["recall_by_lag"]
    assert {end + 1 for end in other["lag_classes"].values()} <= {*asked["all"]["lag_from"], *asked["all"]["lag_to"]}
    assert sum(asked["all"]["asked"]) == sum(asked["aligned"]["asked"]) + sum(asked["split"]["asked"])
    assert sum(asked["all"]["asked"]) == other["recall"]["overall"]["asked"]


def test_matched_models_answer_the_same_questions(tmp_path):
    rows = read_json(study(tmp_path / "run") / "result.json")["rows"]
    for questions in (lambda row: row["recall_by_lag"]["all"]["asked"], lambda row: row["far_by_row"]["asked"]):
        assert len({json.dumps(questions(row)) for row in rows}) == 1


def test_resting_rows_ask_far_pairs_more_often_and_are_other_rows():
    (cell, *_), count = cells(BUDGETS["default"], LAB, LARGE), 256
    batches = recall_batches(cell, CORPUS)
    assert len(batches) == (count + count // 2) // cell.settings.rows
    rows = Batch(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))
    far = (rows.lag > 62).sum(axis=1)
    assert far[count:].mean() > 3 * far[:count].mean()
    assert (rows.tokens[:128] != rows.tokens[count:]).any(axis=1).all()
    as_trained = held_out_batches(cell.cfg, cell.settings, CORPUS, count, 8).recall
    np.testing.assert_array_equal(rows.tokens[:count], np.concatenate([batch.tokens for batch in as_trained]))


def test_devices_that_do_not_divide_a_batch_are_refused_before_a_folder_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.jax, "devices", lambda *_: [None] * 3)
    with pytest.raises(ValueError, match="rows=4 must be divisible by devices=3"):
        study(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_cell_whose_result_is_gone_is_measured_again_and_not_trained_again(tmp_path):
    """How an older run gets newer measures: delete the results, run again."""
    folder = study(tmp_path / "run")
    before = read_json(folder / "result.json")["rows"]
    for path in [folder / "result.json", *folder.glob("cells/*/result.json")]:
        path.unlink()
    traces = {path: path.read_bytes() for path in folder.glob("cells/*/*.jsonl")}

    def never(*_, **__):
        raise AssertionError("a step was taken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_train_step", never)
        study(folder)
    assert read_json(folder / "result.json")["rows"] == before  # with the seconds and the course of the training
    assert {path: path.read_bytes() for path in folder.glob("cells/*/*.jsonl")} == traces
    sessions = read_json(folder / "manifest.json")["sessions"]
    assert len(sessions) == 2 and all(session["finished"] and session["elapsed_seconds"] > 0 for session in sessions)


def test_results_of_an_older_evaluation_are_not_compared_with_newer_ones(tmp_path):
    folder = study(tmp_path / "run")
    (folder / "result.json").unlink()
    path = folder / "cells" / "enc2-dec1-seed1" / "result.json"
    old = read_json(path)
    old["recall"]["by_bucket"]["near"]["asked"] += 1
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"group 'main' answered different questions \(enc2-dec1-seed1 other ones"):
        study(folder)
    assert not (folder / "result.json").exists()
    path.unlink()
    assert read_json(study(folder) / "result.json")["rows"][3]["recall"]["by_bucket"]["near"]["asked"] > 0


def test_the_manifest_records_the_constants_that_no_settings_hold(tmp_path):
    manifest = read_json(study(tmp_path / "run") / "manifest.json")
    assert manifest["row_constants"]["near_pairs"] == 3


def test_quick_files_are_marked(tmp_path):
    folder = study(tmp_path / "run", mode="quick")
    for name in ("config.json", "manifest.json", "result.json"):
        assert read_json(folder / name)["status"] == "not a result", name
    assert (folder / "report.md").read_text().startswith("# compress-ratio: not a result\n")
    cell = folder / "cells" / "enc2-dec1-seed0"
    assert {read_json(cell / name)["note"] for name in ("config.json", "result.json")} == {"not a result"}
    assert {"event": "note", "note": "not a result"} in read_events(cell / "metrics.jsonl")
    assert all(record["note"] == "not a result" for record in read_metrics(cell / "probes.jsonl"))


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch):
    """Nor is the call that only reads them a session: the manifest names what made the numbers."""
    folder = study(tmp_path / "run")
    first, manifest = read_json(folder / "result.json"), read_json(folder / "manifest.json")
    for name in ("result.json", "report.md"):
        (folder / name).unlink()
    monkeypatch.setattr(cell_module, "_train", None)  # would fail if called
    study(folder)
    assert read_json(folder / "result.json") == first and read_json(folder / "manifest.json") == manifest


def test_an_interrupted_run_continues_from_its_checkpoint_to_the_same_result(tmp_path, monkeypatch):
    whole = read_json(study(tmp_path / "whole") / "result.json")["rows"]
    parts, name = tmp_path / "parts", "enc2-dec1-seed0"
    monkeypatch.setattr(progress_module, "PROGRESS_EVERY", 1)
    with pytest.raises(KeyboardInterrupt):
        study(parts, Progress(stop_at=(name, 5)))  # behind the checkpoint of step 4
    folder = parts / "cells" / name
    assert {path.name for path in parts.iterdir()} == {"config.json", "manifest.json", "cells"}
    assert not (folder / "result.json").exists()
    probes = (folder / "probes.jsonl").read_text().splitlines(keepends=True)
    (folder / "probes.jsonl").write_text("".join(probes[:-1]))  # as if killed before the probe of step 4
    study(parts)
    assert [event["step"] for event in read_events(folder / "metrics.jsonl")] == [0, 4]
    for one, other in zip(whole, read_json(parts / "result.json")["rows"], strict=True):
        for timing in ("train_seconds", "compile_seconds", "tokens_per_second"):
            assert one.pop(timing) >= 0 and other.pop(timing) >= 0
        assert one == other


def test_an_unusable_folder_is_refused_before_any_work(tmp_path):
    def never(*_):
        raise AssertionError("work was done")

    tools = TOOLS._replace(model=TOOLS.model._replace(init=never))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        study(tmp_path / "file" / "run", tools=tools)
    study(tmp_path / "run")
    with pytest.raises(ValueError, match="holds another run, which differs in mode"):
        study(tmp_path / "run", mode="full", tools=tools)


def test_a_diverged_model_is_a_row_and_does_not_stop_the_study(tmp_path):
    def explode(params, tokens, cfg, **flags):
        out = TOOLS.model.forward(params, tokens, cfg, **flags)
        return out._replace(logits=out.logits * (float("nan") if cfg.kv_source_layer_ids else 1.0))

    folder = study(tmp_path / "run", tools=TOOLS._replace(model=TOOLS.model._replace(forward=explode)))
    rows = read_json(folder / "result.json")["rows"]
    assert ["diverged" in row for row in rows] == [False, True, False, True]
    assert "is not finite" in rows[1]["diverged"] and "## Diverged" in (folder / "report.md").read_text()


@pytest.mark.slow
def test_the_quick_study_runs_end_to_end(tmp_path):
    begin = time.perf_counter()
    folder = get_study("compress-ratio").run("quick", tmp_path / "run", Progress())
    rows = read_json(folder / "result.json")["rows"]
    assert [row["kv_bytes"]["per_token"] for row in rows] == [0.0, 52.5, 17.5]
    assert all(row["decode_seconds"][0]["median"] > 0 for row in rows)
    assert compress_ratio.CHANCE == 1 / 32
    print(f"quick study: {time.perf_counter() - begin:.0f} s")
