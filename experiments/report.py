"""report.md of the compress-ratio study: the gate first, then what was measured and what it does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsflash_jax.training.vocabulary import KEY_TOKENS
from experiments.gate import LEARNED, NOT_A_RESULT, Gate, control_learned
from experiments.registry import STUDIES
from experiments.rows import (
    BASE,
    DAGGER,
    EQUAL_SHARE,
    LARGE,
    MAIN,
    Row,
    by_schedule,
    compared,
    differences,
    figure,
    informed_guess,
    label,
    measured,
    never_switched,
    pooled,
    sequence_bytes,
    spread,
)
from experiments.tables import COURSE, INSIDE, RECALL, cost_columns, interval, line, median_of, points, table

QUESTION = STUDIES["compress-ratio"].question


def render(
    plan: Mapping[str, Any], manifest: Mapping[str, Any], rows: Sequence[Row], gate: Gate, chance: float,
    figures: Mapping[str, str],
) -> str:
    """The whole report. plan, manifest: config.json and manifest.json of the run; figures: file name -> caption."""
    groups = {group: [row for row in rows if row["group"] == group] for group in (MAIN, EQUAL_SHARE, LARGE)}
    parts = [
        f"# compress-ratio: {gate.status}", f"*{QUESTION}*", _verdict(gate),
        *_main_section(groups[MAIN], plan, chance), *_spread_section(groups[MAIN]),
        *(f"![{caption}]({name})" for name, caption in figures.items()),
        *_inside_section(groups[MAIN]), *_equal_share_section(groups), *_large_section(groups[LARGE], plan),
        *_diverged_section(rows), _limits(plan, groups[MAIN], rows), _making(plan, manifest, rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(gate: Gate) -> str:
    meaning = {
        LEARNED: "The gate passed: the numbers below may be read, with the limits at the end.",
        NOT_A_RESULT: "**not a result**: a run of a few steps that checks the machinery. Cite nothing below.",
    }.get(gate.status, "**not learned**: the models did not learn the task: nothing to compare. Cite nothing below.")
    lines = [f"- [{'x' if check.passed else ' '}] {check.sentence}" for check in gate.checks]
    return "\n".join([f"## Gate: {gate.status}", "", meaning, "", *lines])


def _main_section(rows: Sequence[Row], plan: Mapping[str, Any], chance: float) -> list[str]:
    seeds = plan["seeds"]
    counts = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    about_recall = (
        f"Each line is {counts}: shares over the answers of all of them, in brackets the 95 % interval (Wilson); other "
        "figures are medians. Near: the pair lies inside the window; mid: up to two windows; relay: as far as stacked "
        "windows can carry it; far: beyond. Aligned: the far pair lies in one group of two tokens; split: across two. "
        "All entries: the same models when every entry is attended, which tells the cost of pooling from that of "
        "selecting. Recall and bits per byte are measured on keys and values rounded as the caches store them."
    )
    about_bytes = (
        "Bytes are sizes of allocated arrays. The part per token is the slope; a whole sequence adds the fixed part "
        "(window rings, compressor state), which grows with the ratio: the slope decides at long contexts only. "
        "Decode: median of one call at batch 1, with its 10th and 90th percentile over all seeds."
    )
    return [
        "## Cost and saving", in_short(rows), about_recall + guesses(rows, chance) + _answers(rows),
        table(rows, RECALL), dagger_note(rows), about_bytes, table(rows, cost_columns(rows)), _about_course(plan, MAIN),
        table(rows, COURSE),
    ]


def _about_course(plan: Mapping[str, Any], group: str) -> str:
    effort, settings = plan["effort"][group], plan["settings"][group]
    return (
        "Top-k from step, seed by seed: until then training attends all entries; it changes over once the averaged "
        f"answer loss is below {settings['dense_until']:g}. Solved: the first probe with near and far recall of 95 % "
        f"or more; a probe is a small evaluation ({effort['probe_rows']} rows as trained, a few dozen far answers) "
        f"every {effort['probe_every']} steps; a dash where at least one seed never got there. Seconds are of "
        "optimiser steps alone, without compilation."
    )


def guesses(rows: Sequence[Row], chance: float) -> str:
    """What guessing reaches, as a sentence: evenly among all values, and among those that the row has shown."""
    informed = informed_guess(rows, "far")
    text = f" A guess among all values is right in {points(100 * chance)} % of the far pairs"
    if informed is not None:
        text += f", one among the values that the row has shown so far in {points(100 * informed)} %"
    return text + "."


def _answers(rows: Sequence[Row]) -> str:
    """On how many answers the shares of one model rest; all models are asked the same."""
    buckets = next((row["recall"]["by_bucket"] for row in rows if measured(row)), {})
    counts = ", ".join(f"{name} {share['asked']:,}" for name, share in buckets.items())
    return f" Answers asked of each model: {counts}." if counts else ""


def in_short(rows: Sequence[Row]) -> str:
    """One line per schedule against (1,1), the schedule that pools nothing; empty without it."""
    grouped = by_schedule(rows)
    base = grouped.get(BASE)
    if not base or spread(base, "far") is None:
        return ""
    lines = [
        f"- {_against(name, runs, base)}" for name, runs in grouped.items()
        if label(runs[0]) not in ("window only", BASE) and spread(runs, "far") is not None
    ]
    if not lines:
        return ""
    head = (
        f"Against {BASE}, which pools nothing. Differences are paired: all models answer the same questions. In "
        "brackets the 95 % interval over the questions with these models, and the difference in each seed, since "
        "trainings differ too."
    )
    return "\n".join([head, "", *lines])


def _against(name: str, runs: Sequence[Row], base: Sequence[Row]) -> str:
    sizes = ", ".join(
        f"{mine / other:.0%} of all bytes at {tokens} tokens"
        for (tokens, mine), (_, other) in zip(sequence_bytes(runs[0]), sequence_bytes(base[0]), strict=True)
    )
    slope = figure(runs[0], "kv_per_token") / figure(base[0], "kv_per_token")
    far, bits = _difference(runs, base, "far", 100, 1), _difference(runs, base, "bits_per_byte", 1, 3)
    marked = ""
    if seeds := never_switched(runs):
        marked = f" {DAGGER} Not trained under top-k in {_seeds(seeds)}: see below the table."
    return (
        f"{name} stores {slope:.0%} of the global bytes of {BASE} per token ({sizes}); far recall {far[0]} points "
        f"{far[1]}, bits per byte {bits[0]} {bits[1]}.{marked}"
    )


def _difference(runs: Sequence[Row], base: Sequence[Row], name: str, factor: float, digits: int) -> tuple[str, str]:
    """(the difference, its interval and its values by seed in brackets), signed."""
    found, each = compared(runs, base, name), differences(runs, base, name)
    value = found.value if found else sum(each) / len(each)
    known = [] if found is None else [
        f"95 %: {factor * found.low:+.{digits}f} to {factor * found.high:+.{digits}f}"
    ]
    if len(each) > 1:
        known.append("by seed " + ", ".join(f"{factor * one:+.{digits}f}" for one in each))
    return f"{factor * value:+.{digits}f}", f"({'; '.join(known) or 'one seed, no interval'})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def dagger_note(rows: Sequence[Row]) -> str:
    """What the dagger means, with what all-entries recall says of the schedules that carry it; empty without any."""
    lines = []
    for name, runs in by_schedule(rows).items():
        if not (seeds := never_switched(runs)):
            continue
        apart = [row for row in runs if row["seed"] in seeds]
        far, every = pooled(apart, "far"), pooled(apart, "all_far")
        told = f"Far recall under top-k is {interval(far)} %; with all entries attended it was not measured."
        if every is not None:
            told = (
                f"Far recall with all entries attended is {interval(every)} %, against {interval(far)} % under top-k: "
                "what is missing with all entries is lost by pooling or by too short a training, not by selecting."
            )
        lines.append(
            f"{DAGGER} {name}, {_seeds(seeds)}: trained on all entries to the last step, top-k only in evaluation. "
            + told
        )
    return "\n\n".join(lines)


def _spread_section(rows: Sequence[Row]) -> list[str]:
    grouped = by_schedule(rows)
    if max((len(runs) for runs in grouped.values()), default=0) < 2:
        return ["## Spread\n\nOne seed: nothing is known of the spread, and differences of a few points may be luck."]
    columns = {"near %": ("near", 100, 1), "far %": ("far", 100, 1), "bits/byte": ("bits_per_byte", 1, 3)}
    lines = [line(["encoder,decoder", *columns, "far % by seed", "bits/byte by seed"])]
    lines.append(line(["---", *["---:"] * (len(columns) + 2)]))
    for name, runs in grouped.items():
        ranges = [_range(runs, *column) for column in columns.values()]
        lines.append(line([name, *ranges, *(_each(runs, *columns[title]) for title in ("far %", "bits/byte"))]))
    return ["## Spread over seeds (least to greatest)", "\n".join(lines)]


def _range(runs: Sequence[Row], name: str, factor: float, digits: int) -> str:
    found = spread(runs, name)
    return "-" if found is None else f"{factor * found.low:.{digits}f} to {factor * found.high:.{digits}f}"


def _each(runs: Sequence[Row], name: str, factor: float, digits: int) -> str:
    found = spread(runs, name)
    return "-" if found is None else ", ".join(f"{factor * value:.{digits}f}" for value in found.values)


def _inside_section(rows: Sequence[Row]) -> list[str]:
    text = (
        "Coverage: the share of a layer's global attention that the selected entries hold when all entries are "
        "attended; mean and maximum over layers, since one layer may carry the task. Global off: the same weights with "
        "the global branch switched off; near recall falls too, because a model that has the branch does not leave "
        "near pairs to its window. Unrounded: keys and values in float32 instead of the cached formats."
    )
    return ["## Inside the models", text, table([row for row in rows if row["encoder"] is not None], INSIDE)]


def _equal_share_section(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    rows = groups[EQUAL_SHARE]
    if not rows:
        return []
    text = (
        "At a fixed top-k a larger ratio also selects a larger share of the entries. Here k falls with the ratio, so "
        "that the share is that of (1,1). Not part of the matched comparison: these models differ in two things. One "
        "seed: compare with the same seed of the matched models."
    )
    names = {name: f"{name}, k / {runs[0]['encoder']}" for name, runs in by_schedule(rows).items()}
    course = {"top-k from step": COURSE["top-k from step"]}
    return ["## Equal selected share", text, table(rows, course | RECALL, names), dagger_note(rows)]


def _large_section(rows: Sequence[Row], plan: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    learned = control_learned(rows)
    text = f"{size_of(plan, LARGE).capitalize()}, one seed: does the order of the schedules survive a step in size? "
    text += "" if learned.passed else f"**Not to be cited**: its control fails the gate. {learned.sentence} "
    return [
        "## Larger configuration", text + _answers(rows).strip(), table(rows, RECALL), dagger_note(rows),
        table(rows, cost_columns(rows)), _about_course(plan, LARGE), table(rows, COURSE),
        table([row for row in rows if row["encoder"] is not None], INSIDE),
    ]


def size_of(plan: Mapping[str, Any], group: str) -> str:
    """Context, window and layers of a group's models in words."""
    cfg = config_of(plan, group)
    context = plan["settings"][group]["context"]
    return f"context {context}, window {cfg['sliding_window']}, {cfg['num_hidden_layers']} layers"


