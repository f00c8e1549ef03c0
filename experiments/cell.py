"""One cell of a study: a model trained with one seed, measured as it is cached, and its result on disk.

A cell is a folder: config.json, metrics.jsonl, probes.jsonl, checkpoints/ and, once it is done, result.json. A cell
with a result is not run again; without one it continues from its last checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dsflash_jax.analysis.cost import decode_seconds, measured_kv_bytes
from dsflash_jax.analysis.recall import (
    LagBuckets,
    Recall,
    answers_by_row,
    bits_by_row,
    bits_per_byte,
    coverage_summary,
    informed_guess,
    recall,
    recall_by_lag,
)
from dsflash_jax.config import ModelConfig
from dsflash_jax.training import checkpoints
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import HELD_OUT_STREAM, Batch, make_batch, split_batch
from dsflash_jax.training.evaluate import (
    EVALUATION_SEED,
    HeldOut,
    Records,
    evaluate,
    held_out_batches,
    make_predictor,
)
from dsflash_jax.training.loop import TrainResult, run_to_end, train
from dsflash_jax.training.metrics import MetricsFile, read_events, read_metrics
from dsflash_jax.training.model import Model, package_model
from dsflash_jax.training.optimizer import split_buffers
from dsflash_jax.training.settings import TrainSettings
from dsflash_jax.training.vocabulary import FIRST_VALUE
from experiments.artifacts import read_json, write_json
from experiments.progress import Progress, training_report

SOLVED = 0.95  # near and far recall from which a model counts as having solved the task
# Rows as trained ask few far questions. So half as many rows are added in which a pair rests beyond two windows after
# half of its occurrences, not after a tenth: four to five times as many far answers in a row, of the same kind.
RESTING_PATIENCE, RESTING_SHARE, RESTING_STEP = 0.5, 0.5, 1  # step: another draw than the rows as trained, step 0
DECODE_WARMUP = 8


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much a cell measures. Rows are of evaluation; probes are small evaluations during training.

    recall_rows: rows of the kind trained on; `recall_batches` adds its share of resting rows.
    probe_every: steps between probes (and checkpoints). decode_contexts, decode_steps: cached tokens at which decode is
    timed, and calls timed. unrounded: also evaluate with KV that is not rounded to its format.
    """

    recall_rows: int = 512
    text_rows: int = 256
    probe_rows: int = 64
    probe_every: int = 50
    decode_contexts: tuple[int, ...] = (128,)
    decode_steps: int = 64
    unrounded: bool = True


@dataclasses.dataclass(frozen=True)
class Cell:
    """What distinguishes one trained model from the others of a study. `labels` go into its result as they are."""

    name: str
    labels: dict[str, Any]
    cfg: ModelConfig
    settings: TrainSettings
    effort: Effort


class Tools(NamedTuple):
    """The parts of a cell that a test replaces: the model, and the measure of its cost."""

    model: Model
    cost: Callable[[Any, Cell, Corpus], dict[str, Any]]


def run_cell(
    cell: Cell, folder: Path, corpus: Corpus, progress: Progress, note: str = "", tools: Tools | None = None,
) -> dict[str, Any]:
    """The result of a cell, from disk where it is finished, else trained, measured and written.

    note: a remark that goes into every file of the cell. A training that diverges is a result too: `diverged` holds the
    sentence, and nothing is measured. Raises ValueError as `train` does, for settings that do not fit.
    """
    path = folder / "result.json"
    if path.is_file():
        return read_json(path)
    tools = tools or Tools(package_model(), measure_cost)
    checkpoints.check_writable(folder)
    marked = {"note": note} if note else {}
    facts = {**cell.labels, "config_sha256": cell.cfg.sha256(), **marked}
    write_json(folder / "config.json", {**facts, "config": cell.cfg.to_dict(), "settings": cell.settings.to_dict()})
    if note and not (folder / "metrics.jsonl").exists():
        with MetricsFile(folder / "metrics.jsonl") as file:
            file.write({"event": "note", "note": note})
    probe = _Probe(cell, folder, corpus, tools.model, marked)
    try:
        trained = _train(cell, folder, corpus, progress, probe, tools.model)
        measures = _measure(cell, trained, corpus, tools)
    except FloatingPointError as error:
        return _finish(path, {**facts, "diverged": str(error)})
    return _finish(path, {**facts, **measures, **_course(cell, folder, trained)})


