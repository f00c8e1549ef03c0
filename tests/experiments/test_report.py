"""What the report says first, what it repeats from the rows, and the figures beside it."""

import pytest
from PIL import Image

from experiments import figures, report
from experiments.gate import judge
from tests.experiments import made_up
from tests.experiments.made_up import row, rows

CHANCE = 1 / 32


def rendered(found, seeds=(0, 1, 2), is_check=False, mode="full"):
    gate = judge(found, seeds, is_check=is_check)
    return report.render(made_up.plan(mode), made_up.manifest(), found, gate, CHANCE, {"figure.png": "A figure"})


def table_line(text, schedule, section):
    """The first line of a schedule behind a heading, as cells."""
    behind = text[text.index(section) :]
    line = next(line for line in behind.splitlines() if line.startswith(f"| {schedule} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_gate_opens_the_report():
    lines = rendered(rows()).splitlines()
    assert lines[0] == "# compress-ratio: learned"
    assert lines[4] == "## Gate: learned"
    assert sum(line.startswith("- [x]") for line in lines) == 3


def test_a_study_that_did_not_learn_says_so_and_why():
    text = rendered(rows(near=0.5))
    assert text.startswith("# compress-ratio: not learned\n")
    assert "**not learned**" in text and "Cite nothing below" in text
    assert "- [ ] Window only solves near recall: 50.0%, 50.0%, 50.0%, must be at least 95% in every seed." in text


def test_a_quick_run_is_marked_whatever_it_shows():
    text = rendered(rows(), is_check=True)
    assert text.startswith("# compress-ratio: not a result\n") and "**not a result**" in text


def test_the_tables_hold_medians_and_ranges_of_the_rows():
    text = rendered(rows(far={(4, 4): 0.85}))
    cost = table_line(text, "(2,1)", "## Cost and saving")
    assert cost[1:4] == ["100.0", "99.0", "98.0"] and cost[6:8] == ["2.610", "52.50"]
    assert table_line(text, "(2,1)", "## Spread over seeds")[2] == "97.0 to 99.0"
    assert table_line(text, "(2,1)", "## Spread over seeds")[-1] == "99.0, 98.0, 97.0"
    assert table_line(text, "(4,4)", "## Inside")[3] == "86.0"
    assert "Answers asked of each model: near 1,000, mid 1,000, far 1,000." in text
    assert "- (4,4) stores 25% of the global bytes of (1,1); far recall -13.0 points" in text


def test_a_figure_that_one_seed_lacks_is_a_dash_and_no_number():
    found = rows()
    found[2] = {**found[2], "solved_at_step": None}
    assert table_line(rendered(found), "(2,1)", "solved at step |")[2] == "-"


def test_one_seed_has_no_spread():
    text = rendered(rows(seeds=(0,)), seeds=(0,), mode="default")
    assert "nothing is known of the spread" in text and "least to greatest" not in text


def test_a_diverged_run_is_named_and_leaves_no_number():
    lost = {"group": "main", "encoder": 4, "decoder": 4, "seed": 2, "diverged": "loss=nan at step 7 is not finite."}
    found = [r for r in rows() if (r["encoder"], r["decoder"], r["seed"]) != (4, 4, 2)] + [lost]
    text = rendered(found)
    assert "## Diverged" in text and "loss=nan at step 7" in text
    assert set(table_line(text, "(4,4)", "## Cost and saving")[1:]) == {"-"}


def test_other_groups_have_sections_of_their_own():
    found = [*rows(), row((2, 2), group="equal share"), row(None, group="large"), row((2, 1), group="large")]
    text = rendered(found)
    assert "| (2,2), k / 2 |" in text and "## Larger configuration" in text
    assert "## Larger configuration" not in rendered(rows())


def test_the_report_says_what_it_does_not_show():
    text = rendered(rows())
    limits = text[text.index("## What this does not show") :]
    for words in ("32 entries", "top-k of 8", "token shift", "released model", "aligned and split"):
        assert words in limits
    assert "![A figure](figure.png)" in text


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_figures_are_pictures(tmp_path, seeds):
    found = [*rows(seeds), row(None, group="large"), row((2, 1), group="large")]
    written = figures.write_figures(tmp_path, found, judge(found, seeds), CHANCE)
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir())
    assert {"recall_by_distance.png", "quality_vs_bytes.png"} <= set(written)
    for name in written:
        with Image.open(tmp_path / name) as picture:
            picture.load()
            assert picture.format == "PNG" and picture.width > 800 and len(picture.getcolors(256)) > 10


def test_a_figure_of_no_result_carries_the_words(tmp_path):
    found = rows((0,))
    for name, is_check in (("plain", False), ("marked", True)):
        (tmp_path / name).mkdir()
        figures.write_figures(tmp_path / name, found, judge(found, (0,), is_check=is_check), CHANCE)
    plain, marked = ((tmp_path / n / "quality_vs_bytes.png").read_bytes() for n in ("plain", "marked"))
    assert plain != marked


def test_figures_of_diverged_runs_only_are_not_drawn(tmp_path):
    lost = {"group": "main", "encoder": None, "decoder": None, "seed": 0, "diverged": "lost"}
    assert figures.write_figures(tmp_path, [lost], judge([lost], (0,)), CHANCE) == {}
    assert list(tmp_path.iterdir()) == []


def test_bins_with_few_answers_are_not_drawn():
    curve = {"lag_from": [1, 9], "lag_to": [9, 17], "correct": [5, 9], "asked": [10, 9]}
    assert figures._band([curve]) == ([4.5], [50.0], [50.0], [50.0])
