"""Finds golden files, runs them, and reports per file: arrays compared, worst difference, what failed."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from dsflash_jax.parity.flips import flipped_queries
from dsflash_jax.parity.golden import MODES, Trace, load_trace
from dsflash_jax.parity.layerwise import replay_layers
from dsflash_jax.parity.replay import replay
from dsflash_jax.parity.rules import ATOL_RULE, ULP_RULE, Comparison, Verdict, flip_budget
from dsflash_jax.parity.units import judge_units

INPUTS = {"input_ids"}
# The end-to-end bf16 run of a calm case stays this close to its float32 file (goldens' recommendation).
CALM_ATOL = 0.15


def run_parity(directory: str | pathlib.Path, case: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """Compares every array of the golden files in `directory`.

    Returns: {"passed": bool, "rows": one per file with status "pass" | "fail" | "not built", arrays, worst difference,
    detail}. A file fails on any array that no rule consumed. Raises ValueError if nothing matches.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a folder of golden files.")
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}.")
    rows = [_row(path) for path in _files(directory, case, mode)]
    if not rows:
        raise ValueError(f"{directory} holds no golden file for case {case or 'any'} and mode {mode or 'any'}.")
    return {"passed": all(row["status"] != "fail" for row in rows), "rows": rows}


def _files(directory: pathlib.Path, case: str | None, mode: str | None) -> Iterable[pathlib.Path]:
    for path in sorted(directory.glob("*.npz")):
        parts = path.name.split(".")
        if len(parts) == 2 and parts[0].startswith("units_"):
            if mode is None and case in (None, parts[0]):
                yield path
        elif len(parts) == 3 and parts[1] in MODES and case in (None, parts[0]) and mode in (None, parts[1]):
            yield path


def _row(path: pathlib.Path) -> dict[str, Any]:
    name = path.name.removesuffix(".npz")
    if name.startswith("units_"):
        verdicts, unbuilt = judge_units(name, dict(np.load(path, allow_pickle=False)))
        if not verdicts:
            return _unbuilt_row(name, unbuilt)
        return _summary(name, verdicts, f"not built: {', '.join(unbuilt)}" if unbuilt else "")
    trace = load_trace(path)
    if isinstance(trace, list):
        return _unbuilt_row(name, trace)
    if trace.mode.startswith("bf16"):
        calm = _calm(trace, path) if _is_calm(trace) else []
        return _summary(name, judge_layers(trace) + calm, "layer by layer" + (", logits end to end" if calm else ""))
    return _summary(name, judge_trace(trace), "")


def _unbuilt_row(name: str, parts: list[str]) -> dict[str, Any]:
    return {"case": name, "status": "not built", "arrays": 0, "worst": 0.0, "detail": ", ".join(parts)}


def judge_trace(trace: Trace) -> list[Verdict]:
    """Verdicts for every array of a float32 trace, run end to end."""
    ours = replay(trace)
    explain = functools.partial(flipped_queries, trace, ours)
    return verdicts_of(Comparison(trace.cfg, trace.prompt, trace.arrays, ours, explain))


def judge_layers(trace: Trace) -> list[Verdict]:
    """Verdicts for every array of a bfloat16 trace, each from recorded inputs."""
    explain = functools.partial(flipped_queries, trace, trace.arrays)
    return verdicts_of(Comparison(trace.cfg, trace.prompt, trace.arrays, replay_layers(trace), explain))


def verdicts_of(comparison: Comparison) -> list[Verdict]:
    """One verdict per array of the file, and one on the number of cache flips."""
    verdicts = [comparison.judge(key) for key in comparison.golden if key not in INPUTS]
    return verdicts + [flip_budget(verdicts)]


def _is_calm(trace: Trace) -> bool:
    return "calm" in trace.name


def _calm(trace: Trace, path: pathlib.Path) -> list[Verdict]:
    """End-to-end logits of a bf16 run against the float32 file of the same case."""
    golden = np.load(path.with_name(f"{trace.name}.f32.npz"), allow_pickle=False)
    ours = replay(trace)
    verdicts = []
    for key in ("prefill/logits_all", "decode/logits"):
        worst = float(np.max(np.abs(golden[key] - ours[key])))
        verdicts.append(Verdict(f"{key} against f32", f"atol {CALM_ATOL}", worst <= CALM_ATOL, worst))
    return verdicts


def _summary(name: str, verdicts: list[Verdict], note: str) -> dict[str, Any]:
    failed = [v for v in verdicts if not v.passed]
    floats = [v.worst for v in verdicts if v.rule in (ATOL_RULE, ULP_RULE)]
    flips = sum(v.flips for v in verdicts)
    detail = [note] if note else []
    detail += [f"{flips} one-step flips"] if flips else []
    detail += [f"{v.key}: {v.rule}, worst {v.worst:.3g} {v.detail}".strip() for v in failed[:5]]
    return {
        "case": name,
        "status": "fail" if failed else "pass",
        "arrays": len(verdicts),
        "failed": len(failed),
        "worst": max(floats, default=0.0),
        "detail": "; ".join(detail),
    }
