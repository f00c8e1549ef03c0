"""Explaining index scores that differ: the row's query had a value on a rounding boundary, which fell the other way.

A query is rounded to FP4 before it meets the keys, so a difference in the last place of a sum can move a whole row of
scores by a code step. Such a row is accepted only if both sides are shown: the query is recomputed from the attention
input, once as it rounds and once per undecided rounding with that one moved; the recorded row must equal one of these
variants, our row another, and one of the two must be the unmoved one. In float32 the roundings are the FP4 codes; in
bfloat16 also every earlier rounding of the query. The golden files allow one such flip; how near to a boundary counts
as undecided (`FP4_BOUNDARY`, `BF16_BOUNDARY`) is this package's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dsflash_jax import steps
from dsflash_jax.numerics.formats import get_format
from dsflash_jax.ops.linear import linear_f32
from dsflash_jax.ops.norms import rms_norm
from dsflash_jax.ops.rope import apply_rope
from dsflash_jax.parity.golden import Trace
from dsflash_jax.parity.verdicts import FLOAT_ATOL, bf16_ulp, differences
from dsflash_jax.roles import kv_owners, layer_roles
from pallas_kernels.indexer_scores.xla import scores_of

# In units of the value's FP4 group scale, or of its own last place in bfloat16: some hundred times the float32
# rounding of the sums in question.
FP4_BOUNDARY, BF16_BOUNDARY = 1e-4, 2e-3


def flipped_queries(
    trace: Trace, ours: dict[str, Any], key: str, rows: np.ndarray, golden: np.ndarray, computed: np.ndarray
) -> np.ndarray:
    """bool per listed row of the flattened scores `key`: whether one undecided rounding accounts for the difference.

    golden, computed: the listed rows as recorded and as this package got them. `ours` holds our arrays under golden
    names: the index keys that our row met and, in float32, the attention input (bfloat16 files are replayed from the
    recorded one). A row may also differ because a cached key does, which the caches' rule counts: then both sides must
    equal the same or neighbouring variants, each with its own keys.
    """
    rounded = trace.cfg.dtype == "bfloat16"
    attn_in = trace.arrays if rounded else ours
    pairs = zip(rows, golden, computed, strict=True)
    return np.array([_explained(trace, attn_in, ours, key, int(row), *sides) for row, *sides in pairs], bool)


def _explained(
    trace: Trace, attn_in: dict, ours: dict, key: str, row: int, golden: np.ndarray, computed: np.ndarray
) -> bool:
    layer, phase = int(key.split("/")[0].removeprefix("L")), key.split("/")[1]
    recorded = ~np.isnan(golden)  # the rest pads earlier decode steps
    golden, computed = golden[recorded], computed[recorded]
    x = attn_in[f"L{layer}/{phase}/attn_in"]
    x = x.reshape(-1, x.shape[-1])[row]
    prefill = phase == "prefill"
    batch = row // trace.prompt if prefill else row % trace.batch
    position = row % trace.prompt if prefill else trace.prompt + row // trace.batch
    rounded = trace.cfg.dtype == "bfloat16"
    limit = bf16_ulp(golden) if rounded else FLOAT_ATOL
    variants = list((_bf16_queries if rounded else _fp4_queries)(trace, layer, x, position))

    def fitting(wanted: np.ndarray, keys: np.ndarray) -> set[int]:
        """Numbers of the variants whose scores against `keys` are the wanted row."""
        found = set()
        for number, (query, weights) in enumerate(variants):
            scores = np.asarray(scores_of(query[None], weights[None], keys, trace.cfg.score_dtype))[0]
            if np.all(differences(wanted, np.where(np.isfinite(wanted), scores, wanted)) <= limit):
                found.add(number)
        return found

    for theirs, own in _key_tables(trace, ours, layer, batch, golden.size):
        there, here = fitting(golden, theirs), fitting(computed, own)
        # A variant that fits both sides would mean a small error of all scores, unless the keys themselves differ.
        if np.array_equal(theirs, own) and there & here:
            continue
        if there and here and 0 in there | here:
            return True
    return False


def _key_tables(
    trace: Trace, ours: dict, layer: int, batch: int, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Index keys [width, D] that the row may have met, recorded and our own: of its owner, or (raw) of any owner."""
    cfg = trace.cfg
    owners = [layer_roles(cfg)[layer].kv_source]
    owners += [owner.layer for owner in kv_owners(cfg)] if cfg.stale_index_keys else []
    for owner in owners:
        name = f"L{owner}/final/index_k_cache"
        tables = (side[batch][:width] for side in (trace.arrays[name], ours[name].values))
        yield tuple(np.pad(keys, [(0, width - len(keys)), (0, 0)]) for keys in tables)


