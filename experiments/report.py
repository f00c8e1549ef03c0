"""report.md of the compress-ratio study: the gate first, then what was measured and what it does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.gate import LEARNED, NOT_A_RESULT, Gate
from experiments.rows import EQUAL_SHARE, LARGE, MAIN, Row, Spread, by_schedule, spread

QUESTION = "What does each compress ratio cost in recall, and save in bytes?"
Columns = Mapping[str, tuple[str, float, int]]
# Column title -> (figure, factor, decimals). Shares are shown in percent.
TABLE = {
    "near %": ("near", 100, 1),
    "mid %": ("mid", 100, 1),
    "far %": ("far", 100, 1),
    "far, aligned %": ("aligned", 100, 1),
    "far, split %": ("split", 100, 1),
    "bits/byte": ("bits_per_byte", 1, 3),
    "KV B/token": ("kv_per_token", 1, 2),
    "fixed KV B": ("kv_fixed", 1, 0),
    "decode ms": ("decode_ms", 1, 2),
}
COURSE = {
    "top-k from step": ("switch_step", 1, 0),
    "solved at step": ("solved_at_step", 1, 0),
    "solved after s": ("solved_after_seconds", 1, 0),
    "training s": ("train_seconds", 1, 0),
    "tokens/s": ("tokens_per_second", 1, 0),
    "parameters": ("parameters", 1, 0),
    "decode ms, long": ("decode_long_ms", 1, 2),
}
INSIDE = {
    "coverage mean %": ("coverage_mean", 100, 1),
    "coverage max %": ("coverage_max", 100, 1),
    "all entries: far %": ("all_far", 100, 1),
    "global off: near %": ("off_near", 100, 1),
    "global off: far %": ("off_far", 100, 1),
    "global off: bits/byte": ("off_bits", 1, 3),
    "unrounded: far %": ("unrounded_far", 100, 1),
    "unrounded: bits/byte": ("unrounded_bits", 1, 3),
}


def render(
    plan: Mapping[str, Any], manifest: Mapping[str, Any], rows: Sequence[Row], gate: Gate, chance: float,
    figures: Mapping[str, str],
) -> str:
    """The whole report. plan, manifest: config.json and manifest.json of the run; figures: file name -> caption."""
    groups = {group: [row for row in rows if row["group"] == group] for group in (MAIN, EQUAL_SHARE, LARGE)}
    parts = [
        f"# compress-ratio: {gate.status}", f"*{QUESTION}*", _verdict(gate),
        *_table_section(groups[MAIN], plan, chance), *_spread_section(groups[MAIN]),
        *(f"![{caption}]({name})" for name, caption in figures.items()),
        *_inside_section(groups[MAIN]), *_equal_share_section(groups), *_large_section(groups[LARGE]),
        *_diverged_section(rows), _limits(plan), _making(plan, manifest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(gate: Gate) -> str:
    meaning = {
        LEARNED: "The gate passed: the numbers below may be read, with the limits at the end.",
        NOT_A_RESULT: "**not a result**: a run of a few steps that checks the machinery. Cite nothing below.",
    }.get(gate.status, "**not learned**: the models did not learn the task: nothing to compare. Cite nothing below.")
    lines = [f"- [{'x' if check.passed else ' '}] {check.sentence}" for check in gate.checks]
    return "\n".join([f"## Gate: {gate.status}", "", meaning, "", *lines])


def _table(rows: Sequence[Row], columns: Columns, names: Mapping[str, str] | None = None) -> str:
    """Medians over seeds, a line per schedule; a dash where a run lacks the figure; empty columns are left out."""
    grouped = by_schedule(rows)
    shown = {
        title: column for title, column in columns.items() if any(spread(runs, column[0]) for runs in grouped.values())
    }
    head = ["encoder,decoder", *shown]
    lines = [_line(head), _line(["---", *["---:"] * len(shown)])]
    for name, runs in grouped.items():
        values = [_number(spread(runs, key), factor, digits) for key, factor, digits in shown.values()]
        lines.append(_line([(names or {}).get(name, name), *values]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(found: Spread | None, factor: float, digits: int) -> str:
    return "-" if found is None else f"{factor * found.median:,.{digits}f}"


def _table_section(rows: Sequence[Row], plan: Mapping[str, Any], chance: float) -> list[str]:
    seeds = plan["seeds"]
    counts = "one seed" if len(seeds) == 1 else f"the median of {len(seeds)} seeds"
    text = (
        f"Each line is {counts}. Near: the pair lies inside the window; mid: up to two windows; far: beyond what "
        f"stacked windows can relay; chance is {chance:.1%}. Aligned: the far pair lies in one group of two tokens; "
        "split: across two. Recall and bits per byte are measured on keys and values rounded as the caches store them. "
        "KV bytes are sizes of arrays: the global part per token, and the fixed part (window rings, compressor state) "
        "per sequence."
    )
    solved = (
        "Solved: the first probe with near and far recall of 95 % or more; a dash where at least one seed never got "
        "there. Seconds are of optimiser steps alone, without compilation. Top-k from step: until then training "
        "attends all entries; a dash where a seed never changed over: its model first meets top-k in evaluation."
    )
    text += _answers(rows)
    return ["## Cost and saving", _in_short(rows), text, _table(rows, TABLE), solved, _table(rows, COURSE)]


def _answers(rows: Sequence[Row]) -> str:
    """On how many answers the shares of one model rest; all models are asked the same."""
    buckets = next((row["recall"]["by_bucket"] for row in rows if "recall" in row), {})
    counts = ", ".join(f"{name} {share['asked']:,}" for name, share in buckets.items() if name != "relay")
    return f" Answers asked of each model: {counts}." if counts else ""


def _in_short(rows: Sequence[Row]) -> str:
    """One line per schedule against (1,1), the schedule that pools nothing; empty without it."""
    grouped = by_schedule(rows)
    base = grouped.get("(1,1)")
    if not base or spread(base, "far") is None:
        return ""
    bits, far, size = (spread(base, name).median for name in ("bits_per_byte", "far", "kv_per_token"))
    lines = []
    for name, runs in grouped.items():
        if name in ("window only", "(1,1)") or spread(runs, "far") is None:
            continue
        now = {key: spread(runs, key).median for key in ("bits_per_byte", "far", "kv_per_token")}
        lines.append(
            f"- {name} stores {now['kv_per_token'] / size:.0%} of the global bytes of (1,1); far recall "
            f"{100 * (now['far'] - far):+.1f} points, bits per byte {now['bits_per_byte'] - bits:+.3f}."
        )
    return "\n".join(lines)


def _spread_section(rows: Sequence[Row]) -> list[str]:
    grouped = by_schedule(rows)
    if max((len(runs) for runs in grouped.values()), default=0) < 2:
        return ["## Spread\n\nOne seed: nothing is known of the spread, and differences of a few points may be luck."]
    titles = ("near %", "far %", "far, aligned %", "far, split %", "bits/byte", "decode ms")
    columns = {title: TABLE[title] for title in titles}
    lines = [_line(["encoder,decoder", *columns, "far % by seed"]), _line(["---", *["---:"] * (len(columns) + 1)])]
    for name, runs in grouped.items():
        ranges = [_range(spread(runs, key), factor, digits) for key, factor, digits in columns.values()]
        far = spread(runs, "far")
        each = "-" if far is None else ", ".join(f"{100 * value:.1f}" for value in far.values)
        lines.append(_line([name, *ranges, each]))
    return ["## Spread over seeds (least to greatest)", "\n".join(lines)]


def _range(found: Spread | None, factor: float, digits: int) -> str:
    return "-" if found is None else f"{factor * found.low:.{digits}f} to {factor * found.high:.{digits}f}"


def _inside_section(rows: Sequence[Row]) -> list[str]:
    text = (
        "Coverage: the share of a layer's global attention that the selected entries hold when all entries are "
        "attended; mean and maximum over layers, since one layer may carry the task. All entries: far recall in that "
        "mode, which tells the cost of pooling from that of selecting. Global off: the same weights with the global "
        "branch switched off; near recall falls too, because a model that has the branch does not leave near pairs to "
        "its window. Unrounded: keys and values in float32 instead of the cached formats."
    )
    return ["## Inside the models", text, _table([row for row in rows if row["encoder"] is not None], INSIDE)]


def _equal_share_section(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    rows = groups[EQUAL_SHARE]
    if not rows:
        return []
    text = (
        "At a fixed top-k a larger ratio also selects a larger share of the entries. Here k falls with the ratio, so "
        "that the share is that of (1,1). Not part of the matched comparison: these models differ in two things. One "
        "seed."
    )
    names = {name: f"{name}, k / {runs[0]['encoder']}" for name, runs in by_schedule(rows).items()}
    return ["## Equal selected share", text, _table(rows, TABLE, names)]


def _large_section(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    text = "Context 256, window 32, six layers, one seed: whether the order of the schedules survives a step in size."
    text += _answers(rows)
    return ["## Larger configuration", text, _table(rows, TABLE), _table(rows, COURSE), _table(
        [row for row in rows if row["encoder"] is not None], INSIDE
    )]


def _diverged_section(rows: Sequence[Row]) -> list[str]:
    lost = [f"- {row['group']}, {row['encoder']},{row['decoder']}, seed {row['seed']}: {row['diverged']}"
            for row in rows if "diverged" in row]
    return ["## Diverged\n\n" + "\n".join(lost)] if lost else []


def _limits(plan: Mapping[str, Any]) -> str:
    context = plan["settings"][MAIN]["context"]
    topk = _main_config(plan)["index_topk"]
    return "\n".join([
        "## What this does not show", "",
        "- Nothing about the released model: these have well under two million parameters, contexts of a few hundred "
        "tokens, and minutes of training on synthetic recall and local text.",
        f"- The ratio alone: with a context of {context} and m = 4 there are {context // 4} entries, of which the "
        f"top-k of {topk} takes {4 * topk / context:.0%} at the end of a row, against {topk / context:.0%} at m = 1. "
        "Ratio and selection strength move together unless k falls with the ratio.",
        f"- What longer training would give: all models stop after {plan['settings'][MAIN]['steps']} steps. A schedule "
        "that forms recall later has had fewer steps with top-k selection, or none.",
        "- Alignment to groups of four: aligned and split are told apart for groups of two. At m = 4 an aligned pair "
        "still lies in one group, but so do half of the split ones.",
        "- The published model's ability to bind neighbouring tokens: a learned token shift at the embedding, which is "
        "not part of it, is what lets these models learn pairs that are split across groups.",
        "- Harder recall: eight pairs per row among 32 keys. Schedules that are equal here may differ with more pairs.",
        "- Speed of anything but this implementation on this machine at batch 1; decode times at this size are mostly "
        "the cost of calling a step, and the machine's other work is in them.",
    ])


def _main_config(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration of the main group; they differ in their compress ratios only."""
    return plan["configs"][next(cell["config_sha256"] for cell in plan["cells"] if cell["group"] == MAIN)]


