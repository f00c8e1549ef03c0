"""The unit file of n-gram memory: token map, hash constants and row numbers, all integers and all compared exactly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from dsflash_jax.ops.ngram_hash import EXCLUDED, NgramHash, hash_multipliers, hash_primes
from dsflash_jax.ops.token_map import build_token_map

if TYPE_CHECKING:
    from dsflash_jax.parity.units import Unit

# Of the released configuration; the file holds constants made from it without saying so.
RELEASED_LAYERS, RELEASED_COMPRESSED = (1, 14), 99092


def judge_token_map(unit: Unit) -> None:
    """Every undecodable string is a token of its own, as the file has no names for them."""
    if "engram/tok_map" in unit.arrays:
        ours = build_token_map(json.loads(str(unit["engram/tok_strings_json"])))
        unit.exact("engram/tok_map", ours)
        unit.exact("engram/tok_map_size", np.asarray(ours.max() + 1))


def judge_constants(unit: Unit) -> None:
    """Primes from the first one on: any smaller start between it and the prime before gives the same ones."""
    for at in ("engram/released/", "engram/hash/"):
        if f"{at}primes" not in unit.arrays:
            continue
        golden = unit[f"{at}primes"]
        unit.exact(f"{at}primes", hash_primes(*golden.shape, int(golden[0, 0, 0])))
        layers, compressed = RELEASED_LAYERS, RELEASED_COMPRESSED
        if at == "engram/hash/":
            layers, compressed = unit[f"{at}layer_ids"].tolist(), int(unit[f"{at}token_map"].max()) + 1
        factors = unit[f"{at}multipliers"].shape[1]
        unit.exact(f"{at}multipliers", hash_multipliers(layers, factors, compressed))
        if f"{at}sum_primes" in unit.arrays:
            unit.exact(f"{at}sum_primes", golden.sum((1, 2)))


def judge_rows(unit: Unit) -> None:
    """Row numbers of whole sequences, of sequences with image positions, and of a prefill with decode behind it."""
    at = "engram/hash/"
    if f"{at}ids" not in unit.arrays:
        return
    ids, mask, primes = unit[f"{at}ids"], unit[f"{at}mask"], unit[f"{at}primes"]
    pad = int(unit[f"{at}pad_id"])
    own = NgramHash(unit[f"{at}token_map"], unit[f"{at}multipliers"], primes, pad)
    unit.exact(f"{at}offsets", own.offsets)
    unit.exact(f"{at}all_text", _stacked([own.rows(row) for row in ids]))
    masked = np.where(mask, ids, EXCLUDED)
    unit.exact(f"{at}masked", _stacked([own.rows(row) for row in masked]))
    for match in unit.names(rf"{at}masked_prefill(\d+)_then_text_decode"):
        cut = int(match[1])
        known = np.where(np.arange(ids.shape[1]) < cut, masked, ids)
        parts = [[own.rows(row[:cut]), *_decoded(own, row, cut)] for row in known]
        unit.exact(match[0], _stacked([np.concatenate(part) for part in parts]))


def _decoded(own: NgramHash, row: np.ndarray, start: int) -> list[np.ndarray]:
    return [own.rows(row[at : at + 1], row[:at]) for at in range(start, len(row))]


def _stacked(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack(rows).astype(np.int64)
