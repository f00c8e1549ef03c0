"""What does running the decoder on the end of a prompt only change, and how much prefill time does it save?

A lab model is trained as in the compress-ratio study; its held-out rows are prefilled with every layer on every token,
with an exact halo, with bounded replay, and, as the control, from the last window of the prompt alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.replay import DECODER_MODES, decoder_rows
from dsflash_jax.shipped import config_path
from dsflash_jax.training.corpus import Corpus, python_corpus
from dsflash_jax.training.evaluate import held_out_batches
from dsflash_jax.training.loop import run_to_end, train
from dsflash_jax.training.settings import TrainSettings
from experiments import replay_report
from experiments.artifacts import read_json, write_text
from experiments.gate import LEARNED, NOT_A_RESULT, NOT_LEARNED, Check, Gate
from experiments.progress import Progress, training_report
from experiments.replay_measures import agreement_rows, prefill_rows
from experiments.seeds import Parts, Rows, run_seeds

STUDY = "decoder-replay"
NEAR_AT_LEAST, FAR_AT_LEAST = 0.95, 0.90  # of "all": a model without far recall has nothing that replay could lose


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much runs. prompts: rows per length; lengths: off every multiple of window and page; follow: tokens decoded
    behind each prompt. timed: prompt lengths of the lab model; timed_bench: of the shape of `dsflash bench`.
    """

    seeds: tuple[int, ...]
    training: TrainSettings
    prompts: int = 256
    lengths: tuple[int, ...] = (17, 31, 45, 67, 90, 109)
    follow: int = 12
    timed: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    timed_bench: tuple[int, ...] = (512, 1024, 2048)
    repeats: int = 7


BUDGETS: Mapping[str, Budget] = MappingProxyType({
    "quick": Budget(seeds=(0,), training=TrainSettings(steps=10), prompts=16, lengths=(31, 67), follow=2,
                    timed=(128, 512), timed_bench=(), repeats=3),
    "default": Budget(seeds=(0,), training=TrainSettings()),
    "full": Budget(seeds=(0, 1, 2), training=TrainSettings(steps=800), prompts=512),
})  # fmt: skip


def run(
    mode: str, out: Path | None, progress: Progress, *, budget: Budget | None = None, base: ModelConfig | None = None,
    corpus_of: Callable = python_corpus,
) -> Path:
    """Runs the study and returns its folder; see `experiments.registry.Study.run`. A seed that is done is not rerun."""
    budget, base = budget or BUDGETS[mode], base or ModelConfig.from_json(config_path("lab"))
    corpus = corpus_of()

    def seed_rows(seed: int, folder: Path) -> Rows:
        return _seed_rows(seed, folder, base, budget, corpus, progress)

    parts = Parts(
        seed_rows, lambda rows: judge(rows, is_check=mode == "quick"), write_report,
        lambda: _timed(base, budget, corpus, progress),
    )  # fmt: skip
    return run_seeds(_plan(mode, budget, base, corpus.summary()), budget.seeds, corpus, out, progress, parts)


def _plan(mode: str, budget: Budget, base: ModelConfig, corpus: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, so that a folder can tell whether it belongs to it."""
    effort = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(budget).items()}
    decoder = {m: list(decoder_rows(base, m)) for m in DECODER_MODES}
    return {
        "study": STUDY, "mode": mode, **({"status": NOT_A_RESULT} if mode == "quick" else {}), "config": base.to_dict(),
        "config_sha256": base.sha256(), "decoder_rows": decoder, "corpus": dict(corpus), "effort": effort,
        "devices": len(jax.devices()),
    }  # fmt: skip


def _seed_rows(seed: int, folder: Path, cfg: ModelConfig, budget: Budget, corpus: Corpus, progress: Progress) -> Rows:
    """Trains a model, or goes on from its last checkpoint, and compares the modes on it."""
    settings = budget.training.replace(seed=seed)
    report = training_report(progress, f"seed {seed}: training")
    params = run_to_end(train(cfg, settings, corpus, folder, checkpoint_every=100), report).params
    batches = held_out_batches(cfg, settings, corpus, budget.prompts, settings.rows).recall
    rows: Rows = []
    for row in agreement_rows(params, cfg, batches, budget.lengths, budget.follow):
        rows.append({"kind": "agreement", "seed": seed, **row})
        progress(f"seed {seed}: prompts", len(rows), 4 * len(budget.lengths))
    return rows


def _timed(base: ModelConfig, budget: Budget, corpus: Corpus, progress: Progress) -> Rows:
    """Prefill times; weights do not change them, so untrained ones serve."""
    jobs = [("lab", base, budget.timed)]
    if budget.timed_bench:
        jobs.append(("bench_base", ModelConfig.from_json(config_path("bench_base")), budget.timed_bench))
    rows: Rows = []
    total = sum(3 * len(lengths) for *_, lengths in jobs)
    for name, cfg, lengths in jobs:
        tokens = np.asarray(corpus.held_out[: max(lengths)]).tolist()
        for row in prefill_rows(steps.init_params(cfg), cfg, name, tokens, lengths, budget.repeats):
            rows.append({"kind": "time", **row})
            progress("prefill times", len(rows), total)
    return rows


def judge(rows: Rows, *, is_check: bool = False) -> Gate:
    """The models must have learned recall, near and far, where every layer runs on every token."""
    checks = []
    for name, least in (("near", NEAR_AT_LEAST), ("far", FAR_AT_LEAST)):
        shares = []
        for seed in sorted({row["seed"] for row in rows if row["kind"] == "agreement"}):
            found = [row["recall"][name] for row in rows if row.get("seed") == seed and row["mode"] == "all"]
            asked = sum(share["asked"] for share in found)
            shares.append(sum(share["correct"] for share in found) / asked if asked else 0.0)
        listed = ", ".join(f"{share:.1%}" for share in shares)
        checks.append(Check(min(shares) >= least, f"{name.capitalize()} recall with every layer on every token: "
                            f"{listed}, must be at least {least:.0%} in every seed."))  # fmt: skip
    if is_check:
        return Gate(NOT_A_RESULT, tuple(checks))
    return Gate(LEARNED if all(check.passed for check in checks) else NOT_LEARNED, tuple(checks))


def write_report(folder: Path, plan: Mapping[str, Any], rows: Rows, gate: Gate) -> None:
    """Figures and report.md of these rows."""
    names = replay_report.write_figures(folder, rows, gate)
    manifest = read_json(folder / "manifest.json")
    write_text(folder / "report.md", replay_report.render(plan, manifest, rows, gate, names))
