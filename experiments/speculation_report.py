"""report.md and figures of the speculation study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.drawing import BLACK, BLUE, GREY, ORANGE, SKY, save_figure, style
from experiments.gate import LEARNED, NOT_A_RESULT, Gate
from experiments.registry import STUDIES
from experiments.report import session_line
from experiments.speculation_measures import CONTROL, KINDS, PLAIN
from experiments.tables import markdown

Row = Mapping[str, Any]
QUESTION = STUDIES["speculation"].question
SCHEDULED = ("confidence", "calibrated")
_COLOURS = {"text": BLUE, "recall": ORANGE, "needle": SKY, "copy": BLACK}
_HOW = {0.0: "greedy", 1.0: "temperature 1"}


def render(
    plan: Mapping[str, Any], manifest: Mapping[str, Any], rows: Sequence[Row], gate: Gate, names: Mapping[str, str]
) -> str:
    """The whole report. plan, manifest: config.json and manifest.json of the run; names: figure file -> caption."""
    meaning = {
        LEARNED: "The gate passed: the numbers below may be read, with the limits at the end.",
        NOT_A_RESULT: "**not a result**: a run of a few steps that checks the machinery. Cite nothing below.",
    }.get(gate.status, f"**{gate.status}**: a check failed. Cite nothing below.")
    checks = [f"- [{'x' if check.passed else ' '}] {check.sentence}" for check in gate.checks]
    parts = [
        f"# speculation: {gate.status}", f"*{QUESTION}*",
        "\n".join([f"## Gate: {gate.status}", "", meaning, "", *checks]),
        *_acceptance_section(plan, rows), *_speed_section(plan, rows), *_calibration_section(rows),
        *(f"![{caption}]({name})" for name, caption in names.items()), _limits(plan), _making(plan, manifest),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def chosen(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows of kind "mode" that have these values."""
    return [r for r in rows if r["kind"] == "mode" and all(r.get(name) == value for name, value in values.items())]


def total(rows: Iterable[Row], name: str) -> Any:
    """A sum over rows: of numbers, or position by position of lists."""
    return np.sum([row[name] for row in rows], axis=0)


def block_of(plan: Mapping[str, Any]) -> int:
    """Drafts of a block."""
    return plan["config"]["dspark_block_size"]


