"""The results part of the README is what the committed evidence renders to, and nothing else is touched."""

from pathlib import Path

import pytest

from experiments import readme
from experiments.artifacts import write_json, write_rows
from experiments.gate import judge
from tests.experiments import made_up
from tests.experiments.made_up import row, rows

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "experiments" / "results" / "compress-ratio"


def evidence(folder, found, seeds=(0, 1, 2), mode="full"):
    """The files of a run, made up."""
    folder.mkdir(parents=True)
    gate = judge(found, seeds)
    plan = {**made_up.plan(mode), "seeds": list(seeds)}
    write_json(folder / "config.json", plan)
    write_json(folder / "manifest.json", made_up.manifest())
    write_rows(folder / "result.json", {"study": "compress-ratio", "status": gate.status}, found)
    return folder


LARGER = [row(None, near=0.96, far=0.02, group="large"), row((2, 1), group="large")]


def flat(text):
    return " ".join(text.split())


def test_the_readme_says_what_the_committed_evidence_says():
    """After new evidence: python -m experiments.evidence RUN writes both."""
    text = (ROOT / "README.md").read_text()
    block = readme.results_block(EVIDENCE, EVIDENCE.relative_to(ROOT).as_posix())
    assert readme.with_results(text, block) == text


def test_the_block_names_run_gate_table_and_limits(tmp_path):
    found = rows(far={(4, 4): 0.85})
    found[5] |= {"switch_step": None}
    block = readme.results_block(evidence(tmp_path / "run", [*found, *LARGER]), "results/run")
    text = flat(block)
    assert text.startswith("2026-01-01, `dsflash run compress-ratio --full`, **3 seeds**, 2 cores (a processor)")
    assert "JAX 0.10.2, 45 minutes ([report](results/run/report.md)" in text
    assert "window only recalls 97.0 % of the near pairs and 4.0 % of the far ones." in text
    assert "| (2,1), the published pair | 300, 300, 300 | 100.0 | 98.0 (97.4 to 98.4) |" in block
    assert "| (4,4) \N{DAGGER} | never, 300, 300 |" in block and "\N{DAGGER} (4,4), seed 0: trained on all" in text
    assert "| B of 128 tokens | B of 512 tokens |" in block
    assert "Larger configuration (context 256, window 32, 6 layers, one seed), far recall: window only 2.0" in text
    assert "the spread of more than 3 trainings" in text and "takes 25 % of the entries" in text
    assert max(len(line) for line in block.splitlines() if not line.startswith("|")) <= 120


def test_a_run_that_did_not_learn_gives_no_table(tmp_path):
    block = readme.results_block(evidence(tmp_path / "run", rows(near=0.5)), "results/run")
    assert "**not learned**" in flat(block) and "nothing to cite" in flat(block) and "|" not in block


def test_a_modified_tree_is_told(tmp_path):
    folder = evidence(tmp_path / "run", rows())
    manifest = made_up.manifest()
    manifest["sessions"][0]["git"]["modified"] = True
    write_json(folder / "manifest.json", manifest)
    assert "made from a modified tree" in flat(readme.results_block(folder, "results/run"))


def test_only_the_part_between_the_marks_changes(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nstale\n{readme.END}\nbehind\n")
    readme.update_readme(page, evidence(tmp_path / "results" / "run", rows()))
    text = page.read_text()
    assert text.startswith(f"before\n{readme.BEGIN}\n2026-01-01") and text.endswith(f"{readme.END}\nbehind\n")
    assert "stale" not in text and "](results/run/report.md)" in text


@pytest.mark.parametrize("text", ["", readme.BEGIN, f"{readme.END}{readme.BEGIN}", readme.BEGIN * 2 + readme.END])
def test_a_page_without_the_marks_is_refused(text):
    with pytest.raises(ValueError, match="the results have no place"):
        readme.with_results(text, "block")


@pytest.mark.parametrize("near", [0.94, None])
def test_a_larger_group_whose_control_did_not_learn_is_not_cited(tmp_path, near):
    control = [] if near is None else [row(None, near=near, far=0.02, group="large")]
    text = flat(readme.results_block(evidence(tmp_path / "run", [*rows(), *control, LARGER[1]]), "results/run"))
    assert "The larger configuration is not cited." in text and "far recall: window only" not in text
    assert ("94.0%" if near else "no seed") in text
