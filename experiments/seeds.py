"""The frame of a study whose rows come seed by seed: its folder, what is done already, the gate, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import row_constants
from experiments.artifacts import (
    claimed,
    note_time,
    open_folder,
    read_json,
    write_json,
    write_manifest,
    write_rows,
)
from experiments.gate import Gate
from experiments.progress import Progress

Rows = list[dict[str, Any]]


class Parts(NamedTuple):
    """What a study adds to the frame.

    seed_rows: (seed, its folder) -> rows; not called for a seed that is done. judge: all rows -> gate. write_report:
    (folder, plan, rows, gate) writes figures and report.md. last_rows: () -> rows that belong to no seed.
    """

    seed_rows: Callable[[int, Path], Rows]
    judge: Callable[[Rows], Gate]
    write_report: Callable[[Path, Mapping[str, Any], Rows, Gate], None]
    last_rows: Callable[[], Rows] = list


def run_seeds(
    plan: Mapping[str, Any], seeds: Sequence[int], corpus: Corpus, out: Path | None, progress: Progress, parts: Parts
) -> Path:
    """Runs a study and returns its folder; a full run continues where it was interrupted.

    plan: what the run is, with `study`, `mode` and `config_sha256`; goes into config.json. Raises ValueError as
    `open_folder` does, before any work.
    """
    begun = time.perf_counter()
    folder = open_folder(out, Path("results") / plan["study"], plan, resume=plan["mode"] == "full")
    with claimed(folder):
        facts = {"study": plan["study"], "mode": plan["mode"], "seeds": list(seeds), "corpus": corpus.summary()}
        write_manifest(folder, facts | {"config_sha256": plan["config_sha256"], "row_constants": row_constants()})
        rows: Rows = []
        for seed in seeds:
            rows += _rows_of(seed, folder / f"seed{seed}", parts)
            note_time(folder, time.perf_counter() - begun)
        rows += parts.last_rows()
        gate = parts.judge(rows)
        note_time(folder, time.perf_counter() - begun, finished=True)
        parts.write_report(folder, plan, rows, gate)
        write_result(folder, plan, rows, gate)
    progress(plan["study"], 1, 1, gate=gate.status)
    return folder


def _rows_of(seed: int, folder: Path, parts: Parts) -> Rows:
    path = folder / "result.json"
    if path.is_file():
        return read_json(path)
    rows = parts.seed_rows(seed, folder)
    write_json(path, rows)
    return rows


def write_result(folder: Path, plan: Mapping[str, Any], rows: Rows, gate: Gate) -> None:
    """result.json, the last file of a run: a folder that has it is finished."""
    head = {"study": plan["study"], "mode": plan["mode"], "status": gate.status, "gate": gate.as_json()["checks"]}
    write_rows(folder / "result.json", head, rows)
