"""Finds golden files, runs them, and reports per file: checks made, worst difference, what failed."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dsflash_jax.ops.rope import model_tables
from dsflash_jax.parity.flips import flipped_queries
from dsflash_jax.parity.golden import MODES, Trace, load_trace, read_arrays
from dsflash_jax.parity.layerwise import replay_layers
from dsflash_jax.parity.recorded import compared_arrays
from dsflash_jax.parity.replay import in_small_pages, replay, replay_served
from dsflash_jax.parity.rules import Comparison
from dsflash_jax.parity.units import ASSUMED, judge_units
from dsflash_jax.parity.verdicts import (
    ATOL_RULE,
    FLIPS,
    QUERY_FLIPS,
    TABLE_ATOL,
    ULP_RULE,
    Verdict,
    flip_budget,
    identical,
    query_flip_budget,
    unruled,
    within_atol,
)

INPUTS = {"input_ids", "token_types"}
# End to end the bfloat16 logits of a calm case (sub-layer outputs scaled down to CALM_GAIN) stay this close to its
# float32 file; other random models are chaotic (goldens' recommendation).
CALM_ATOL, CALM_GAIN = 0.15, 0.1
# Failing arrays named in a row.
MOST_SHOWN = 5
# What a damaged or incomplete file raises while it is read.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def run_parity(directory: str | pathlib.Path, case: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """Compares every array of the golden files in `directory`.

    Returns: {"passed": bool, "rows": one per file with status "pass" | "fail" | "not built", checks, worst difference,
    detail, and traceback where comparing raised an error}. A file fails on any array that no rule consumed, if it
    cannot be read or compared, and if its name is none of a golden file. Not passed either if nothing was compared.
    Raises ValueError if nothing matches.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a folder of golden files.")
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}.")
    rows = [_row(path) for path in _files(directory, case, mode)]
    if not rows:
        raise ValueError(f"{directory} holds no golden file for case {case or 'any'} and mode {mode or 'any'}.")
    statuses = {row["status"] for row in rows}
    return {"passed": "fail" not in statuses and "pass" in statuses, "rows": rows}


def _files(directory: pathlib.Path, case: str | None, mode: str | None) -> Iterable[pathlib.Path]:
    """Golden files of that case and mode; without a mode also files whose name says nothing, which will fail."""
    for path in sorted(directory.glob("*.npz")):
        parts = path.name.split(".")
        if parts[1:] == ["weights", "npz"] or case not in (None, parts[0]):
            continue
        of_mode = parts[1] if len(parts) == 3 and parts[1] in MODES else None
        if mode in (None, of_mode):
            yield path


def _row(path: pathlib.Path) -> dict[str, Any]:
    """One file's row. What cannot be read fails with its reason; an error while comparing also keeps its traceback."""
    name = path.name.removesuffix(".npz")
    try:
        judge = _opened(name, path)
    except UNREADABLE as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        return _plain_row(name, "fail", reason) | {"failed": 1}
    try:
        return judge()
    except Exception as error:  # of any kind: the other files are still compared
        reason = f"{type(error).__name__}: {error}"
        return _plain_row(name, "fail", reason) | {"failed": 1, "traceback": traceback.format_exc()}


def _opened(name: str, path: pathlib.Path) -> Callable[[], dict[str, Any]]:
    """Reads a file and gives what compares it. Raises ValueError for a name of no golden file, else UNREADABLE."""
    if name.startswith("units_") and "." not in name:
        return functools.partial(_unit_row, name, read_arrays(path))
    if len(name.split(".")) != 2 or name.split(".")[1] not in MODES:
        raise ValueError(f"unknown file: a trace is named CASE.MODE.npz with MODE one of {', '.join(MODES)}.")
    trace = load_trace(path)
    if isinstance(trace, list):
        return functools.partial(_plain_row, name, "not built", ", ".join(trace))
    return functools.partial(_trace_row, name, trace, path)


