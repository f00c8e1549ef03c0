"""How each golden array is judged. An array that no rule names is a failure.

Discrete arrays must be identical. Floats: absolute tolerance 2e-4 against the float32 files (the goldens' own
recommendation); index scores may see one FP4 flip (5e-3). Caches: equal except one-step quantisation flips, at most
max(3, 0.1 % of all cached values of the file). States keep stale rows in the reference: only open-group rows count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import layer_roles

FLOAT_ATOL = 2e-4
SCORE_ATOL = 5e-3
FLOATS = {
    "attn_in", "attn_out", "ffn_in", "ffn_out", "h_out", "pre_mix_out", "gate_weights", "hc_attn_pre", "hc_attn_post",
    "hc_attn_comb", "hc_ffn_pre", "hc_ffn_post", "hc_ffn_comb", "final_normed", "logits_all", "logits_last", "logits",
}  # fmt: skip
EXACT = {"output_ids", "gate_indices", "candidates"}
CACHES = {"window_kv_cache", "compress_kv_cache", "index_k_cache"}
STATES = {"comp_kv_state", "comp_score_state"}


@dataclasses.dataclass
class Verdict:
    """Outcome for one array: worst absolute difference (or count of differing items) and whether the rule holds."""

    key: str
    rule: str
    passed: bool
    worst: float
    detail: str = ""
    flips: int = 0
    cached: int = 0


def judge(key: str, golden: np.ndarray, ours: Any, cfg: ModelConfig, prompt: int) -> Verdict:
    """Applies the rule of one trace array; `ours` is None where this package produced nothing for the key."""
    name = key.split("/")[-1]
    if ours is None:
        return Verdict(key, "none", False, np.inf, "no rule consumed this array")
    if name == "topk_idxs":
        return _topk(key, golden, ours, cfg, prompt)
    if name == "compress_idxs":
        return _selection(key, golden, ours)
    if name == "index_gap":
        return _gap(key, golden, ours)
    if name in STATES:
        ours = np.asarray(ours)
        golden = golden[:, : ours.shape[1]]
        return _floats(key, golden, ours, FLOAT_ATOL)
    if golden.shape != np.shape(ours):
        return Verdict(key, "shape", False, np.inf, f"shape {np.shape(ours)} must be {golden.shape}")
    if name in EXACT:
        differing = int(np.sum(golden != ours))
        return Verdict(key, "identical", differing == 0, differing)
    if name in CACHES:
        return _cache(key, golden, ours, cfg)
    if name == "index_score":
        return _floats(key, golden, ours, SCORE_ATOL)
    if name in FLOATS:
        return _floats(key, golden, ours, FLOAT_ATOL)
    return Verdict(key, "none", False, np.inf, "no rule consumed this array")


def _floats(key: str, golden: np.ndarray, ours: np.ndarray, atol: float) -> Verdict:
    """Absolute difference; infinities and NaN padding must stand in the same places."""
    same = (golden == ours) | (np.isnan(golden) & np.isnan(ours))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(golden - ours))
    worst = float(np.max(np.nan_to_num(difference, nan=np.inf), initial=0.0))
    return Verdict(key, f"atol {atol:g}", worst <= atol, worst)


def _gap(key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
    """Margins of the selection, derived from the scores: the scores' tolerance, twice."""
    return _floats(key, golden, ours, 2 * SCORE_ATOL)


def _selection(key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
    """Identical entry lists; ours is padded with -1 to index_topk, the golden one to the entries that exist."""
    golden = np.where(golden == -2, -1, golden)
    width = golden.shape[-1]
    head, rest = ours[..., :width], ours[..., width:]
    differing = int(np.sum(head != golden) + np.sum(rest != -1))
    return Verdict(key, "identical", differing == 0, differing)


def _topk(key: str, golden: np.ndarray, ours: dict[str, np.ndarray], cfg: ModelConfig, prompt: int) -> Verdict:
    """The list given to attention, as window positions and entries.

    Golden prefill: window part holds positions, entries are offset by T. Decode: ring slots mod window, then entries
    offset by the window.
    """
    layer, phase = key.split("/")[:2]
    decode = phase == "decode"
    window = cfg.sliding_window if decode else min(prompt, cfg.sliding_window)
    offset = cfg.sliding_window if decode else prompt
    head, tail = golden[..., :window], golden[..., window:]
    if decode:
        position = prompt + np.arange(golden.shape[0]).reshape(-1, 1, 1, 1)
        head = np.where(head >= 0, position - (position - head) % cfg.sliding_window, -1)
    tail = np.where(tail >= 0, tail - offset, -1)
    pairs = [(head, ours["window"])]
    if layer_roles(cfg)[int(layer[1:])].ratio:
        pairs.append((tail, ours["entries"]))
    elif tail.shape[-1]:
        return Verdict(key, "identical", False, np.inf, "entries in a layer without a global branch")
    differing = sum(_different_rows(a, b) for a, b in pairs)
    return Verdict(key, "identical", differing == 0, differing)


def _different_rows(a: np.ndarray, b: np.ndarray) -> int:
    """Rows whose non-negative members differ (as multisets)."""
    width = max(a.shape[-1], b.shape[-1])
    sides = []
    for side in (a, b):
        side = np.maximum(side, -1)
        side = np.pad(side, [(0, 0)] * (side.ndim - 1) + [(0, width - side.shape[-1])], constant_values=-1)
        sides.append(np.sort(side, axis=-1))
    return int(np.sum(np.any(sides[0] != sides[1], axis=-1)))


def _cache(key: str, golden: np.ndarray, ours: np.ndarray, cfg: ModelConfig) -> Verdict:
    """Equal, or one code step apart (counted; the file's total is limited by the caller)."""
    differing = golden != ours
    flips = int(np.sum(differing))
    four_bit = not key.endswith("window_kv_cache")
    large, small = np.maximum(np.abs(golden), np.abs(ours)), np.minimum(np.abs(golden), np.abs(ours))
    # Neighbouring codes: E2M1 differ by at most half of the larger one (0 and its neighbour apart); E4M3 by an eighth.
    step = np.where(small == 0, _smallest_code(golden, four_bit), large * (0.5 if four_bit else 0.125))
    far = differing & (np.abs(golden - ours) > step)
    worst = float(np.max(np.abs(golden - ours), initial=0.0))
    return Verdict(key, "equal or one code step", not far.any(), worst, f"{flips} flips" if flips else "", flips, golden.size)


def _smallest_code(values: np.ndarray, four_bit: bool) -> np.ndarray:
    """Per group, an upper bound of the smallest non-zero code: half a scale of E2M1, 2^-9 scale of E4M3."""
    group = 16 if four_bit else 32
    groups = np.abs(values).reshape(*values.shape[:-1], -1, group)
    amax = np.max(groups, axis=-1, keepdims=True)
    smallest = amax / 4 * 0.5 if four_bit else amax / 256 * 2.0**-9
    return np.broadcast_to(smallest, groups.shape).reshape(values.shape)
