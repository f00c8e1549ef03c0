"""What a comparison of one array comes to, the tolerances, and the comparisons that need no model.

The tolerances are those that come with the golden files: `rules.py` says which array is held to which.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from dsflash_jax.numerics.formats import KVFormat

FLOAT_ATOL = 2e-4
ATOL_RULE, ULP_RULE = f"atol {FLOAT_ATOL:g}", "1 bf16 ulp of row maximum"
FLIPS, QUERY_FLIPS = "flips", "query flips"  # keys of the verdicts on a file's cache flips and flipped queries
# RoPE tables of NumPy and of the reference differ by one unit in the last place of a cosine near 1.
TABLE_ATOL = 1.2e-7


@dataclasses.dataclass
class Verdict:
    """Outcome for one array. `worst`: largest difference in the rule's unit, or count of differing items.

    flips of `cached` values: codes that differ. flipped of `scored` rows: index scores behind a flipped query.
    """

    key: str
    rule: str
    passed: bool
    worst: float
    detail: str = ""
    flips: int = 0
    cached: int = 0
    flipped: int = 0
    scored: int = 0


class CachedRows(NamedTuple):
    """Unpacked cache rows and the scale of every element's group, both float32[B, n, D]."""

    values: np.ndarray
    scales: np.ndarray


def unruled(key: str) -> Verdict:
    """The verdict on an array that nothing here computes."""
    return Verdict(key, "none", False, np.inf, "no rule consumed this array")


def identical(key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
    """Equal shape and values, NaN equal to NaN."""
    golden, ours = np.asarray(golden), np.asarray(ours)
    if golden.shape != ours.shape:
        return Verdict(key, "shape", False, np.inf, f"shape {ours.shape} must be {golden.shape}")
    differing = int(np.sum((golden != ours) & ~((golden != golden) & (ours != ours))))
    return Verdict(key, "identical", differing == 0, differing)


def differences(golden: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """|golden - ours|; 0 where equal or both NaN, infinity where only one is finite."""
    same = (golden == ours) | (np.isnan(golden) & np.isnan(ours))
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, np.nan_to_num(np.abs(golden - ours), nan=np.inf, posinf=np.inf))


def within_atol(key: str, golden: np.ndarray, ours: np.ndarray, atol: float = FLOAT_ATOL) -> Verdict:
    """Absolute difference; infinities and NaN padding must stand in the same places."""
    worst = float(np.max(differences(golden, ours), initial=0.0))
    return Verdict(key, f"atol {atol:g}", worst <= atol, worst)


def within_ulp(key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
    """Difference in bfloat16 units in the last place of the row's largest finite magnitude; at most one."""
    difference, unit = differences(golden, ours), bf16_ulp(golden)
    units = np.where(difference == 0, 0.0, difference / np.maximum(unit, np.finfo(np.float32).tiny))
    worst = float(np.max(units, initial=0.0))
    return Verdict(key, ULP_RULE, worst <= 1, worst)


def bf16_ulp(rows: np.ndarray) -> np.ndarray:
    """Spacing of bfloat16 at the largest finite magnitude of each row: [..., n] -> [..., 1]; 0 for a row of zeros."""
    largest = np.max(np.where(np.isfinite(rows), np.abs(rows), 0.0), axis=-1, keepdims=True, initial=0.0)
    return np.where(largest > 0, np.exp2(np.frexp(largest)[1] - 8.0), 0.0)


def code_steps(golden: np.ndarray, ours: np.ndarray, scales: np.ndarray, fmt: KVFormat) -> np.ndarray:
    """Codes between two dequantised values of one group scale; infinity where `golden` is not on that scale's grid."""
    codes = np.arange(1 << (fmt.element.bits - 1), dtype=np.uint32)
    grid = np.asarray(fmt.element.decode(codes))
    grid = grid[np.isfinite(grid)]

    def signed(values: np.ndarray) -> np.ndarray:
        magnitude = np.abs(values) / scales
        code = np.minimum(np.searchsorted(grid, magnitude), grid.size - 1)
        return np.where(grid[code] == magnitude, np.sign(values) * code, np.inf)

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # rows that nobody wrote have scale 0
        return np.nan_to_num(np.abs(signed(golden) - signed(ours)), nan=np.inf, posinf=np.inf)


def flip_budget(verdicts: list[Verdict], rounded: bool) -> Verdict:
    """At most max(3, 0.1 %) one-step flips over all cached values of a file; none in a bfloat16 file."""
    flips, cached = sum(v.flips for v in verdicts), sum(v.cached for v in verdicts)
    allowed = 0 if rounded else max(3, cached // 1000)
    return Verdict(FLIPS, f"at most {allowed}", flips <= allowed, flips, f"{flips} of {cached} cached values")


def query_flip_budget(verdicts: list[Verdict], rounded: bool) -> Verdict:
    """At most one row of scores in a file behind a flipped query; of a bfloat16 file max(1, 1 %)."""
    flipped, scored = sum(v.flipped for v in verdicts), sum(v.scored for v in verdicts)
    allowed = max(1, scored // 100) if rounded else 1
    detail = f"{flipped} of {scored} rows of scores"
    return Verdict(QUERY_FLIPS, f"at most {allowed}", flipped <= allowed, flipped, detail)