def _acceptance_section(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    effort, block = plan["effort"], block_of(plan)
    text = (
        f"{effort['prompts']} held-out prompts of each kind and seed, {effort['new']} tokens behind each, all {block} "
        "drafts of a block verified. *Survives*: share of blocks of which all drafts up to the position were accepted. "
        "*If reached*: share accepted where all drafts before were. Untrained: the same draft layers before training, "
        "all kinds of prompts. Text is a row of source text; the other prompts end with the token whose "
        "successor the row determines: recall and needle with a key shown before, copy with the start of a repeated "
        "span. What follows the answer is the backbone's own."
    )
    lines = []
    for temperature, how in _HOW.items():
        for kind in (*KINDS, CONTROL):
            values = {"mode": CONTROL} if kind == CONTROL else {"mode": f"fixed {block}", "prompts_of": kind}
            found = chosen(rows, temperature=temperature, **values)
            if found:
                verified, reached, accepted = (total(found, name) for name in ("verified", "reached", "accepted"))
                rounds, tokens = total(found, "rounds"), total(found, "tokens")
                lines.append([how, kind, f"{tokens / rounds:.2f}", *_shares(accepted, verified),
                              *_shares(accepted, reached)])  # fmt: skip
    head = ["decoding", "prompts", "tokens per step"]
    head += [f"{name} {k + 1} %" for name in ("survives", "if reached") for k in range(block)]
    answered = []
    for kind in (kind for kind in KINDS if kind != "text"):
        found = chosen(rows, mode=PLAIN, prompts_of=kind, temperature=0.0)
        answered.append(f"{kind} {total(found, 'answered') / total(found, 'prompts'):.0%}")
    behind = f"Prompts whose answer the backbone itself gives, greedily: {', '.join(answered)}."
    return ["## Accepted drafts", text, markdown(head, lines), behind]


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> list[str]:
    return [f"{100 * part / whole:.1f}" if whole else "-" for part, whole in zip(parts, wholes, strict=True)]


def mode_names(plan: Mapping[str, Any]) -> list[str]:
    """Modes in the order of tables, but for the control."""
    return [PLAIN, *(f"fixed {count}" for count in plan["effort"]["fixed"]), *SCHEDULED]


def _speed_section(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    text = (
        "Tokens per step: a step is one call of the backbone; plain decoding gives 1 by definition. Drafts verified: "
        "per step. Time: milliseconds per token behind the prefill, modes taking turns on every prompt, one sequence "
        "at a time; speed-up against plain decoding over the same prompts. *fixed k* verifies k drafts, whatever their "
        "confidence; *confidence* as many as the confidences make worth the measured cost of a step, *calibrated* the "
        "same behind the temperatures below. At this size a step is mostly the time of calling it."
    )
    parts = ["## Tokens per step and time", text, _cost_table(rows)]
    for temperature, how in _HOW.items():
        lines = []
        plain = chosen(rows, mode=PLAIN, temperature=temperature)
        for name in mode_names(plan):
            found = chosen(rows, mode=name, temperature=temperature)
            if not found:
                continue
            by_kind = [[r for r in found if r["prompts_of"] == kind] for kind in KINDS]
            steps = [f"{total(part, 'tokens') / total(part, 'rounds'):.2f}" for part in [*by_kind, found]]
            verified = "-" if name == PLAIN else f"{total(found, 'verified').sum() / total(found, 'rounds'):.2f}"
            lines.append([name, *steps, verified, f"{_pace(found):.2f}", f"{_pace(plain) / _pace(found):.2f}x"])
        head = [how, *(f"tokens per step: {kind}" for kind in (*KINDS, "all")), "drafts verified", "ms per token"]
        parts.append(markdown([*head, "speed-up"], lines))
    return parts


def _pace(rows: Sequence[Row]) -> float:
    return 1e3 * total(rows, "seconds") / total(rows, "tokens")


def _cost_table(rows: Sequence[Row]) -> str:
    lines = [[str(row["seed"]), *(f"{1e3 * seconds:.2f}" for seconds in row["seconds"])]
             for row in rows if row["kind"] == "costs"]  # fmt: skip
    sizes = next(row["rows"] for row in rows if row["kind"] == "costs")
    text = "Measured cost of a step with its drafting, best of some, in milliseconds by the rows that it verifies:"
    return f"{text}\n\n{markdown(['seed', *(f'{size} rows' for size in sizes)], lines)}"


def _calibration_section(rows: Sequence[Row]) -> list[str]:
    text = (
        "Expected calibration error of the predicted survival up to each position, in percent: the distance between "
        "what the confidences predict and what happened, over 15 ranges. The temperatures are fitted from the first "
        "position to the last on other prompts than those measured. The head is trained on the chance that a *drawn* "
        "draft is accepted; greedy acceptance is another question. Floor: the mean error that true predictions would "
        "show over so few steps."
    )
    lines = []
    for row in (row for row in rows if row["kind"] == "calibration"):
        before, after, floor = row["before"]["error"], row["after"]["error"], row["after"]["floor"]
        by_position = [" ".join("-" if e is None else f"{100 * e:.1f}" for e in errors) for errors in (before, after)]
        means = [f"{100 * np.mean([e for e in errors if e is not None]):.1f}" for errors in (before, after, floor)]
        temperatures = " ".join(f"{t:.2f}" for t in row["temperatures"])
        rounds = ", ".join(f"{count:,}" for count in row["rounds"])
        lines.append([_HOW[row["temperature"]], str(row["seed"]), *by_position, *means, temperatures, rounds])
    head = ["decoding", "seed", "before, by position", "after, by position", "mean before", "mean after", "floor",
            "temperatures", "steps: fitted on, measured on"]  # fmt: skip
    return ["## Calibration", text, markdown(head, lines)]


def _limits(plan: Mapping[str, Any]) -> str:
    cfg = plan["config"]
    return "\n".join([
        "## What this does not show", "",
        f"- Nothing about the released model: here {cfg['num_nextn_predict_layers']} draft layers stand against "
        f"{cfg['num_hidden_layers']} of the backbone, which can save little, and see {cfg['sliding_window']} tokens.",
        "- Real text: behind a prompt these models soon repeat themselves, which is easy to draft when greedy.",
        "- Batches: one sequence at a time, so the schedule weighs a sequence's drafts against each other only.",
        "- What the far past of a prompt could give to a draft: draft layers see a window of what enters the target "
        "layers, so a pair recalled from beyond it cannot be drafted before its key was processed.",
        "- Speed of anything but this implementation on this machine.",
    ])  # fmt: skip


def _making(plan: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    machine, versions, effort = manifest["machine"], manifest["versions"], plan["effort"]
    drafts = effort["drafts"]
    return "\n".join([
        "## How it was made", "",
        f"- `dsflash run speculation`, mode {plan['mode']}, seeds {', '.join(map(str, manifest['seeds']))}",
        *(f"  - {session_line(session)}" for session in manifest["sessions"]),
        f"- backbone: {effort['training']['steps']} steps. Draft layers: {drafts['run']['steps']} steps of "
        f"{drafts['run']['rows']} rows with {drafts['anchors']} blocks each, from {drafts['pool']} rows whose last "
        f"{drafts['continued']} tokens the backbone generated, half of them greedily; loss {drafts['cross_entropy']:g} "
        f"cross-entropy + {drafts['distance']:g} L1 + {drafts['confidence']:g} confidence, decay {drafts['decay']:g}",
        f"- configuration {plan['config_sha256'][:16]}, corpus {plan['corpus']['sha256'][:16]}",
        f"- {machine['cores']} cores ({machine['processor']}); "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ])  # fmt: skip


def write_figures(folder: Path, plan: Mapping[str, Any], rows: Sequence[Row], gate: Gate) -> dict[str, str]:
    """Writes the figures. Returns file name -> what it shows."""
    figures: dict[str, tuple[str, Callable[[Mapping[str, Any], Sequence[Row]], Figure]]] = {
        "acceptance.png": ("Accepted drafts by position", draw_acceptance),
        "speed.png": ("Tokens per step and time per token by drafts verified", draw_speed),
        "calibration.png": ("Predicted and observed survival", draw_calibration),
    }
    stamp = None if gate.status == LEARNED else gate.status
    for name, (_, draw) in figures.items():
        with style():
            save_figure(folder / name, draw(plan, rows), stamp)
    return {name: caption for name, (caption, _) in figures.items()}


def draw_acceptance(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Share of blocks that survive up to a position: a panel per way of decoding, a line per kind of prompt."""
    drawn, block = Figure(figsize=(8, 3.4), layout="constrained"), block_of(plan)
    for ax, (temperature, how) in zip(drawn.subplots(1, 2, sharey=True), _HOW.items(), strict=True):
        for kind in (*KINDS, CONTROL):
            values = {"mode": CONTROL} if kind == CONTROL else {"mode": f"fixed {block}", "prompts_of": kind}
            found = chosen(rows, temperature=temperature, **values)
            share = total(found, "accepted") / np.maximum(total(found, "verified"), 1)
            label = f"{kind} draft layers" if kind == CONTROL else kind
            ax.plot(range(1, block + 1), 100 * share, color=_COLOURS.get(kind, GREY), marker="o", markersize=3.5,
                    linestyle="--" if kind == CONTROL else "-", label=label)  # fmt: skip
        ax.set(xlabel="draft", title=how, ylim=(0, 100), xticks=range(1, block + 1))
    drawn.axes[0].set_ylabel("accepted, with all before it (%)")
    drawn.axes[1].legend(frameon=False)
    return drawn


def draw_speed(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Tokens per step, and time per token against plain decoding, by drafts verified per step, all prompts."""
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for (temperature, how), colour in zip(_HOW.items(), (BLUE, ORANGE), strict=True):
        plain = _pace(chosen(rows, mode=PLAIN, temperature=temperature))
        points = []
        for name in mode_names(plan)[1:]:
            found = chosen(rows, mode=name, temperature=temperature)
            rounds = total(found, "rounds")
            verified, tokens = total(found, "verified").sum() / rounds, total(found, "tokens") / rounds
            points.append((verified, tokens, plain / _pace(found)))
        fixed, scheduled = points[: -len(SCHEDULED)], points[-len(SCHEDULED) :]
        for ax, place in ((left, 1), (right, 2)):
            ax.plot([p[0] for p in fixed], [p[place] for p in fixed], color=colour, marker="o", markersize=3.5,
                    label=f"{how}, fixed")  # fmt: skip
            for marker, name, point in zip("^*", SCHEDULED, scheduled, strict=True):
                ax.plot(point[0], point[place], marker, color=colour, markersize=8, zorder=3,
                        label=f"{how}, {name}")  # fmt: skip
    left.set(xlabel="drafts verified per step", ylabel="tokens per step", title="tokens per step", ylim=(1, None))
    right.set(xlabel="drafts verified per step", ylabel="speed against plain decoding", title="time", ylim=(0, None))
    right.axhline(1, color=GREY, linewidth=1)
    left.legend(frameon=False, fontsize=7.5)
    return drawn


def draw_calibration(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Predicted against observed survival, all positions, before and after scaling; areas follow counts."""
    del plan
    drawn = Figure(figsize=(8, 3.8), layout="constrained")
    for ax, (temperature, how) in zip(drawn.subplots(1, 2, sharey=True), _HOW.items(), strict=True):
        ax.plot([0, 1], [0, 1], color=GREY, linewidth=1)
        for name, colour in (("before", ORANGE), ("after", BLUE)):
            found = [r[name]["bins"] for r in rows if r["kind"] == "calibration" and r["temperature"] == temperature]
            count, predicted, observed = np.array([b for bins in found for b in bins]).T
            ax.scatter(predicted, observed, s=4 + 200 * count / count.sum(), color=colour, alpha=0.7, linewidths=0,
                       label=f"{name} scaling")  # fmt: skip
        ax.set(xlabel="predicted survival", title=how, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    drawn.axes[0].set_ylabel("observed")
    drawn.axes[0].legend(frameon=False)
    return drawn