def _diverged_section(rows: Sequence[Row]) -> list[str]:
    lost = [f"- {row['group']}, {row['encoder']},{row['decoder']}, seed {row['seed']}: {row['diverged']}"
            for row in rows if "diverged" in row]
    return ["## Diverged\n\n" + "\n".join(lost)] if lost else []


def _limits(plan: Mapping[str, Any], rows: Sequence[Row], every_row: Sequence[Row]) -> str:
    context, steps, pairs = (plan["settings"][MAIN][name] for name in ("context", "steps", "pairs"))
    most = max((row["parameters"] for row in every_row if measured(row)), default=0)
    topk = config_of(plan, MAIN)["index_topk"]
    return "\n".join([
        "## What this does not show", "",
        f"- Nothing about the released model: these have at most {most:,} parameters, contexts of a few hundred "
        "tokens, and minutes of training on synthetic recall and local text.",
        f"- The ratio alone: with a context of {context} and m = 4 there are {context // 4} entries, of which the "
        f"top-k of {topk} takes {4 * topk / context:.0%} at the end of a row, against {topk / context:.0%} at m = 1. "
        "Ratio and selection strength move together unless k falls with the ratio.",
        f"- What longer training would give: all models stop after {steps} steps. A schedule that forms recall later "
        f"has had fewer steps with top-k selection, or none ({DAGGER}).",
        "- A saving at short contexts: the bytes per token are a slope. The fixed part of a sequence grows with the "
        "ratio and outweighs it there; the table gives both.",
        f"- Models of one size: a compressor has parameters of its own ({_parameters(rows)}).",
        "- Alignment to groups of four: aligned and split are told apart for groups of two. At m = 4 an aligned pair "
        "still lies in one group, but so do half of the split ones.",
        "- The published model's ability to bind neighbouring tokens: a learned token shift at the embedding, which is "
        "not part of it, is what lets these models learn pairs that are split across groups.",
        f"- Harder recall: {pairs} pairs per row among {KEY_TOKENS} keys. Schedules that are equal here may differ "
        "with more pairs.",
        "- A blind choice of settings: the steps were raised until window only passed the gate with every seed "
        "(`docs/decisions.md`), for all schedules alike.",
        "- Speed of anything but this implementation on this machine at batch 1; decode times at this size are mostly "
        "the cost of calling a step, and the machine's other work is in them.",
    ])


