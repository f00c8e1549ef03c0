"""Explaining an index score that differs: one FP4 code of its query, on a rounding boundary, fell the other way."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dsflash_jax import steps
from dsflash_jax.numerics.formats import get_format
from dsflash_jax.parity.golden import Trace
from dsflash_jax.parity.rules import FLOAT_ATOL, differences
from dsflash_jax.roles import kv_owners, layer_roles

# How near to a rounding boundary a component must lie to count as undecided, in units of its group's scale.
BOUNDARY = 1e-4
# Undecided components of one query that may fall the other way at once.
MOST_FLIPS = 2


def flipped_queries(trace: Trace, ours: dict[str, Any], key: str, rows: np.ndarray) -> np.ndarray:
    """bool per listed row of the flattened scores `key`: whether flipping undecided query codes gives the golden row.

    The query is recomputed from this package's own attention input; keys are the recorded ones. Every score of the row
    must then agree within the float tolerance. A row that agrees without any flip is explained by a recorded key that
    differs (which the caches' rule counts).
    """
    return np.array([_explained(trace, ours, key, int(row)) for row in rows])


def _explained(trace: Trace, ours: dict[str, Any], key: str, row: int) -> bool:
    layer, phase = int(key.split("/")[0].removeprefix("L")), key.split("/")[1]
    golden = trace.arrays[key]
    golden = golden.reshape(-1, golden.shape[-1])[row]
    x = ours[f"L{layer}/{phase}/attn_in"]
    x = x.reshape(-1, x.shape[-1])[row : row + 1]
    prefill = phase == "prefill"
    batch = row // trace.prompt if prefill else row % trace.batch
    position = row % trace.prompt if prefill else trace.prompt + row // trace.batch
    raw, weights = _query(trace, layer, x, position)
    for keys in _key_tables(trace, layer, batch, golden.size):
        for query in _roundings(raw, trace.cfg.index_format):
            dots = np.maximum(query @ keys.T, 0)
            scores = np.where(np.isfinite(golden), np.sum(dots * weights[:, None], axis=0), golden)
            if np.max(differences(golden, scores), initial=0.0) <= FLOAT_ATOL:
                return True
    return False


def _query(trace: Trace, layer: int, x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Unrounded indexer query [H, D] and head weights [H] of one row."""
    attn = steps.bind(trace.params, trace.cfg).layers[layer].attn
    table = trace.params["freqs"][layer_roles(trace.cfg)[layer].rope]
    rope = tuple(np.asarray(table[part])[position : position + 1] for part in ("cos", "sin"))
    _, latent = attn.query(x, rope)
    query = attn.indexer.query(x, latent, rope, rounded=False)
    return np.asarray(query.q)[0], np.asarray(query.weights)[0]


def _key_tables(trace: Trace, layer: int, batch: int, width: int):
    """Recorded index keys [width, D] that the row may have been scored against: the layer's own, or (raw) any owner's."""
    cfg = trace.cfg
    owners = [layer_roles(cfg)[layer].kv_source]
    owners += [owner.layer for owner in kv_owners(cfg)] if cfg.stale_index_keys else []
    for owner in owners:
        keys = trace.arrays[f"L{owner}/final/index_k_cache"][batch][:width]
        yield np.pad(keys, [(0, width - len(keys)), (0, 0)])


def _roundings(raw: np.ndarray, format_name: str):
    """The rounded query, then its variants with up to MOST_FLIPS undecided components on the other side."""
    fmt = get_format(format_name)
    rounded = np.asarray(fmt.fake_quant(raw))
    groups = np.abs(raw).reshape(*raw.shape[:-1], -1, fmt.group)
    amax = np.maximum(groups.max(axis=-1, keepdims=True), fmt.scale.floor)
    scale = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / fmt.element.largest)))
    scale = np.broadcast_to(scale, groups.shape).reshape(raw.shape)
    yield rounded
    # Moving a component past the boundary by twice the margin shows its other code.
    options = []
    for direction in (1, -1):
        moved = np.asarray(fmt.fake_quant((raw + direction * BOUNDARY * scale).astype(np.float32)))
        options += [(tuple(at), moved[tuple(at)]) for at in np.argwhere(moved != rounded)]
    for count in range(1, MOST_FLIPS + 1):
        for chosen in itertools.combinations(options, count):
            variant = rounded.copy()
            for at, value in chosen:
                variant[at] = value
            yield variant