def _unit_row(name: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    verdicts, unbuilt = judge_units(name, arrays)
    if not verdicts:
        return _plain_row(name, "not built", ", ".join(unbuilt)) if unbuilt else _plain_row(name, "fail", "no array")
    notes = [f"not built: {', '.join(unbuilt)}"] if unbuilt else []
    return _summary(name, verdicts, "; ".join(notes + [ASSUMED[name]] if name in ASSUMED else notes))


def _trace_row(name: str, trace: Trace, path: pathlib.Path) -> dict[str, Any]:
    verdicts = judge_tables(trace) + judge_hashes(trace) + verdicts_of(compare(trace))
    if trace.mode == "f32_raw":
        return _summary(name, verdicts, "traced")
    if trace.mode == "f32":
        return _summary(name, verdicts + judge_served(trace), "traced and served")
    calm = judge_calm(trace, path)
    note = "layer by layer, logits end to end" if calm else "layer by layer"
    if trace.starts_behind_prompt:
        left_out = len(trace.arrays) - len(compared_arrays(trace))
        note += f", decode steps from the recorded caches (of the cut prompt {left_out} arrays not compared, its caches"
        note += " packed and unpacked again)"
    return _summary(name, verdicts + calm, note)


def _plain_row(name: str, status: str, detail: str) -> dict[str, Any]:
    return {"case": name, "status": status, "arrays": 0, "failed": 0, "worst": None, "unit": "", "detail": detail}


def compare(trace: Trace) -> Comparison:
    """The trace beside this package's arrays: float32 end to end, bfloat16 part by part from recorded inputs."""
    ours = replay_layers(trace) if trace.mode.startswith("bf16") else replay(trace)
    explain = functools.partial(flipped_queries, trace, ours)
    return Comparison(trace.cfg, trace.prompt, compared_arrays(trace), ours, explain, trace.meta.get("keep_last"))


def verdicts_of(comparison: Comparison) -> list[Verdict]:
    """One verdict per array of the file, one on the number of cache flips and one on that of flipped queries."""
    verdicts = [comparison.judge(key) for key in comparison.golden if key not in INPUTS]
    budgets = [flip_budget(verdicts, comparison.rounded), query_flip_budget(verdicts, comparison.rounded)]
    return verdicts + budgets


def judge_tables(trace: Trace) -> list[Verdict]:
    """The file's RoPE tables, which the replays use, against those that this package derives from its config."""
    own = model_tables(trace.cfg)
    return [
        _shaped(f"freqs/{table}/{part}", np.asarray(trace.params["freqs"][table][part]), own[table][part], TABLE_ATOL)
        for table in own
        for part in own[table]
    ]


def judge_hashes(trace: Trace) -> list[Verdict]:
    """The file's constants of the n-gram hashes against those that this package derives; its token map is given."""
    if trace.ngram_hash is None:
        return []
    own = {
        "primes": trace.ngram_hash.primes, "offsets": trace.ngram_hash.offsets,
        "multipliers": trace.ngram_hash.multipliers, "pad_id": trace.ngram_hash.pad,
    }  # fmt: skip
    derived = [identical(f"engram/{key}", trace.engram[key], ours) for key, ours in own.items()]
    known = {*own, "token_map"}
    return derived + [unruled(f"engram/{key}") for key in trace.engram if key not in known]


def judge_served(trace: Trace) -> list[Verdict]:
    """Logits, output ids and caches of `prefill` and `decode`, on small pages in random order.

    These steps keep no scores, so decode reads the keys of the candidate pool alone where that is less work; and the
    recorded sequences, which fit one page of the default size, cross page borders.
    """
    small = in_small_pages(trace)
    ours = replay_served(small, shuffled=True)
    golden = {key: trace.arrays[key] for key in ours if key in trace.arrays}
    verdicts = [v for v in verdicts_of(Comparison(small.cfg, trace.prompt, golden, ours)) if v.key != QUERY_FLIPS]
    label = f"served, shuffled pages of {small.cfg.page_size}"
    return [dataclasses.replace(v, key=f"{v.key} ({label})") for v in verdicts]


def judge_calm(trace: Trace, path: pathlib.Path) -> list[Verdict]:
    """End-to-end logits of a calm case's bfloat16 run against its float32 file; nothing for another case.

    A case that cannot be told apart, or whose float32 file is not there, fails: the check must not vanish unseen.
    """
    gain = trace.meta.get("f32_sensitivity", {}).get("out_gain")
    if gain is None and "calm" not in trace.name:
        return [_missing("meta_json has no f32_sensitivity.out_gain, so whether the case is calm is unknown")]
    if gain is not None and gain > CALM_GAIN:
        return []
    beside = path.with_name(f"{trace.name}.{trace.mode.replace('bf16', 'f32')}.npz")
    if not beside.exists():
        return [_missing(f"{beside.name} is not beside the file")]
    golden, runs = read_arrays(beside), {"traced": replay(trace), "served": replay_served(trace)}
    return [
        _shaped(f"{key} against f32 ({label})", golden[key], ours[key], CALM_ATOL)
        for label, ours in runs.items()
        for key in ("prefill/logits_all", "prefill/logits_last", "decode/logits")
        if key in ours
    ]


def _missing(reason: str) -> Verdict:
    return Verdict("end to end", "against f32", False, np.inf, reason)


def _shaped(key: str, golden: np.ndarray, ours: np.ndarray, atol: float) -> Verdict:
    if golden.shape != ours.shape:
        return Verdict(key, "shape", False, np.inf, f"shape {ours.shape} must be {golden.shape}")
    return within_atol(key, golden, ours, atol)


def _summary(name: str, verdicts: list[Verdict], note: str) -> dict[str, Any]:
    failed = [v for v in verdicts if not v.passed]
    floats = [v.worst for v in verdicts if v.rule in (ATOL_RULE, ULP_RULE)]
    flips = int(max((v.worst for v in verdicts if v.key.startswith(FLIPS)), default=0))
    detail = [note] if note else []
    detail += [f"{flips} one-step flips in caches"] if flips else []
    detail += [f"{v.key}: {v.rule}, worst {v.worst:.3g} {v.detail}".strip() for v in failed[:MOST_SHOWN]]
    detail += [f"{len(failed) - MOST_SHOWN} more"] if len(failed) > MOST_SHOWN else []
    told = [v for v in verdicts if v.passed and v.detail and not v.key.startswith((FLIPS, QUERY_FLIPS))]
    detail += [f"{v.key}: {v.detail}" for v in told]
    return {
        "case": name,
        "status": "fail" if failed else "pass",
        "arrays": len(verdicts),
        "failed": len(failed),
        # None where an array could not be compared at all; JSON has no infinity.
        "worst": max(floats) if floats and np.all(np.isfinite(floats)) else None,
        "unit": "bf16 ulp" if any(v.rule == ULP_RULE for v in verdicts) else "absolute",
        "detail": "; ".join(detail),
    }
