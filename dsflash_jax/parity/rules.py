"""How each golden array is judged. An array that no rule names is a failure.

The tolerances that come with the golden files: discrete arrays are identical. Floats against a float32 file: within
2e-4; caches equal but for one-step code flips of at most max(3, 0.1 %) of the file's cached values; one query code may
have flipped, which moves one row of index scores. Floats against a bfloat16 file (layer by layer from recorded inputs):
within one bfloat16 unit in the last place of the row's largest value; caches equal; where two scores tie exactly,
either entry may have been selected. RoPE tables: within 1.2e-7.

What is decided here, because the golden files leave it open: a flipped query counts only where `flips.py` shows both
sides of it. In bfloat16 a sum in another order flips roundings of the query that the recording's library did not, so
at most max(1, 1 %) of a file's score rows may be such rows, and what is selected there must follow from our scores; a
tie of candidate blocks may fall either way, as one of entries may. A selection must also be the top-k of our own scores
in every row. `index_gap` may be off by what the scores are: within 2e-4, or twice the error of a flipped row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.numerics.formats import KVFormat
from dsflash_jax.parity.verdicts import (
    FLOAT_ATOL,
    CachedRows,
    Verdict,
    bf16_ulp,
    code_steps,
    differences,
    identical,
    unruled,
    within_atol,
    within_ulp,
)
from dsflash_jax.roles import layer_roles

FLOATS = {
    "attn_in", "attn_out", "ffn_in", "ffn_out", "h_out", "pre_mix_out", "gate_weights", "hc_attn_pre", "hc_attn_post",
    "hc_attn_comb", "hc_ffn_pre", "hc_ffn_post", "hc_ffn_comb", "final_normed", "logits_all", "logits_last", "logits",
    "engram_out", "main_hidden", "spec_logits", "spec_confidence",
}  # fmt: skip
SELECTING = {"index_score", "index_gap", "compress_idxs", "candidates"}  # may be missing on a step without entries
EXACT = {"output_ids", "gate_indices", "engram_hashes", "spec_output_ids"}
CACHES = {"window_kv_cache": "window", "compress_kv_cache": "main", "index_k_cache": "index"}
STATES = {"comp_kv_state", "comp_score_state"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A golden file beside what this package computed for it, under the same names.

    explain: (key, row numbers of the flattened scores, those golden rows, those of ours) -> per row whether a flipped
      rounding of its query accounts for the difference.
    keep_last: rows per sequence to which a long prompt's per-layer arrays were cut; None where all were recorded.
    """

    cfg: ModelConfig
    prompt: int
    golden: dict[str, np.ndarray]
    ours: dict[str, Any]
    explain: Callable[[str, np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None
    keep_last: int | None = None

    @property
    def rounded(self) -> bool:
        """Whether the golden file was computed in bfloat16."""
        return self.cfg.dtype == "bfloat16"

    def judge(self, key: str) -> Verdict:
        """Applies the rule of one array."""
        name, suffix = (key.split("/")[-1].split("@") + [""])[:2]
        if suffix == "steps":
            return self._steps(key)
        golden, ours = self.golden[key], self.ours.get(key)
        if ours is None:
            return unruled(key)
        if f"{key}@steps" in self.golden:
            ours = ours[self._listed(key)]
        if name == "topk_idxs":
            return self._attended(key, golden, ours)
        if name == "compress_idxs":
            return self._selection(key, golden, ours)
        if name in CACHES:
            return self._cache(key, golden, ours)
        if name in STATES:
            golden = golden[:, : ours.shape[1]]  # older slots keep stale rows in the reference
        ours = self._kept(key, ours)
        if golden.shape != ours.shape:
            return Verdict(key, "shape", False, np.inf, f"shape {ours.shape} must be {golden.shape}")
        if name in EXACT:
            return identical(key, golden, ours)
        if name == "candidates":
            return self._candidates(key, golden, ours)
        if name == "index_score":
            return self._scores(key, golden, ours)
        if name == "index_gap":
            return self._gap(key, golden, ours)
        if name in FLOATS or name in STATES:
            return within_ulp(key, golden, ours) if self.rounded else within_atol(key, golden, ours)
        return unruled(key)

    def _kept(self, key: str, ours: np.ndarray) -> np.ndarray:
        """Of an array of a cut prompt, the rows that were recorded: the last `keep_last` of each sequence."""
        recorded = self.golden[key].shape
        if self.keep_last is None or "prefill/" not in key or recorded == ours.shape:
            return ours
        if recorded[1:2] == (self.keep_last,):  # [B, rows, ...]
            return ours[:, -self.keep_last :]
        if recorded[1:] != ours.shape[1:] or len(ours) % self.prompt:  # neither are [B * rows, ...]
            return ours
        rows = ours.reshape(-1, self.prompt, *ours.shape[1:])[:, -self.keep_last :]
        return rows.reshape(-1, *ours.shape[1:])

    def _listed(self, key: str) -> np.ndarray:
        """Decode steps that recorded `key`, counted from the first step."""
        return self.golden[f"{key}@steps"].astype(int)

    def _steps(self, key: str) -> Verdict:
        """A score or selection exists from the step that has an entry on; a gap from the step that leaves one out."""
        name = key.removesuffix("@steps")
        if name not in self.golden or name.split("/")[-1] not in SELECTING:
            return unruled(key)
        role = layer_roles(self.cfg)[_layer(key)]
        least = self.cfg.index_topk + 1 if name.endswith("index_gap") else 1
        steps = np.arange(self.golden["decode/logits"].shape[0])
        entries = (self.prompt + steps + 1) // max(role.ratio, 1)
        return identical(key, self.golden[key], steps[entries >= least])

    def _attended(self, key: str, golden: np.ndarray, ours: dict[str, np.ndarray]) -> Verdict:
        """The list given to attention, as window positions and entries.

        Golden prefill: positions, entries offset by T. Decode: slots modulo the window, entries offset by the window.
        """
        window, decode = self.cfg.sliding_window, "/decode/" in key
        if _layer(key) >= self.cfg.num_hidden_layers:
            return self._drafted(key, golden, ours)
        width, offset = (window, window) if decode else (min(self.prompt, window), self.prompt)
        head, tail = golden[..., :width], golden[..., width:]
        if decode:
            head = ring_positions(head, self.prompt + np.arange(golden.shape[0]).reshape(-1, 1, 1, 1), window)
        role = layer_roles(self.cfg)[_layer(key)]
        if not role.ratio and tail.shape[-1]:
            return Verdict(key, "identical", False, np.inf, "entries in a layer without a global branch")
        pairs, rule = [(head, ours["window"])], "identical"
        if role.ratio:
            pairs.append((np.where(tail >= 0, tail - offset, -1), ours["entries"]))
        if role.ratio and self.rounded:
            # Attention was given the recorded selection; `compress_idxs` judges ours.
            rule = f"window identical, entries those recorded for layer {role.index_source}"
        differing = sum(differing_rows(a, b) for a, b in pairs)
        return Verdict(key, rule, differing == 0, differing)

    def _drafted(self, key: str, golden: np.ndarray, ours: dict[str, np.ndarray]) -> Verdict:
        """The list of a draft layer: ring slots modulo the window, then the block's rows offset by the window."""
        window, block = self.cfg.sliding_window, self.cfg.dspark_block_size
        padding = golden == -2  # behind the block, on steps that saw less
        first = np.sum(~padding, axis=-1, keepdims=True) - block
        tail = np.take_along_axis(golden, first + np.arange(block), axis=-1)
        position = self.prompt + np.arange(golden.shape[0]).reshape(-1, 1, 1, 1)
        head = ring_positions(np.where(np.arange(golden.shape[-1]) < first, golden, -1), position, window)
        count = differing_rows(head, ours["window"]) + int(np.sum(tail != window + np.arange(block)))
        return Verdict(key, "identical", count == 0, count)

    def _selection(self, key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
        """Identical lists (golden ones are as wide as the entries that exist); in bfloat16 exact ties may swap.

        In every row ours must be the best entries of our own scores.
        """
        name = key.replace("compress_idxs", "index_score")
        pad = [(0, 0)] * (golden.ndim - 1) + [(0, ours.shape[-1] - golden.shape[-1])]
        golden = np.maximum(np.pad(golden, pad, constant_values=-1), -1)
        own = self.ours[name][self._listed(key)] if f"{key}@steps" in self.golden else self.ours[name]
        groundless = np.any(best_entries(own, ours.shape[-1]) != ours, axis=-1)
        differing = np.any(golden != ours, axis=-1)
        swapped = flipped = np.zeros_like(differing)
        if self.rounded and differing.any():
            scores = self._on_steps_of(key, name, self.golden[name])
            picked = [_sorted_scores(scores, side) for side in (golden, ours)]
            swapped = differing & np.all(picked[0] == picked[1], axis=-1)
            # Scores of a flipped query select otherwise; `query_flip_budget` limits their number.
            explained = self._flipped_rows(name)[1].reshape(self.golden[name].shape[:-1])
            flipped = differing & ~swapped & self._on_steps_of(key, name, explained)
        bad = groundless | (differing & ~swapped & ~flipped)
        notes = ((swapped, "chosen among exact ties"), (flipped, "behind a flipped query"))
        notes += ((groundless, "are not the best of our own scores"),)
        detail = ", ".join(f"{rows.sum()} rows {note}" for rows, note in notes if rows.any())
        return Verdict(key, "identical", not bad.any(), int(bad.sum()), detail)

    def _on_steps_of(self, key: str, name: str, rows: np.ndarray) -> np.ndarray:
        """Of `rows`, which follow the golden array `name`, those of the decode steps that recorded `key`."""
        if f"{key}@steps" not in self.golden:
            return rows
        if f"{name}@steps" not in self.golden:
            return rows[self._listed(key)]
        return rows[np.isin(self._listed(name), self._listed(key))]

    def _candidates(self, key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
        """Identical masks; in bfloat16 blocks whose recorded scores tie exactly may swap."""
        differing = np.any(golden != ours, axis=-1)
        tied = np.zeros_like(differing)
        if self.rounded and differing.any():
            size = self.cfg.candidate_block_size
            name = key.replace("candidates", "index_score")
            scores = self._on_steps_of(key, name, self.golden[name])
            kept = [np.sort(_block_best(np.where(mask, scores, -np.inf), size), axis=-1) for mask in (golden, ours)]
            tied = differing & np.all(kept[0] == kept[1], axis=-1)
        count = int(np.sum(differing & ~tied))
        detail = f"{int(tied.sum())} rows chosen among exact ties" if tied.any() else ""
        return Verdict(key, "identical", count == 0, count, detail)

    def _scores(self, key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
        """Masks identical, scores within the float rule, save rows that a flip explains: `query_flip_budget`."""
        judge = within_ulp if self.rounded else within_atol
        verdict, scored = judge(key, golden, ours), int(np.prod(golden.shape[:-1]))
        if verdict.passed or not np.isfinite(verdict.worst):
            return dataclasses.replace(verdict, scored=scored)
        beyond, explained = self._flipped_rows(key)
        passed = bool(np.all(explained == beyond))
        unit = " bf16 ulp" if self.rounded else ""
        detail = f"{beyond.sum()} of {beyond.size} rows off by up to {verdict.worst:.2g}{unit}, "
        detail += f"{explained.sum()} shown to be a flipped rounding of the query"
        rest = golden.reshape(beyond.size, -1)[~beyond], ours.reshape(beyond.size, -1)[~beyond]
        worst = judge(key, *rest).worst if passed else verdict.worst
        return Verdict(key, verdict.rule, passed, worst, detail, flipped=int(explained.sum()), scored=scored)

    def _flipped_rows(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Of the flattened rows of the scores `key`: those beyond the float rule, and those that a flip explains."""
        golden = self.golden[key]
        ours = self.ours[key] if f"{key}@steps" not in self.golden else self.ours[key][self._listed(key)]
        ours = self._kept(key, ours)
        limit = bf16_ulp(golden) if self.rounded else FLOAT_ATOL
        beyond = np.any(differences(golden, ours) > limit, axis=-1).reshape(-1)
        explained = np.zeros_like(beyond)
        if self.explain is not None and beyond.any():
            sides = (side.reshape(beyond.size, -1)[beyond] for side in (golden, ours))
            explained[beyond] = self.explain(key, self._recorded_rows(key, np.flatnonzero(beyond)), *sides)
        return beyond, explained

    def _recorded_rows(self, key: str, rows: np.ndarray) -> np.ndarray:
        """Row numbers counted from the first decode step, where only some steps recorded `key`."""
        if f"{key}@steps" not in self.golden:
            return rows
        batch = self.golden[key].shape[1]
        return self._listed(key)[rows // batch] * batch + rows % batch

    def _gap(self, key: str, golden: np.ndarray, ours: np.ndarray) -> Verdict:
        """Margin of the selection: a difference of two order statistics, so off by at most twice the scores' error."""
        name = key.replace("index_gap", "index_score")
        scores = self._on_steps_of(key, name, self.golden[name])
        own = self.ours[name][self._listed(key)] if f"{key}@steps" in self.golden else self.ours[name]
        own = self._kept(name, own)
        unscored = golden.shape[1] - scores.shape[1] if self.keep_last and "/prefill/" in key else 0
        if scores.shape != own.shape or scores.shape[:-1] != golden[:, unscored:].shape:
            return Verdict(key, "from the scores", False, np.inf, f"no score for every {golden.shape} gap")
        error = np.max(differences(scores, own), axis=-1)
        if not np.all(np.isfinite(error)):
            return Verdict(key, "from the scores", False, np.inf, f"no finite score for every {golden.shape} gap")
        if self.rounded:
            # The reference subtracts in its score dtype: one more rounding.
            allowed = 2 * error + bf16_ulp(scores)[..., 0]
        else:
            allowed = np.where(error > FLOAT_ATOL, 2 * error, FLOAT_ATOL)
        # Rows whose scores were cut away are held to the float rule.
        allowed = np.pad(allowed, [(0, 0), (unscored, 0)], constant_values=FLOAT_ATOL) if unscored else allowed
        difference = differences(golden, ours)
        return Verdict(
            key, "2x the scores' error", bool(np.all(difference <= allowed)), float(np.max(difference, initial=0.0))
        )

    def _cache(self, key: str, golden: np.ndarray, ours: CachedRows) -> Verdict:
        """Equal, or in float32 one code step apart; the number of steps in a file is limited by `flip_budget`."""
        if golden.shape != ours.values.shape:
            return Verdict(key, "shape", False, np.inf, f"shape {ours.values.shape} must be {golden.shape}")
        differing = golden != ours.values
        flips, worst = int(np.sum(differing)), float(np.max(np.abs(golden - ours.values), initial=0.0))
        steps = code_steps(golden[differing], ours.values[differing], ours.scales[differing], self._format(key))
        most = 0 if self.rounded else 1
        detail = f"{flips} values differ by up to {np.max(steps):g} code steps" if flips else ""
        rule = "equal or one code step" if most else "equal"
        return Verdict(key, rule, bool(np.all(steps <= most)), worst, detail, flips, golden.size)

    def _format(self, key: str) -> KVFormat:
        layout, kind = cache_layout(self.cfg), CACHES[key.split("/")[-1]]
        return layout.ring[_layer(key)].format if kind == "window" else layout.member(_layer(key), kind).format


def ring_positions(slots: np.ndarray, position: np.ndarray, window: int) -> np.ndarray:
    """Token positions behind ring slots at decode `position`; -1 stays -1."""
    return np.where(slots >= 0, position - (position - slots) % window, -1)


def differing_rows(a: np.ndarray, b: np.ndarray) -> int:
    """Rows whose non-negative members differ (as multisets)."""
    width = max(a.shape[-1], b.shape[-1])
    sides = []
    for side in (a, b):
        pad = [(0, 0)] * (side.ndim - 1) + [(0, width - side.shape[-1])]
        sides.append(np.sort(np.pad(np.maximum(side, -1), pad, constant_values=-1), axis=-1))
    return int(np.sum(np.any(sides[0] != sides[1], axis=-1)))


def best_entries(scores: np.ndarray, k: int) -> np.ndarray:
    """Entries of the k best scores [..., E], ascending, -1 padding: the lowest wins a tie; -inf and NaN never do."""
    values = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    width = scores.shape[-1]
    picked = np.where(np.take_along_axis(values, order, axis=-1) > -np.inf, order, width)
    picked = np.sort(picked, axis=-1)
    pad = [(0, 0)] * (picked.ndim - 1) + [(0, k - picked.shape[-1])]
    return np.pad(np.where(picked < width, picked, -1), pad, constant_values=-1)


def _layer(key: str) -> int:
    return int(key.split("/")[0].removeprefix("L"))


def _sorted_scores(scores: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """Recorded scores of the picked entries, sorted; -inf for an empty pick."""
    found = np.take_along_axis(scores, np.minimum(np.maximum(picked, 0), scores.shape[-1] - 1), axis=-1)
    return np.sort(np.where(picked >= 0, found, -np.inf), axis=-1)


def _block_best(scores: np.ndarray, size: int) -> np.ndarray:
    pad = [(0, 0)] * (scores.ndim - 1) + [(0, -scores.shape[-1] % size)]
    padded = np.pad(np.nan_to_num(scores, nan=-np.inf, neginf=-np.inf), pad, constant_values=-np.inf)
    return padded.reshape(*scores.shape[:-1], -1, size).max(axis=-1)