def _making(plan: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    settings, machine, versions = plan["settings"][MAIN], manifest["machine"], manifest["versions"]
    sessions, corpus = manifest["sessions"], manifest["corpus"]
    git = sessions[-1]["git"]
    commit = "no checkout" if git is None else git["commit"][:12] + (" with local changes" if git["modified"] else "")
    option = {"quick": " --quick", "full": " --full"}.get(plan["mode"], "")
    rounding = "rounded as cached" if _main_config(plan)["qat"] else "not rounded"
    tokens = settings["steps"] * settings["rows"] * settings["context"]
    return "\n".join([
        "## How it was made", "",
        f"- `dsflash run compress-ratio{option}`, started {sessions[0]['started']}, {len(sessions)} session(s), "
        f"commit {commit}",
        f"- {settings['steps']} steps of {settings['rows']} rows x {settings['context']} tokens ({tokens:,} tokens per "
        f"model), learning rate {settings['learning_rate']:g}, keys and values {rounding} in training, seeds "
        f"{', '.join(map(str, plan['seeds']))}",
        f"- training rows: {settings['recall']:.0%} recall at all distances, {settings['near']:.0%} recall inside the "
        f"window only, the rest text; top-k once the averaged answer loss is below {settings['dense_until']:g}",
        f"- corpus {corpus['sha256'][:16]} (Python {corpus['python']}), {corpus['train_tokens']:,} training and "
        f"{corpus['held_out_tokens']:,} held-out tokens",
        f"- {machine['cores']} cores ({machine['processor']}), {machine['jax_devices']} JAX devices; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "- `config.json` holds every configuration with its hash, `result.json` every raw row.",
    ])
