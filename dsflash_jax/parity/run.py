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
from dsflash_jax.parity.rules import ATOL_RULE, FLIPS, ULP_RULE, Comparison, Verdict, flip_budget
from dsflash_jax.parity.units import judge_units

INPUTS = {"input_ids"}
# End to end the bfloat16 logits of a calm case (sub-layer outputs scaled down to CALM_GAIN) stay this close to its
# float32 file; other random models are chaotic (goldens' recommendation).
CALM_ATOL, CALM_GAIN = 0.15, 0.1
# Failing arrays named in a row.
MOST_SHOWN = 5


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
        calm = _calm(trace, path)
        note = "layer by layer, logits end to end" if calm else "layer by layer"
        return _summary(name, verdicts_of(compare(trace)) + calm, note)
    return _summary(name, verdicts_of(compare(trace)), "")


def _unbuilt_row(name: str, parts: list[str]) -> dict[str, Any]:
    row = {"case": name, "status": "not built", "arrays": 0, "failed": 0, "worst": None, "unit": ""}
    return row | {"detail": ", ".join(parts)}


def compare(trace: Trace) -> Comparison:
    """The trace beside this package's arrays: float32 end to end, bfloat16 part by part from recorded inputs."""
    layerwise = trace.mode.startswith("bf16")
    ours = replay_layers(trace) if layerwise else replay(trace)
    explain = functools.partial(flipped_queries, trace, trace.arrays if layerwise else ours)
    return Comparison(trace.cfg, trace.prompt, trace.arrays, ours, explain)


def verdicts_of(comparison: Comparison) -> list[Verdict]:
    """One verdict per array of the file, and one on the number of cache flips."""
    verdicts = [comparison.judge(key) for key in comparison.golden if key not in INPUTS]
    return verdicts + [flip_budget(verdicts)]


def _calm(trace: Trace, path: pathlib.Path) -> list[Verdict]:
    """End-to-end logits of a calm case's bf16 run against its float32 file; nothing for another case."""
    beside = path.with_name(f"{trace.name}.f32.npz")
    if trace.meta.get("f32_sensitivity", {}).get("out_gain", 1.0) > CALM_GAIN or not beside.exists():
        return []
    golden = np.load(beside, allow_pickle=False)
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
    detail += [f"{flips} one-step flips in caches"] if flips else []
    detail += [f"{v.key}: {v.rule}, worst {v.worst:.3g} {v.detail}".strip() for v in failed[:MOST_SHOWN]]
    detail += [f"{len(failed) - MOST_SHOWN} more"] if len(failed) > MOST_SHOWN else []
    detail += [f"{v.key}: {v.detail}" for v in verdicts if v.passed and v.detail and v.key != FLIPS]
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
