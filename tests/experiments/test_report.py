"""What the report says first, what it repeats from the rows, and the figures beside it."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from experiments import figures, report
from experiments.gate import judge
from experiments.rows import compared
from tests.experiments import made_up
from tests.experiments.made_up import recall, row, rows

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


def test_the_tables_hold_shares_of_all_seeds_medians_and_ranges():
    text = rendered(rows(far={(4, 4): 0.85}))
    recall = table_line(text, "(2,1)", "| encoder,decoder | near %")
    assert recall[1:5] == ["100.0", "99.0", "98.0", "98.0 (97.4 to 98.4)"] and recall[-1] == "2.610"
    assert table_line(text, "(4,4)", "| encoder,decoder | near %")[5].startswith("86.0 (")  # all entries
    cost = table_line(text, "(4,2)", "KV B/token")
    assert cost[1:6] == ["26.25", "11,096", "14,456", "24,536", "0.50 (0.40 to 0.60)"]
    assert table_line(text, "(2,1)", "## Spread over seeds")[2] == "97.0 to 99.0"
    assert table_line(text, "(2,1)", "## Spread over seeds")[4] == "99.0, 98.0, 97.0"
    assert "Answers asked of each model: near 1,000, mid 1,000, relay 1,000, far 1,000." in text


def test_differences_are_paired_and_stand_beside_those_of_each_seed():
    text = rendered(rows(far={(4, 4): 0.85}))
    line = next(line for line in text.splitlines() if line.startswith("- (4,4) stores"))
    assert "25% of the global bytes of (1,1) per token" in line
    assert "(112% of all bytes at 128 tokens, 52% of all bytes at 512 tokens)" in line
    assert "far recall -13.0 points (95 %: -1" in line and "by seed -14.0, -13.0, -12.0)" in line
    assert "bits per byte +0.000 (95 %: +0.000 to +0.000; by seed +0.000, +0.000, +0.000)" in line


def test_rows_without_their_parts_have_a_difference_and_no_interval():
    old = [{key: value for key, value in r.items() if key not in ("far_by_row", "bits_by_row")} for r in rows()]
    line = next(line for line in rendered(old).splitlines() if line.startswith("- (4,4) stores"))
    assert "far recall +0.0 points (by seed +0.0, +0.0, +0.0)" in line


def test_answers_to_other_questions_are_not_paired():
    found = rows()
    found[5]["far_by_row"] = {"asked": [5] * 250, "correct": [4] * 250}
    assert compared(found[5::6], found[1::6], "far") is None
    assert compared(found[4::6], found[1::6], "far") is not None
    assert compared(found[4:5], found[1::6], "far") is None  # one seed against three


def test_both_floors_are_told():
    text = rendered(rows())
    assert "right in 3.1 % of the far pairs, one among the values that the row has shown so far in 14.0 %." in text


def test_a_schedule_that_never_switched_is_marked_with_what_all_entries_say():
    found = rows(far={(4, 4): 0.5})
    for number in (5, 17):  # (4,4) of seeds 0 and 2
        found[number] |= {"switch_step": None, "all_entries": {"recall": recall(0.9, 0.4)}}
    text = rendered(found)
    for section in ("| encoder,decoder | near %", "KV B/token", "| encoder,decoder | top-k from step", "## Inside"):
        assert table_line(text, "(4,4) \N{DAGGER}", section), section
    assert table_line(text, "(4,4) \N{DAGGER}", "top-k from step |")[1] == "never, 300, never"
    assert table_line(text, "(2,1)", "top-k from step |")[1] == "300, 300, 300"
    note = next(line for line in text.splitlines() if line.startswith("\N{DAGGER} (4,4), seeds 0, 2:"))
    assert "with all entries attended is 40.0 (37.9 to 42.2) %, against 50.0 (47.8 to 52.2) % under top-k" in note
    assert "Not trained under top-k in seeds 0, 2" in text
    assert "\N{DAGGER} (4,4)" not in rendered(rows())


def test_window_only_has_nothing_to_select_and_no_mark():
    found = rows()
    for number in (0, 6, 12):
        found[number] |= {"switch_step": None}
    assert table_line(rendered(found), "window only", "top-k from step |")[1] == "-"


def test_the_report_says_when_and_how_long_and_at_which_commit():
    made = rendered(rows())
    made = made[made.index("## How it was made") :]
    assert "started 2026-01-01T00:00:00+00:00, 30.0 minutes, did not finish the run, commit cccccccccccc" in made
    assert "15.0 minutes, finished the run 2026-01-01T01:15:00+00:00, commit dddddddddddd" in made
    assert "18 models: 18.0 minutes of optimiser steps and 3.6 of compiling them" in made
    assert "512 held-out recall rows as trained, and 256 in which a pair rests" in made


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
    lags, shares, each = figures._curve([curve])
    assert lags == [4.5] and [share.value for share in shares] == [0.5] and each == [[50.0]]


def test_curves_are_over_all_seeds_and_show_each():
    bins = {"lag_from": [1], "lag_to": [9], "asked": [20]}
    lags, shares, each = figures._curve([{**bins, "correct": [10]}, {**bins, "correct": [20]}])
    assert shares[0].value == 0.75 and shares[0].low < 0.75 < shares[0].high and each == [[50.0], [100.0]]


def seen(drawn):
    """The text objects of a figure that a reader sees: not empty, and no tick outside its axis."""
    outside = set()
    for axis in (one for axes in drawn.axes for one in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
        outside |= {label for tick in ticks for label in (tick.label1, tick.label2)}
    texts = [text for text in drawn.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if text not in outside]


def drawn_texts(drawn):
    return "\n".join(text.get_text() for text in seen(drawn))


def test_figures_name_zones_floors_and_the_mark():
    found = rows(far={(4, 4): 0.5})
    found[5] |= {"switch_step": None}
    pictures = (figures.draw_recall, figures.draw_quality)
    recall_text, quality_text = (drawn_texts(draw(found, CHANCE)) for draw in pictures)
    for words in ("near", "mid", "relay", "far", "guess among all values, 3.1%", "guess among the row's values, 14.0%"):
        assert words in recall_text, words
    assert "(4,4) \N{DAGGER} seed 0: never trained under top-k: far 50%, and 51% with all entries" in recall_text
    assert "\N{DAGGER} with all entries attended" in quality_text and "(4,4) \N{DAGGER}" in quality_text


def test_no_texts_of_a_figure_lie_over_each_other():
    found = rows(far={(4, 2): 0.93, (4, 4): 0.5})
    found[5] |= {"switch_step": None}
    for draw in (figures.draw_recall, figures.draw_quality):
        drawn = draw(found, CHANCE)
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in seen(drawn)]
        whole = drawn.bbox
        for text, box in boxes:
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text
        for (one, box), (other, second) in itertools.combinations(boxes, 2):
            assert not box.shrunk(0.8, 0.8).overlaps(second.shrunk(0.8, 0.8)), (one, other)


def test_quality_axes_hold_the_zero_they_compare_with():
    far, bits, sizes = figures.draw_quality(rows(), CHANCE).axes
    assert far.get_ylim()[0] <= 0 and far.get_ylim()[1] >= 100
    assert bits.get_ylim()[0] < 0 < bits.get_ylim()[1]
    assert sizes.get_ylim()[0] == 0