def _parameters(rows: Sequence[Row]) -> str:
    counts = {name: median_of(runs, "parameters") for name, runs in by_schedule(rows).items()}
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def config_of(plan: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """A configuration of a group; they differ in their compress ratios only."""
    return plan["configs"][next(cell["config_sha256"] for cell in plan["cells"] if cell["group"] == group)]


def _making(plan: Mapping[str, Any], manifest: Mapping[str, Any], rows: Sequence[Row]) -> str:
    settings, machine, versions = plan["settings"][MAIN], manifest["machine"], manifest["versions"]
    corpus = manifest["corpus"]
    option = {"quick": " --quick", "full": " --full"}.get(plan["mode"], "")
    rounding = "rounded as cached" if config_of(plan, MAIN)["qat"] else "not rounded"
    tokens = settings["steps"] * settings["rows"] * settings["context"]
    return "\n".join([
        "## How it was made", "",
        f"- `dsflash run compress-ratio{option}`",
        *(f"  - {session_line(session)}" for session in manifest["sessions"]),
        f"- {_times(rows)}",
        f"- {settings['steps']} steps of {settings['rows']} rows x {settings['context']} tokens ({tokens:,} tokens per "
        f"model), learning rate {settings['learning_rate']:g}, keys and values {rounding} in training, seeds "
        f"{', '.join(map(str, plan['seeds']))}",
        f"- training rows: {settings['recall']:.0%} recall at all distances, {settings['near']:.0%} recall inside the "
        f"window only, the rest text; top-k once the averaged answer loss is below {settings['dense_until']:g}",
        *_evaluation(rows),
        f"- corpus {corpus['sha256'][:16]} (Python {corpus['python']}), {corpus['train_tokens']:,} training and "
        f"{corpus['held_out_tokens']:,} held-out tokens",
        f"- {machine['cores']} cores ({machine['processor']}), {machine['jax_devices']} JAX devices; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "- `config.json` holds every configuration with its hash, `result.json` every raw row.",
    ])


def session_line(session: Mapping[str, Any]) -> str:
    """When a session that worked on a run started, how long it took, how it ended, and from which commit."""
    git, seconds, finished = session["git"], session.get("elapsed_seconds"), session.get("finished")
    commit = "no checkout" if git is None else git["commit"][:12] + (" with local changes" if git["modified"] else "")
    took = "time not recorded" if seconds is None else f"{points(seconds / 60)} minutes"
    ended = f"finished the run {finished}" if finished else "did not finish the run"
    return f"started {session['started']}, {took}, {ended}, commit {commit}"


def _times(rows: Sequence[Row]) -> str:
    done = [row for row in rows if measured(row)]
    training, compiling = (sum(row[name] for row in done) / 60 for name in ("train_seconds", "compile_seconds"))
    return (
        f"{len(done)} models: {points(training)} minutes of optimiser steps and {points(compiling)} of compiling them; "
        "the rest of a session is evaluation"
    )


def _evaluation(rows: Sequence[Row]) -> list[str]:
    found = next((row["evaluation"] for row in rows if "evaluation" in row), None)
    return [] if found is None else [
        f"- questions, the same for every model: {found['recall_rows']} held-out recall rows as trained, and "
        f"{found['resting_rows']} in which a pair rests for more than two windows after "
        f"{found['resting_patience']:.0%} of its occurrences, for more far answers; bits per byte on "
        f"{found['text_rows']} rows of held-out text"
    ]
