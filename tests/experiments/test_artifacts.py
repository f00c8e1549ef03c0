"""Files appear whole or not at all, and a folder of somebody else is left alone."""

import json
import os
from pathlib import Path

import pytest

from experiments import artifacts
from experiments.evidence import copy_evidence, main

PLAN = {"study": "compress-ratio", "mode": "full", "seeds": [0, 1]}


def test_a_file_replaces_the_old_one_whole(tmp_path):
    path = tmp_path / "a.json"
    artifacts.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        artifacts.write_json(path, {"x": float("nan")})
    with pytest.raises(RuntimeError), artifacts.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert artifacts.read_json(path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_new_file_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        artifacts.write_json(tmp_path / "a.json", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_rows_are_json_with_a_line_each(tmp_path):
    rows = [{"a": 1, "b": [1, 2]}, {"a": 2, "b": []}]
    path = artifacts.write_rows(tmp_path / "rows.json", {"study": "s", "gate": [{"passed": True}]}, rows)
    assert artifacts.read_json(path) == {"study": "s", "gate": [{"passed": True}], "rows": rows}
    assert '  {"a":1,"b":[1,2]},' in path.read_text().splitlines()
    assert artifacts.read_json(artifacts.write_rows(path, {"x": 1}, [])) == {"x": 1, "rows": []}


def test_a_run_gets_a_folder_named_by_time_and_plan(tmp_path):
    folder = artifacts.open_folder(None, tmp_path / "results", PLAN, resume=False)
    assert folder.parent == tmp_path / "results" and folder.name.endswith(artifacts.fingerprint(PLAN)[:8])
    assert artifacts.read_json(folder / "config.json") == PLAN


def test_only_a_resumable_run_continues_the_newest_unfinished_folder_of_its_plan(tmp_path):
    for name, plan, finished in (
        ("20260101", PLAN, False), ("20260102", PLAN, True), ("20260103", {**PLAN, "mode": "default"}, False),
    ):
        artifacts.open_folder(tmp_path / name, tmp_path, plan, resume=False)
        if finished:
            artifacts.write_json(tmp_path / name / "result.json", {})
    assert artifacts.open_folder(None, tmp_path, PLAN, resume=True) == tmp_path / "20260101"
    assert artifacts.open_folder(None, tmp_path, PLAN, resume=False).name > "20260104"


def test_a_folder_in_use_is_neither_continued_nor_shared(tmp_path):
    folder = artifacts.open_folder(tmp_path / "a", tmp_path, PLAN, resume=True)
    with artifacts.claimed(folder):
        assert artifacts.open_folder(None, tmp_path, PLAN, resume=True) != folder
        with pytest.raises(ValueError, match="is being worked on by another run"), artifacts.claimed(folder):
            pass
    with artifacts.claimed(folder):  # the claim ends with its block
        pass


def test_damaged_folders_are_passed_over_and_named(tmp_path):
    for name, text in (("broken", "{"), ("list", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    assert artifacts.open_folder(None, tmp_path, PLAN, resume=True).name not in ("broken", "list")
    with pytest.raises(ValueError, match=r"broken.config\.json: not a JSON file"):
        artifacts.open_folder(tmp_path / "broken", tmp_path, PLAN, resume=True)
    with pytest.raises(ValueError, match="holds a config.json that is no run's"):
        artifacts.open_folder(tmp_path / "list", tmp_path, PLAN, resume=True)


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path):
    artifacts.open_folder(tmp_path / "run", tmp_path, PLAN, resume=False)
    with pytest.raises(ValueError, match=r"holds another run, which differs in mode, seeds: choose another folder\."):
        artifacts.open_folder(tmp_path / "run", tmp_path, {**PLAN, "mode": "quick", "seeds": [0]}, resume=False)
    assert artifacts.read_json(tmp_path / "run" / "config.json") == PLAN


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        artifacts.open_folder(tmp_path, tmp_path, PLAN, resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        artifacts.open_folder(tmp_path / "file" / "run", tmp_path, PLAN, resume=False)


def test_the_manifest_counts_sessions_and_names_no_path(tmp_path):
    for count in (1, 2):
        manifest = artifacts.write_manifest(tmp_path, {"seeds": [0]})
        assert len(manifest["sessions"]) == count
        assert manifest["sessions"][-1]["elapsed_seconds"] is manifest["sessions"][-1]["finished"] is None
    text = (tmp_path / "manifest.json").read_text()
    assert json.loads(text) == manifest
    assert set(manifest["versions"]) >= {"python", "jax", "flax", "numpy"}
    assert manifest["machine"]["cores"] == os.cpu_count()
    assert str(Path.home()) not in text and str(tmp_path) not in text and str(Path(__file__).parents[2]) not in text


def test_a_session_notes_its_time_while_it_works_and_its_end(tmp_path):
    artifacts.write_manifest(tmp_path, {"seeds": [0]})
    artifacts.note_time(tmp_path, 12.34)
    artifacts.write_manifest(tmp_path, {"seeds": [0]})
    last = artifacts.note_time(tmp_path, 5.0, finished=True)["sessions"]
    assert artifacts.read_json(tmp_path / "manifest.json")["sessions"] == last
    assert [session["elapsed_seconds"] for session in last] == [12.3, 5.0]
    assert last[0]["finished"] is None and last[1]["finished"] >= last[1]["started"]


COMMIT = {"commit": "c" * 40, "modified": False}


def make_run(folder, status="learned", size=10, git=COMMIT):
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "report.md"):
        (folder / name).write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"sessions": [{"git": git}]}))
    (folder / "result.json").write_text(json.dumps({"study": "compress-ratio", "status": status}))
    (folder / "figure.png").write_bytes(b"x" * size)
    (folder / "cells").mkdir(exist_ok=True)
    (folder / "cells" / "big").write_bytes(b"x" * 1000)
    return folder


def test_evidence_is_the_small_files_of_a_finished_run(tmp_path):
    run, target = make_run(tmp_path / "run"), tmp_path / "evidence"
    target.mkdir()
    (target / "old.png").write_text("")
    copied = copy_evidence(run, target)
    assert sorted(p.name for p in copied) == sorted(p.name for p in target.iterdir())
    assert {p.name for p in copied} == {"config.json", "manifest.json", "report.md", "result.json", "figure.png"}


def test_other_runs_are_no_evidence(tmp_path, capsys):
    target = tmp_path / "evidence"
    for change, message in (
        ({"status": "not a result"}, "cannot be evidence"), ({"size": 450_000}, "bytes of evidence, at most 450,000"),
        ({"git": {**COMMIT, "modified": True}}, r"session 1 was made from a modified tree \(commit c{12} with local"),
        ({"git": None}, "was made outside a checkout: its commit is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_evidence(make_run(tmp_path / "run", **change), target)
    (tmp_path / "run" / "result.json").unlink()
    assert main([str(tmp_path / "run"), str(target)]) == 2
    assert "has no result.json: only a finished run is evidence." in capsys.readouterr().err
    assert main([]) == 2 and not target.exists()
