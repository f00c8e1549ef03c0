"""What does each compress ratio cost in recall, and save in bytes?

Matched models that differ in `compress_ratios` alone, each trained from the same seeds on the same rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import layer_roles
from dsflash_jax.shipped import config_path
from dsflash_jax.training.corpus import Corpus, python_corpus
from dsflash_jax.training.data import row_constants
from dsflash_jax.training.devices import data_mesh
from dsflash_jax.training.settings import TrainSettings
from dsflash_jax.training.vocabulary import VALUE_TOKENS
from experiments import figures, report
from experiments.artifacts import claimed, note_time, open_folder, read_json, write_manifest, write_text
from experiments.cell import Cell, Effort, Tools, recall_batches, run_cell
from experiments.gate import NOT_A_RESULT, Gate, judge
from experiments.progress import Progress
from experiments.rows import EQUAL_SHARE, LARGE, MAIN, measured
from experiments.seeds import write_result

STUDY = "compress-ratio"
CHANCE = 1.0 / VALUE_TOKENS  # a uniform guess among the value tokens
Schedule = tuple[int, int] | None  # (encoder ratio, decoder ratio); None is window only
SCHEDULES: tuple[Schedule, ...] = (None, (1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
SMALL_TRAINING = TrainSettings()
# 600 steps leave its window-only control at 86.7 % near recall, below the gate.
LARGE_TRAINING = TrainSettings(steps=1000, rows=8, context=256, learning_rate=2e-3)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much of the study runs. schedules x seeds at the smaller size; then the extra groups, first seed only."""

    schedules: tuple[Schedule, ...]
    seeds: tuple[int, ...]
    training: TrainSettings
    effort: Effort
    equal_share: tuple[int, ...] = ()
    large: tuple[Schedule, ...] = ()


BUDGETS: Mapping[str, Budget] = MappingProxyType({
    "quick": Budget(
        schedules=(None, (2, 1), (4, 4)), seeds=(0,), training=SMALL_TRAINING.replace(steps=10),
        effort=Effort(recall_rows=32, text_rows=16, probe_rows=16, probe_every=10, decode_steps=16, unrounded=False),
    ),
    "default": Budget(
        schedules=SCHEDULES, seeds=(0,), training=SMALL_TRAINING,
        effort=Effort(recall_rows=256, text_rows=128, probe_every=100, unrounded=False),
    ),
    "full": Budget(
        # 600 steps leave one seed in three of window only below the gate's 95 % near recall (90.8 % at seed 2).
        schedules=SCHEDULES, seeds=(0, 1, 2), training=SMALL_TRAINING.replace(steps=800),
        effort=Effort(decode_contexts=(128, 1920)), equal_share=(2, 4), large=(None, (2, 1), (4, 4)),
    ),
})


def with_schedule(base: ModelConfig, schedule: Schedule) -> ModelConfig:
    """`base` with other compress ratios in its global layers, and nothing else changed.

    Without a schedule no layer has a global branch, so there is no source either. Raises ValueError where the base's
    page does not hold whole groups.
    """
    if schedule is None:
        ratios = (0,) * base.num_hidden_layers
        return base.replace(compress_ratios=ratios, kv_source_layer_ids=(), index_source_layer_ids=())
    chosen = dict(zip(("encoder", "decoder"), schedule, strict=True))
    return base.replace(compress_ratios=tuple(role.ratio and chosen[role.side] for role in layer_roles(base)))


