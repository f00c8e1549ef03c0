"""How many drafts does a small trained model accept, do its confidences come true, and when does it pay?

A lab model is trained as in the decoder-replay study, without draft layers. Draft layers are then trained behind it,
which leaves it as it is, and generate with it: a fixed number of drafts per step, or as many as the confidences make
worth their measured cost. Untrained draft layers and plain decoding are the controls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from dsflash_jax.config import ModelConfig
from dsflash_jax.sampling import Sampling
from dsflash_jax.shipped import config_path
from dsflash_jax.speculative import CostTable
from dsflash_jax.training.calibration import fit_temperatures
from dsflash_jax.training.corpus import Corpus, python_corpus
from dsflash_jax.training.drafts import train_drafts, with_draft_layers
from dsflash_jax.training.loop import run_to_end, train
from dsflash_jax.training.settings import DraftSettings, TrainSettings
from dsflash_jax.training.vocabulary import DRAFT_NOISE
from experiments import speculation_report
from experiments.artifacts import read_json, write_text
from experiments.gate import LEARNED, NOT_A_RESULT, NOT_LEARNED, Check, Gate
from experiments.progress import Progress, training_report
from experiments.seeds import Parts, Rows, run_seeds
from experiments.speculation_measures import (
    CONTROL,
    FITTED,
    KINDS,
    MEASURED,
    PLAIN,
    Decoder,
    Mode,
    Prompt,
    Trace,
    calibration,
    held_out_prompts,
    rounds_of,
    summary,
)

STUDY = "speculation"
NOT_IDENTICAL = "not identical"
BLOCK = 5  # drafts, as released
TEMPERATURES = (0.0, 1.0)
ANSWERED_AT_LEAST = 0.95  # of recall prompts, by the backbone: one that has not learned its task is easy to draft for
FIRST_AT_LEAST = 0.20  # accepted first drafts more than the control's, of all prompts
CONTROL_AT_MOST = 0.05


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much runs.

    prompts: per kind; fitted: per kind, of another draw, on which temperatures are fitted. length: of a prompt at most;
    new: tokens generated behind each. fixed: numbers of drafts that are verified whatever the confidence, the last one
    a whole block; profiled: timings of each.
    """

    seeds: tuple[int, ...]
    training: TrainSettings
    drafts: DraftSettings
    prompts: int = 16
    fitted: int = 48
    length: int = 64
    new: int = 48
    fixed: tuple[int, ...] = tuple(range(BLOCK + 1))
    profiled: int = 7


# Rows of all kinds that prompts come from, which the backbone continues: its own recipe can stay as it is.
ROWS = TrainSettings(steps=500, learning_rate=3e-3, recall=0.25, near=0.125, needle=0.125, copy=0.125)
BUDGETS: Mapping[str, Budget] = MappingProxyType({
    "quick": Budget((0,), TrainSettings(steps=5), DraftSettings(ROWS.replace(steps=5), pool=8, continued=0),
                    prompts=1, fitted=1, new=12, fixed=(0, BLOCK), profiled=1),
    "default": Budget((0,), TrainSettings(), DraftSettings(ROWS)),
    "full": Budget((0, 1, 2), TrainSettings(steps=800), DraftSettings(ROWS.replace(steps=1000), pool=1024), prompts=24,
                   fitted=96),
})  # fmt: skip


def with_drafts(base: ModelConfig) -> ModelConfig:
    """`base` with draft layers as the released model has them, in laboratory size: they read the last three layers."""
    last = base.num_hidden_layers
    return base.replace(
        num_nextn_predict_layers=2, dspark_block_size=BLOCK, dspark_target_layer_ids=tuple(range(last - 3, last)),
        dspark_markov_rank=16, dspark_noise_token_id=DRAFT_NOISE, dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
    )  # fmt: skip


def run(
    mode: str,
    out: Path | None,
    progress: Progress,
    *,
    budget: Budget | None = None,
    base: ModelConfig | None = None,
    corpus_of: Callable = python_corpus,
) -> Path:
    """Runs the study and returns its folder; see `experiments.registry.Study.run`. A seed that is done is not rerun."""
    budget, base = budget or BUDGETS[mode], base or ModelConfig.from_json(config_path("lab"))
    corpus = corpus_of()

    def seed_rows(seed: int, folder: Path) -> Rows:
        return _seed_rows(seed, folder, base, budget, corpus, progress)

    parts = Parts(seed_rows, lambda rows: judge(rows, is_check=mode == "quick"), write_report)
    return run_seeds(_plan(mode, budget, base, corpus.summary()), budget.seeds, corpus, out, progress, parts)