def _fp4_queries(trace: Trace, layer: int, x: np.ndarray, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(query [H, D], weights [H]) in float32: as rounded, then with one undecided code moved at a time."""
    query, weights = _Indexing(trace, layer, x, position).unrounded(None)
    fmt = get_format(trace.cfg.index_format)
    rounded = np.asarray(fmt.fake_quant(query))
    yield rounded, weights
    groups = np.abs(query).reshape(*query.shape[:-1], -1, fmt.group)
    largest = np.maximum(groups.max(axis=-1, keepdims=True), fmt.scale.floor).astype(np.float64)
    scale = np.exp2(np.ceil(np.log2(largest / fmt.element.largest)))
    margin = FP4_BOUNDARY * np.broadcast_to(scale, groups.shape).reshape(query.shape)
    for moved in (query + margin, query - margin):
        other = np.asarray(fmt.fake_quant(moved.astype(np.float32)))
        for at in np.argwhere(other != rounded):
            variant = rounded.copy()
            variant[tuple(at)] = other[tuple(at)]
            yield variant, weights


def _bf16_queries(trace: Trace, layer: int, x: np.ndarray, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(query, weights) in bfloat16 values: as rounded, then with one undecided rounding moved at a time."""
    indexing = _Indexing(trace, layer, x, position)
    fmt = get_format(trace.cfg.index_format)
    undecided: list[tuple[str, int]] = []
    query, weights = indexing.unrounded(undecided)
    yield np.asarray(fmt.fake_quant(query)), weights
    for moved in undecided:
        query, weights = indexing.unrounded(None, moved)
        yield np.asarray(fmt.fake_quant(query)), weights


class _Indexing:
    """The way from one attention input to the indexer's query, stage by stage, with access to every rounding."""

    def __init__(self, trace: Trace, layer: int, x: np.ndarray, position: int):
        self.cfg, self.x = trace.cfg, np.asarray(x, np.float32)
        self.attn = steps.bind(trace.params, trace.cfg).layers[layer].attn
        table = trace.params["freqs"][layer_roles(trace.cfg)[layer].rope]
        self.rope = tuple(np.asarray(table[part])[position] for part in ("cos", "sin"))

    def unrounded(self, undecided: list | None, moved: tuple[str, int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(query [H, D] before FP4, weights [H]). Lists undecided bfloat16 roundings; `moved` goes the other way."""
        cfg, attn = self.cfg, self.attn

        def stage(name: str, value: Any) -> np.ndarray:
            value = np.asarray(value, np.float32)
            if cfg.dtype != "bfloat16":
                return value
            unit = np.exp2(np.frexp(np.abs(value))[1] - 8.0)
            down = np.floor(value / unit) * unit
            above = value / unit - np.floor(value / unit) - 0.5
            up = (above > 0) | ((above == 0) & (np.floor(value / unit) % 2 == 1))
            if undecided is not None:
                undecided.extend((name, int(at)) for at in np.flatnonzero(np.abs(above) < BF16_BOUNDARY))
            if moved is not None and moved[0] == name:
                up.reshape(-1)[moved[1]] ^= True
            return (down + up * unit).astype(np.float32)

        def product(x: np.ndarray, linear: Any) -> np.ndarray:
            return np.asarray(linear_f32(x, linear.matrix()))

        latent = stage("wq_a", product(self.x, attn.wq_a))
        latent = stage("q_norm", rms_norm(latent, attn.q_norm.weight[...], attn.q_norm.eps))
        query = stage("wq_b", product(latent, attn.indexer.wq_b)).reshape(cfg.index_n_heads, cfg.index_head_dim)
        query = stage("rope", apply_rope(query, *self.rope))
        weights = stage("weights_proj", product(self.x, attn.indexer.weights_proj))
        return query, stage("scale", weights * np.float32(cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5))
