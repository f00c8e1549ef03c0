"""report.md and figures of the decoder-replay study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.drawing import BLACK, BLUE, GREY, ORANGE, save_figure, style
from experiments.gate import LEARNED, NOT_A_RESULT, Gate
from experiments.registry import STUDIES
from experiments.replay_measures import TRUNCATED
from experiments.report import session_line
from experiments.tables import markdown

Row = Mapping[str, Any]
QUESTION = STUDIES["decoder-replay"].question
_COLOURS = {"all": BLACK, "exact": BLUE, "replay": ORANGE, TRUNCATED: GREY}


def render(
    plan: Mapping[str, Any], manifest: Mapping[str, Any], rows: Sequence[Row], gate: Gate, names: Mapping[str, str]
) -> str:
    """The whole report. plan, manifest: config.json and manifest.json of the run; names: figure file -> caption."""
    meaning = {
        LEARNED: "The gate passed: the numbers below may be read, with the limits at the end.",
        NOT_A_RESULT: "**not a result**: a run of a few steps that checks the machinery. Cite nothing below.",
    }.get(gate.status, "**not learned**: the models did not learn the task. Cite nothing below.")
    checks = [f"- [{'x' if check.passed else ' '}] {check.sentence}" for check in gate.checks]
    agreement = [row for row in rows if row["kind"] == "agreement"]
    parts = [
        f"# decoder-replay: {gate.status}", f"*{QUESTION}*",
        "\n".join([f"## Gate: {gate.status}", "", meaning, "", *checks]),
        *_agreement_section(plan, agreement), *_time_section(rows),
        *(f"![{caption}]({name})" for name, caption in names.items()), _limits(plan), _making(plan, manifest),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _agreement_section(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    window, decoder = plan["config"]["sliding_window"], plan["decoder_rows"]
    text = (
        f"Every prompt is the start of a held-out row; {plan['effort']['follow']} more tokens are decoded behind it, "
        "given, not sampled. The reference runs every layer on every token. *exact* runs the decoder layers on "
        f"{', '.join(map(str, decoder['exact']))} rows, *replay* on {', '.join(map(str, decoder['replay']))}; "
        f"*truncated*, the control, sees the last {window} tokens of the prompt and nothing before. KL(reference || "
        "mode) in nats, behind the prompt and behind the tokens decoded next."
    )
    measures = {"KL mean": _mean, "KL max": _greatest, "same best token %": _same}
    columns = [(part, name) for part in ("prompt", "decoded") for name in measures]
    lines = []
    for mode in ("exact", "replay", TRUNCATED):
        for length in plan["effort"]["lengths"]:
            found = [row for row in rows if row["mode"] == mode and row["length"] == length]
            lines.append([mode, str(length), *(measures[name](found, part) for part, name in columns)])
    distances = ("near", "mid", "relay", "far")
    modes = ("all", "exact", "replay", TRUNCATED)
    recalls = [[mode, *(_recall(rows, mode, name) for name in distances)] for mode in modes]
    return [
        "## What changes", text,
        markdown(["mode", "prompt tokens", *(f"{part}: {name}" for part, name in columns)], lines),
        "Recall by distance in percent, over all prompt lengths and decoded tokens (answers asked in brackets):",
        markdown(["mode", *distances], recalls),
    ]  # fmt: skip


def _positions(rows: Sequence[Row], part: str) -> int:
    return sum(row[part]["positions"] for row in rows)


def _mean(rows: Sequence[Row], part: str) -> str:
    return f"{sum(row[part]['kl_mean'] * row[part]['positions'] for row in rows) / _positions(rows, part):.2g}"


def _greatest(rows: Sequence[Row], part: str) -> str:
    return f"{max(row[part]['kl_max'] for row in rows):.2g}"


def _same(rows: Sequence[Row], part: str) -> str:
    return f"{100 * sum(row[part]['same_best'] for row in rows) / _positions(rows, part):.2f}"


def _recall(rows: Sequence[Row], mode: str, distance: str) -> str:
    shares = [row["recall"][distance] for row in rows if row["mode"] == mode]
    asked = sum(share["asked"] for share in shares)
    return f"{100 * sum(share['correct'] for share in shares) / asked:.1f} ({asked:,})" if asked else "-"


def _time_section(rows: Sequence[Row]) -> list[str]:
    timed = [row for row in rows if row["kind"] == "time"]
    base = {(row["model"], row["tokens"]): row for row in timed if row["mode"] == "all"}
    lines = []
    for row in timed:
        whole = base[row["model"], row["tokens"]]
        lines.append([
            row["model"], f"{row['tokens']:,}", row["mode"], f"{row['token_layers']:,}",
            f"{row['token_layers'] / whole['token_layers']:.3f}", f"{1e3 * row['best_s']:.1f}",
            f"{1e3 * row['median_s']:.1f}", f"{whole['best_s'] / row['best_s']:.2f}x", f"{row['first_call_s']:.1f}",
        ])  # fmt: skip
    head = ["model", "prompt tokens", "mode", "token-layers", "of all", "best ms", "median ms", "speed-up",
            "first call s"]  # fmt: skip
    text = (
        "A cold prefill of one prompt, logits of its last token. Token-layers: layers times the tokens that each runs. "
        "The modes take turns; the speed-up is of the best calls, which other work on the machine disturbs least. The "
        "first call compiles. bench_base is the shape of `dsflash bench`, untrained: weights "
        "do not change the time."
    )
    return ["## What it saves", text, markdown(head, lines)]


def _limits(plan: Mapping[str, Any]) -> str:
    depth = len(plan["decoder_rows"]["replay"])
    return "\n".join([
        "## What this does not show", "",
        f"- Nothing about the released model: here the decoder has {depth} layers, there 20, so that a replayed window "
        "misses more there.",
        "- Training with replay: the published model was post-trained with it, these models were not.",
        "- Encoder replay after a prefix hit, which changes entries that are kept: only the decoder is replayed here.",
        "- Prompts longer than the training context: the rows are as long as those trained on.",
    ])  # fmt: skip


def _making(plan: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    machine, versions = manifest["machine"], manifest["versions"]
    return "\n".join([
        "## How it was made", "",
        f"- `dsflash run decoder-replay`, mode {plan['mode']}, seeds {', '.join(map(str, manifest['seeds']))}, "
        f"{plan['effort']['training']['steps']} steps of training",
        *(f"  - {session_line(session)}" for session in manifest["sessions"]),
        f"- configuration {plan['config_sha256'][:16]}, corpus {plan['corpus']['sha256'][:16]}",
        f"- {machine['cores']} cores ({machine['processor']}); "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ])  # fmt: skip


def write_figures(folder: Path, rows: Sequence[Row], gate: Gate) -> dict[str, str]:
    """Writes both figures. Returns file name -> what it shows."""
    figures: dict[str, tuple[str, Callable[[Sequence[Row]], Figure]]] = {
        "kl_by_length.png": ("Distance from the full pass by prompt length", draw_kl),
        "prefill_time.png": ("Prefill time by prompt length", draw_time),
    }
    stamp = None if gate.status == LEARNED else gate.status
    for name, (_, draw) in figures.items():
        with style():
            save_figure(folder / name, draw(rows), stamp)
    return {name: caption for name, (caption, _) in figures.items()}


def draw_kl(rows: Sequence[Row]) -> Figure:
    """Mean KL behind the prompt and behind decoded tokens, a line per mode, a thin one per seed."""
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    found = [row for row in rows if row["kind"] == "agreement" and row["mode"] != "all"]
    titles = {"prompt": "behind the prompt", "decoded": "behind decoded tokens"}
    for ax, (part, title) in zip(axes, titles.items(), strict=True):
        for mode in (TRUNCATED, "replay", "exact"):
            for seed in sorted({row["seed"] for row in found}):
                mine = sorted((r["length"], max(r[part]["kl_mean"], 1e-9)) for r in found
                              if r["mode"] == mode and r["seed"] == seed)  # fmt: skip
                ax.plot(*zip(*mine, strict=True), color=_COLOURS[mode], marker="o", markersize=3.5, linewidth=1.4,
                        label=mode if seed == found[0]["seed"] else None)  # fmt: skip
        ax.set(yscale="log", xlabel="prompt (tokens)", title=title)
    axes[0].set_ylabel("KL from the full pass (nats, mean, 1e-9 at least)")
    axes[1].legend(frameon=False)
    return drawn


def draw_time(rows: Sequence[Row]) -> Figure:
    """Best seconds of a prefill by prompt length, a panel per model."""
    timed = [row for row in rows if row["kind"] == "time"]
    models = list(dict.fromkeys(row["model"] for row in timed))
    drawn = Figure(figsize=(4 * max(len(models), 1), 3.4), layout="constrained")
    for ax, model in zip(drawn.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for mode in ("all", "exact", "replay"):
            mine = [(r["tokens"], 1e3 * r["best_s"]) for r in timed if (r["model"], r["mode"]) == (model, mode)]
            ax.plot(*zip(*mine, strict=True), color=_COLOURS[mode], marker="o", markersize=3.5, label=mode)
        ax.set(xlabel="prompt (tokens)", ylabel="prefill (ms, best)", title=model, ylim=(0, None))
        ax.legend(frameon=False)
    return drawn