def _plan(mode: str, budget: Budget, base: ModelConfig, corpus: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, so that a folder can tell whether it belongs to it."""
    cfg, effort = with_drafts(base), dataclasses.asdict(budget)
    effort |= {"seeds": list(budget.seeds), "fixed": list(budget.fixed)}
    return {
        "study": STUDY, "mode": mode, **({"status": NOT_A_RESULT} if mode == "quick" else {}), "config": cfg.to_dict(),
        "config_sha256": cfg.sha256(), "backbone_sha256": base.sha256(), "corpus": dict(corpus), "effort": effort,
        "devices": len(jax.devices()),
    }  # fmt: skip


def _seed_rows(seed: int, folder: Path, base: ModelConfig, budget: Budget, corpus: Corpus, progress: Progress) -> Rows:
    """Trains a model and its draft layers, or goes on from their last checkpoints, and measures them."""
    cfg = with_drafts(base)
    report = training_report(progress, f"seed {seed}: backbone")
    settings = budget.training.replace(seed=seed)
    backbone = run_to_end(train(base, settings, corpus, folder / "backbone", checkpoint_every=100), report).params
    untrained = with_draft_layers(backbone, cfg, seed)
    drafts = dataclasses.replace(budget.drafts, run=budget.drafts.run.replace(seed=seed))
    report = training_report(progress, f"seed {seed}: drafts")
    trained = run_to_end(train_drafts(untrained, cfg, drafts, corpus, folder / "drafts", checkpoint_every=100), report)
    return [{"seed": seed, **row} for row in _measured(trained.params, untrained, cfg, seed, budget, corpus, progress)]


def _measured(
    trained: Any, untrained: Any, cfg: ModelConfig, seed: int, budget: Budget, corpus: Corpus, progress: Progress
) -> Rows:
    """Rows of one seed: costs, calibration, and one per kind of prompt, mode and temperature."""
    capacity = budget.length + budget.new
    drafting, control = (Decoder(params, cfg, capacity) for params in (trained, untrained))
    prompts = {
        draw: [p for kind in KINDS for p in held_out_prompts(
            cfg, budget.training, corpus, kind, count, budget.length, draw)]
        for draw, count in ((MEASURED, budget.prompts), (FITTED, budget.fitted))
    }  # fmt: skip
    costs = drafting.profile(prompts[FITTED][0].tokens, budget.fixed, budget.profiled)
    rows: Rows = [{"kind": "costs", "rows": list(costs.rows), "seconds": list(costs.seconds)}]
    whole = Mode(f"fixed {BLOCK}", drafts=BLOCK)
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature)

        def generate(decoder: Decoder, number: int, prompt: Prompt, mode: Mode, sampling: Sampling = sampling) -> Trace:
            return decoder.run(prompt.tokens, budget.new, sampling, number, mode)

        fitted = rounds_of([generate(drafting, n, p, whole) for n, p in enumerate(prompts[FITTED])])
        progress(f"seed {seed}: calibration", TEMPERATURES.index(temperature) + 1, len(TEMPERATURES))
        temperatures = fit_temperatures(fitted)
        modes = _modes(budget.fixed, costs, temperatures)
        for mode in modes:  # compiles what is not compiled yet, before anything is timed
            generate(drafting, 0, prompts[FITTED][0], mode)
        traces: dict[str, list[Trace]] = {mode.name: [] for mode in modes} | {CONTROL: []}
        for number, prompt in enumerate(prompts[MEASURED]):
            # In turns, and each time in another order, so that a slow minute of the machine hits all of them.
            for mode in [*modes[number % len(modes) :], *modes[: number % len(modes)]]:
                traces[mode.name].append(generate(drafting, number, prompt, mode))
            traces[CONTROL].append(generate(control, number, prompt, whole))
            progress(f"seed {seed}: temperature {temperature:g}", number + 1, len(prompts[MEASURED]))
        found = calibration(fitted, rounds_of(traces[whole.name]), temperatures)
        rows.append({"kind": "calibration", "temperature": temperature, **found})
        rows += _rows(traces, prompts[MEASURED], temperature)
    return rows


def _modes(lengths: Sequence[int], costs: CostTable, temperatures: tuple[float, ...]) -> list[Mode]:
    fixed = [Mode(f"fixed {count}", drafts=count) for count in lengths]
    scheduled = [Mode("confidence", costs=costs), Mode("calibrated", costs=costs, temperatures=temperatures)]
    return [Mode(PLAIN), *fixed, *scheduled]


def _rows(traces: Mapping[str, Sequence[Trace]], prompts: Sequence[Prompt], temperature: float) -> Rows:
    """One row per kind of prompt and mode. Greedy tokens are compared with plain decoding's, prompt by prompt."""
    rows = []
    for kind in KINDS:
        places = [n for n, prompt in enumerate(prompts) if prompt.kind == kind]
        plain = [traces[PLAIN][n] for n in places]
        for name, every in traces.items():
            mine = [every[n] for n in places]
            row = {"kind": "mode", "prompts_of": kind, "mode": name, "temperature": temperature}
            row |= summary(mine, BLOCK)
            if temperature == 0 and name != PLAIN:
                row["identical"] = sum(a.tokens == b.tokens for a, b in zip(mine, plain, strict=True))
            if name == PLAIN and kind != "text":
                row["answered"] = sum(t.tokens[0] == prompts[n].answer for t, n in zip(mine, places, strict=True))
            rows.append(row)
    return rows


def judge(rows: Sequence[Mapping[str, Any]], *, is_check: bool = False) -> Gate:
    """Greedy output must be plain decoding's, always; the backbone and its draft layers must have learned."""
    modes = [row for row in rows if row["kind"] == "mode"]
    seeds = sorted({row["seed"] for row in modes})
    greedy = [row for row in modes if row["temperature"] == 0]
    drafted = [row for row in greedy if row["mode"] != PLAIN]
    same, asked = (sum(row[name] for row in drafted) for name in ("identical", "prompts"))
    checks = [Check(same == asked, f"Greedy output is that of plain decoding in {same:,} of {asked:,} generations.")]
    answered = [_share(greedy, seed, PLAIN, "answered", "prompts", "recall") for seed in seeds]
    checks.append(Check(min(answered) >= ANSWERED_AT_LEAST, f"The backbone answers {_listed(answered)} of the recall "
                        f"prompts, must be at least {ANSWERED_AT_LEAST:.0%} in every seed."))  # fmt: skip
    first = [_first(greedy, seed, f"fixed {BLOCK}") for seed in seeds]
    control = [_first(greedy, seed, CONTROL) for seed in seeds]
    gained = all(a - b >= FIRST_AT_LEAST for a, b in zip(first, control, strict=True))
    checks.append(Check(gained, f"First drafts accepted, greedy, all prompts: {_listed(first)}, must be at least "
                        f"{100 * FIRST_AT_LEAST:.0f} points above untrained draft layers in every seed."))  # fmt: skip
    checks.append(Check(max(control) <= CONTROL_AT_MOST, f"Untrained draft layers have {_listed(control)} of their "
                        f"first drafts accepted, must be at most {CONTROL_AT_MOST:.0%}."))  # fmt: skip
    if not checks[0].passed:
        return Gate(NOT_IDENTICAL, tuple(checks))
    if is_check:
        return Gate(NOT_A_RESULT, tuple(checks))
    return Gate(LEARNED if all(check.passed for check in checks) else NOT_LEARNED, tuple(checks))


def _share(rows: Sequence[Mapping[str, Any]], seed: int, mode: str, part: str, whole: str, kind: str) -> float:
    found = [row for row in rows if (row["seed"], row["mode"], row["prompts_of"]) == (seed, mode, kind)]
    return sum(row[part] for row in found) / sum(row[whole] for row in found)


def _first(rows: Sequence[Mapping[str, Any]], seed: int, mode: str) -> float:
    found = [row for row in rows if (row["seed"], row["mode"]) == (seed, mode)]
    return sum(row["accepted"][0] for row in found) / sum(row["verified"][0] for row in found)


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def write_report(folder: Path, plan: Mapping[str, Any], rows: Rows, gate: Gate) -> None:
    """Figures and report.md of these rows."""
    names = speculation_report.write_figures(folder, plan, rows, gate)
    manifest = read_json(folder / "manifest.json")
    write_text(folder / "report.md", speculation_report.render(plan, manifest, rows, gate, names))
