"""The results part of the README, written from committed evidence: numbers in it cannot drift from the rows."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.artifacts import read_json, write_text
from experiments.compress_ratio import CHANCE
from experiments.gate import LEARNED, control_learned
from experiments.report import config_of, dagger_note, guesses, size_of
from experiments.rows import LARGE, MAIN, Row, by_schedule, main_rows, measured, pooled
from experiments.tables import COURSE, RECALL, Column, cost_columns, interval, points, table

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PUBLISHED = "(2,1)"
WIDTH = 120


def results_block(folder: Path, where: str) -> str:
    """The text between the two marks of the README. folder: the evidence; where: its address as the README links it."""
    plan, manifest, result = (read_json(folder / f"{name}.json") for name in ("config", "manifest", "result"))
    rows = main_rows(result["rows"])
    if result["status"] != LEARNED:
        return _wrapped(
            f"{_made(plan, manifest)}: **{result['status']}** ([report]({where}/report.md)). The gate failed, so there "
            "is nothing to cite."
        )
    others = [row for row in result["rows"] if row["group"] == LARGE]
    sizes = [row["parameters"] for row in result["rows"] if measured(row)]
    figures = [
        f"![{caption}]({where}/{name})"
        for name, caption in (
            ("recall_by_distance.png", "Recall by distance"), ("quality_vs_bytes.png", "Quality against bytes")
        )
    ]
    control = by_schedule(rows)["window only"]
    opening = (
        f"{_made(plan, manifest)} ([report]({where}/report.md), raw rows in `result.json` beside it). The gate passed: "
        f"window only recalls {points(100 * pooled(control, 'near').value)} % of the near pairs and "
        f"{points(100 * pooled(control, 'far').value)} % of the far ones.{guesses(rows, CHANCE)}"
    )
    notes = [_wrapped(note) for note in (*dagger_note(rows).split("\n\n"), _larger(plan, others))]
    parts = [
        _wrapped(opening), table(rows, _columns(rows), _names(rows)), _wrapped(_reading(plan, rows)), *notes, *figures,
        _wrapped(_limits(plan, max(sizes))),
    ]
    return "\n\n".join(part for part in parts if part)


def _made(plan: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Date, command, seeds, machine and time of a run."""
    option = {"quick": " --quick", "full": " --full"}.get(plan["mode"], "")
    count = len(plan["seeds"])
    seeds = "one seed" if count == 1 else f"{count} seeds"
    machine, sessions = manifest["machine"], manifest["sessions"]
    seconds = [session.get("elapsed_seconds") for session in sessions]
    took = f", {sum(seconds) / 60:.0f} minutes" if all(seconds) else ""
    changed = any(session["git"] and session["git"]["modified"] for session in sessions)
    took += ", made from a modified tree" if changed else ""
    return (
        f"{sessions[-1]['started'][:10]}, `dsflash run compress-ratio{option}`, **{seeds}**, {machine['cores']} cores "
        f"({machine['processor']}), JAX {manifest['versions']['jax']}{took}"
    )


def _columns(rows: Sequence[Row]) -> dict[str, Column]:
    """The few columns that fit a README; the report has the others."""
    cost = {title: column for title, column in cost_columns(rows).items() if not title.startswith(("decode", "fixed"))}
    recall = {title: RECALL[title] for title in ("near %", "far %", "all entries: far %", "bits/byte")}
    return {"top-k from step": COURSE["top-k from step"], **recall, **cost}


def _names(rows: Sequence[Row]) -> dict[str, str]:
    return {name: f"{name}, the published pair" if name == PUBLISHED else name for name in by_schedule(rows)}


def _reading(plan: Mapping[str, Any], rows: Sequence[Row]) -> str:
    several = len(plan["seeds"]) > 1
    shares = "Shares are over the answers of all seeds" if several else "One seed"
    entries = "All entries: far recall of the same models when nothing is left out by the selection. "
    return (
        f"{shares}; in brackets the 95 % interval over answers, which does not hold what another training would give. "
        + (entries if any(pooled([row], "all_far") for row in rows) else "")
        + "Bytes are measured on allocated caches: the slope per token, and whole sequences with the fixed part "
        "(windows, compressor state)."
    )


def _larger(plan: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Far recall of the larger configuration in a sentence, if its control learned; empty without such rows."""
    if not rows:
        return ""
    learned = control_learned(rows)
    if not learned.passed:
        return f"The larger configuration is not cited. {learned.sentence}"
    found = {name: pooled(runs, "far") for name, runs in by_schedule(row for row in rows if measured(row)).items()}
    listed = ", ".join(f"{name} {interval(share)} %" for name, share in found.items() if share is not None)
    return f"Larger configuration ({size_of(plan, LARGE)}, one seed), far recall: {listed}." if listed else ""


def _limits(plan: Mapping[str, Any], most_parameters: int) -> str:
    settings = plan["settings"]["main"]
    config = config_of(plan, MAIN)
    count = len(plan["seeds"])
    seeds = "a spread (one seed)" if count == 1 else f"the spread of more than {count} trainings"
    share = 4 * config["index_topk"] / settings["context"]
    return (
        f"What it does not show: {seeds}; the ratio apart from the selected share (at m = 4 the top-k of "
        f"{config['index_topk']} takes {100 * share:.0f} % of the entries); what more than {settings['steps']} steps "
        "would give; a saving at short contexts, where the fixed part decides; anything about models of more than "
        f"{most_parameters:,} parameters. A learned token shift at the embedding, not part of the published model, is "
        "what lets models of this size learn."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def with_results(readme: str, block: str) -> str:
    """The README with its results part replaced. Raises ValueError where the two marks are not there once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(END) < readme.index(BEGIN):
        raise ValueError(f"README has no single {BEGIN} before a single {END}: the results have no place.")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.partition(END)[2]}"


def update_readme(readme: Path, evidence: Path) -> Path:
    """Writes the results part of a README from the evidence beside it (a folder below the README's)."""
    where = evidence.resolve().relative_to(readme.resolve().parent).as_posix()
    return write_text(readme, with_results(readme.read_text(encoding="utf-8"), results_block(evidence, where)))