def _finish(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    write_json(path, result)
    return read_json(path)  # the same value whether it was just made or found


def _train(
    cell: Cell, folder: Path, corpus: Corpus, progress: Progress, probe: _Probe, model: Model,
) -> TrainResult:
    # A run killed between a checkpoint and its probe resumes behind that step: probe it first.
    probe.newest_checkpoint()

    def shown(step: int) -> dict[str, float]:
        return probe(step) if probe.is_due(step) else probe.last

    steps = train(cell.cfg, cell.settings, corpus, folder, checkpoint_every=cell.effort.probe_every, model=model)
    return run_to_end(steps, training_report(progress, cell.name, shown))


class _Probe:
    """Near and far recall at checkpoints, appended to probes.jsonl."""

    def __init__(self, cell: Cell, folder: Path, corpus: Corpus, model: Model, marked: dict[str, Any]) -> None:
        self._cell, self._folder, self._model, self._marked = cell, folder, model, marked
        rows = cell.effort.probe_rows
        self._batches = held_out_batches(cell.cfg, cell.settings, corpus, rows, cell.settings.rows).recall
        self._path = folder / "probes.jsonl"
        self.last: dict[str, float] = {}

    def is_due(self, step: int) -> bool:
        return step % self._cell.effort.probe_every == 0 or step == self._cell.settings.steps

    def newest_checkpoint(self) -> None:
        steps = checkpoints.saved_steps(self._folder / "checkpoints")
        known = {record["step"] for record in read_metrics(self._path)} if self._path.exists() else set()
        if steps and steps[-1] not in known:
            self(steps[-1])

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluates the checkpoint of `step`; returns near and far recall."""
        params = checkpoints.load_plain(self._folder / "checkpoints", step).tree["params"]
        _, buffers = split_buffers(self._initial)
        predict = _predictor(as_cached(self._cell.cfg), self._cell.settings.rows, self._model)
        found = _recall(evaluate(predict, {**params, **buffers}, self._batches), _buckets(self._cell.cfg))
        self.last = {name: found.by_bucket[name].value or 0.0 for name in ("near", "far")}
        shares = {name: found.by_bucket[name].value for name in ("near", "far")}
        with MetricsFile(self._path) as file:
            file.write({"step": step, **shares, **self._marked})
        return self.last

    @functools.cached_property
    def _initial(self) -> dict[str, Any]:
        """Initial parameters, of which only the buffers are used: checkpoints do not hold them."""
        return self._model.init(self._cell.cfg, self._cell.settings.seed)


def as_cached(cfg: ModelConfig) -> ModelConfig:
    """The model that reads its keys and values as the caches store them, rounded to their formats.

    Bytes per token are those of the packed formats, so recall must be measured on what these bytes hold.
    """
    return cfg.replace(qat=True)


@functools.lru_cache(maxsize=32)  # the seeds of a schedule share a compilation
def _predictor(cfg: ModelConfig, rows: int, model: Model) -> Callable:
    return make_predictor(cfg, rows, model=model)


def recall_batches(cell: Cell, corpus: Corpus) -> list[Batch]:
    """The recall questions after training: rows as trained, then rows whose pairs rest longer. Equal for every model.

    Raises ValueError when the rows of a batch do not divide recall_rows.
    """
    settings, rows = cell.settings, cell.settings.rows
    as_trained = held_out_batches(cell.cfg, settings, corpus, cell.effort.recall_rows, rows).recall
    resting = settings.replace(
        rows=resting_rows(cell), patience=RESTING_PATIENCE, recall=1.0, near=0.0, needle=0.0, copy=0.0
    )
    more = make_batch(resting.mix(cell.cfg), corpus.held_out, EVALUATION_SEED, RESTING_STEP, HELD_OUT_STREAM)
    return [*as_trained, *split_batch(more, rows)]


def resting_rows(cell: Cell) -> int:
    """Rows of evaluation whose pairs rest longer: whole batches, at least one."""
    rows = cell.settings.rows
    return max(1, int(RESTING_SHARE * cell.effort.recall_rows) // rows) * rows


def _measure(cell: Cell, trained: TrainResult, corpus: Corpus, tools: Tools) -> dict[str, Any]:
    """Everything measured after training."""
    cfg, settings, effort = cell.cfg, cell.settings, cell.effort
    text = held_out_batches(cfg, settings, corpus, settings.rows, effort.text_rows).text
    held_out = HeldOut(recall_batches(cell, corpus), text)
    predict = _predictor(as_cached(cfg), settings.rows, tools.model)
    buckets = _buckets(cfg)
    result = {"parameters": _count(trained.params), "lag_classes": dataclasses.asdict(buckets)}
    result["evaluation"] = {
        "recall_rows": effort.recall_rows, "resting_rows": resting_rows(cell), "resting_patience": RESTING_PATIENCE,
        "text_rows": effort.text_rows,
    }
    asked, written = _records(predict, trained.params, held_out)
    result |= _quality(asked, written, buckets)
    result["recall_by_lag"] = _curves(asked, buckets)
    result["far_by_row"] = answers_by_row(asked.correct, asked.asked, asked.lag, "far", buckets)
    result["bits_by_row"] = bits_by_row(written.nll, written.text_mask)
    result["informed_guess"] = informed_guess(_values(held_out.recall), asked.asked, asked.lag, buckets)
    if cfg.kv_source_layer_ids:
        off, written = _records(predict, trained.params, held_out, use_global=False)
        result["global_off"] = _quality(off, written, buckets) | {"recall_by_lag": _curves(off, buckets, ("all",))}
        # Under top-k the entries left out get no attention, so a dense pass tells what the selection would have held,
        # and what recall the entries allow whatever is selected.
        dense = evaluate(predict, trained.params, held_out.recall, dense=True)
        result["coverage"] = coverage_summary(dense.coverage)
        result["all_entries"] = {"recall": _recall(dense, buckets).as_json()}
    if effort.unrounded:
        raw = _predictor(cfg.replace(qat=False), settings.rows, tools.model)
        result["unrounded"] = _quality(*_records(raw, trained.params, held_out), buckets)
    return {**result, **tools.cost(trained.params, cell, corpus)}


def _records(predict: Callable, params: Any, held_out: HeldOut, *, use_global: bool = True) -> tuple[Records, Records]:
    """What a model does on recall rows and on text."""
    asked = evaluate(predict, params, held_out.recall, use_global=use_global)
    return asked, evaluate(predict, params, held_out.text, use_global=use_global)


def _quality(asked: Records, text: Records, buckets: LagBuckets) -> dict[str, Any]:
    return {"bits_per_byte": bits_per_byte(text.nll, text.text_mask), "recall": _recall(asked, buckets).as_json()}


def _buckets(cfg: ModelConfig) -> LagBuckets:
    return LagBuckets.for_model(cfg.sliding_window, cfg.num_hidden_layers)


def _recall(records: Records, buckets: LagBuckets) -> Recall:
    return recall(records.correct, records.asked, records.lag, records.aligned, buckets)


def _values(batches: Sequence[Batch]) -> np.ndarray:
    """The value shown at each position of recall rows, -1 where none: values are the last tokens of the vocabulary."""
    tokens = np.concatenate([batch.tokens for batch in batches])
    return np.where(tokens >= FIRST_VALUE, tokens, -1)


def _curves(
    records: Records, buckets: LagBuckets, sides: Sequence[str] = ("all", "aligned", "split"),
) -> dict[str, dict[str, list[int]]]:
    """Right answers in bins of lag: all pairs, pairs within a group of two, pairs split across two; as columns."""
    edges = buckets.edges(records.asked.shape[1])
    chosen = {"all": True, "aligned": records.aligned, "split": ~records.aligned}
    found = {}
    for name in sides:
        bins = recall_by_lag(records.correct, records.asked & chosen[name], records.lag, edges)
        found[name] = {column: [cell[column] for cell in bins] for column in ("lag_from", "lag_to", "correct", "asked")}
    return found


def _count(params: dict[str, Any]) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(split_buffers(params)[0]))


def measure_cost(params: Any, cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """Bytes and decode time on real caches, with held-out text as the tokens."""
    cfg, effort = cell.cfg, cell.effort
    short = -(-cell.settings.context // cfg.page_size) * cfg.page_size
    timings = []
    for context in effort.decode_contexts:
        tokens = corpus.held_out[: context + DECODE_WARMUP + effort.decode_steps]
        timings.append(decode_seconds(params, cfg, tokens, context, DECODE_WARMUP))
    return {"kv_bytes": measured_kv_bytes(cfg, short, 4 * short), "decode_seconds": timings}


def _course(cell: Cell, folder: Path, trained: TrainResult) -> dict[str, Any]:
    """What the files of the cell say about its training, over all sessions."""
    records, events = read_metrics(folder / "metrics.jsonl"), read_events(folder / "metrics.jsonl")
    seconds = np.cumsum([record["step_seconds"] for record in records])
    probes = read_metrics(folder / "probes.jsonl")
    solved = next((p["step"] for p in probes if min(p["near"] or 0, p["far"] or 0) >= SOLVED), None)
    tokens = cell.settings.rows * cell.settings.context * len(records)
    return {
        "steps": len(records), "switch_step": trained.switch_step, "train_seconds": float(seconds[-1]),
        "compile_seconds": sum(event["compile_seconds"] for event in events if event["event"] == "start"),
        "tokens_per_second": tokens / float(seconds[-1]),
        "solved_at_step": solved,
        "solved_after_seconds": None if solved is None else float(seconds[solved - 1]),
        "probes": probes,
    }