def cells(budget: Budget, small: ModelConfig, large: ModelConfig) -> Iterator[Cell]:
    """All cells, seed by seed: an interrupted run has whole comparisons, and drift of the machine hits all alike."""
    for seed in budget.seeds:
        for schedule in budget.schedules:
            yield _cell(MAIN, schedule, seed, with_schedule(small, schedule), budget.training, budget.effort)
    first = budget.seeds[0]
    for ratio in budget.equal_share:
        # k over entries as at ratio 1: tells the cost of pooling from that of a larger selected share.
        cfg = with_schedule(small, (ratio, ratio)).replace(index_topk=small.index_topk // ratio)
        yield _cell(EQUAL_SHARE, (ratio, ratio), first, cfg, budget.training, budget.effort)
    effort = dataclasses.replace(
        budget.effort, recall_rows=256, probe_every=100, decode_contexts=(LARGE_TRAINING.context,)
    )
    for schedule in budget.large:
        yield _cell(LARGE, schedule, first, with_schedule(large, schedule), LARGE_TRAINING, effort)


def _cell(
    group: str, schedule: Schedule, seed: int, cfg: ModelConfig, training: TrainSettings, effort: Effort,
) -> Cell:
    encoder, decoder = schedule or (None, None)
    short = "window-only" if schedule is None else f"enc{encoder}-dec{decoder}"
    prefix = "" if group == MAIN else group.replace(" ", "-") + "-"
    labels = {"group": group, "encoder": encoder, "decoder": decoder, "seed": seed}
    return Cell(f"{prefix}{short}-seed{seed}", labels, cfg, training.replace(seed=seed), effort)


def run(
    mode: str, out: Path | None, progress: Progress, *, budget: Budget | None = None, tools: Tools | None = None,
    corpus_of: Callable = python_corpus,
) -> Path:
    """Runs the study and returns its folder; see `experiments.registry.Study.run`.

    A full run continues where it was interrupted: in `out`, or else in the newest unfinished folder of the same plan.
    Raises ValueError, having written nothing, for devices that do not divide a batch and settings that do not fit.
    """
    begun = time.perf_counter()
    budget = budget or BUDGETS[mode]
    planned = list(cells(budget, *(ModelConfig.from_json(config_path(name)) for name in ("lab", "lab_large"))))
    corpus = corpus_of()
    _refuse_what_cannot_run(planned, corpus)
    status = NOT_A_RESULT if mode == "quick" else None
    plan = _plan(mode, budget, planned, corpus.summary(), status)
    folder = open_folder(out, Path("results") / STUDY, plan, resume=mode == "full")
    with claimed(folder):
        _run_in(folder, plan, budget, planned, corpus, progress, tools, begun)
    return folder


def _run_in(
    folder: Path, plan: Mapping[str, Any], budget: Budget, planned: list[Cell], corpus: Corpus, progress: Progress,
    tools: Tools | None, begun: float,
) -> None:
    """Every cell in turn, then gate and report; cells that have a result are read."""
    mode, status = plan["mode"], plan.get("status")
    facts = {"study": STUDY, "mode": mode, "seeds": list(budget.seeds), "corpus": corpus.summary()}
    facts |= {"config_sha256": {cell.name: cell.cfg.sha256() for cell in planned}, "row_constants": row_constants()}
    # A call that only reads finished cells is no session: the manifest names what made the numbers.
    works = not all((folder / "cells" / cell.name / "result.json").is_file() for cell in planned)
    if works:
        write_manifest(folder, facts | ({"status": status} if status else {}))
    rows = []
    for done, cell in enumerate(planned):
        progress(STUDY, done, len(planned))
        rows.append(run_cell(cell, folder / "cells" / cell.name, corpus, progress, status or "", tools))
        if works:
            note_time(folder, time.perf_counter() - begun)
    _refuse_other_questions(planned, rows)
    gate = judge(rows, budget.seeds, is_check=mode == "quick")
    if works:
        note_time(folder, time.perf_counter() - begun, finished=True)
    write_report(folder, plan, read_json(folder / "manifest.json"), rows, gate)
    write_result(folder, plan, rows, gate)
    progress(STUDY, len(planned), len(planned), gate=gate.status)


def _refuse_what_cannot_run(planned: list[Cell], corpus: Corpus) -> None:
    """Raises ValueError for what training or evaluation would refuse later, when files would already be written."""
    for cell in planned:
        data_mesh(cell.settings.rows)
        cell.settings.mix(cell.cfg)
    for cell in {cell.labels["group"]: cell for cell in planned}.values():
        recall_batches(cell, corpus)


def _refuse_other_questions(planned: list[Cell], rows: list[Mapping[str, Any]]) -> None:
    """Raises ValueError where models of a group answered different questions: results kept from an older evaluation."""
    groups: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for cell, row in zip(planned, rows, strict=True):
        if measured(row):
            asked = tuple(share["asked"] for share in row["recall"]["by_bucket"].values())
            groups.setdefault(row["group"], {}).setdefault(asked, []).append(cell.name)
    for group, found in groups.items():
        if len(found) > 1:
            fewest = min(found.values(), key=len)
            raise ValueError(
                f"models of the group {group!r} answered different questions ({', '.join(fewest)} other ones than the "
                "rest): delete the result.json of its cells and run again; they are measured anew, not trained."
            )


def write_report(folder: Path, plan: Mapping[str, Any], manifest: Mapping[str, Any], rows: list, gate: Gate) -> None:
    """Figures and report.md of these rows."""
    names = figures.write_figures(folder, rows, gate, CHANCE)
    write_text(folder / "report.md", report.render(plan, manifest, rows, gate, CHANCE, names))


def _plan(
    mode: str, budget: Budget, planned: list[Cell], corpus: Mapping[str, Any], status: str | None,
) -> dict[str, Any]:
    """What a run is, so that a folder can tell whether it belongs to it: configurations, settings, corpus, devices."""
    import jax

    marked = {"status": status} if status else {}
    return {
        "study": STUDY, "mode": mode, **marked, "seeds": list(budget.seeds),
        "cells": [_planned(cell) for cell in planned],
        "configs": {cell.cfg.sha256(): cell.cfg.to_dict() for cell in planned},
        "settings": {cell.labels["group"]: cell.settings.replace(seed=0).to_dict() for cell in planned},
        "effort": {cell.labels["group"]: _plain(dataclasses.asdict(cell.effort)) for cell in planned},
        "corpus": dict(corpus), "devices": len(jax.devices()),
    }


def _planned(cell: Cell) -> dict[str, Any]:
    return {"name": cell.name, **cell.labels, "config_sha256": cell.cfg.sha256()}


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON reads them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}
