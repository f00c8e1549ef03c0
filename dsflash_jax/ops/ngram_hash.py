"""Hashes of n-grams: which rows of an Engram table every token reads. NumPy on the host, because JAX has no int64.

Per layer and n-gram size (2 up to `engram_max_ngram_size`) there are `engram_n_heads` hash functions, each into its own
run of rows, as many as its prime. Source: golden README section 6 (Engram); the released constants are in
tests/golden/units_engram.npz.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from dsflash_jax.config import ModelConfig

EXCLUDED = -1  # in place of a token id: no token, or one that n-grams do not read (an image position)
SEED_STEP = 10007  # a layer's multipliers come from a generator seeded with this times its number
# Deterministic for all 64-bit numbers (Sorenson and Webster, "Strong pseudoprimes to twelve prime bases").
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
LARGEST_INT64, LARGEST_INT32 = 2**63 - 1, 2**31 - 1


def is_prime(n: int) -> bool:
    """Miller-Rabin with fixed witnesses: exact for n < 2^64."""
    if n < 2 or any(n % p == 0 for p in WITNESSES):
        return n in WITNESSES
    even = n - 1
    twos = (even & -even).bit_length() - 1
    for base in WITNESSES:
        x = pow(base, even >> twos, n)
        if x not in (1, even) and not any((x := x * x % n) == even for _ in range(twos - 1)):
            return False
    return True


def hash_primes(layers: int, sizes: int, heads: int, vocab_size: int) -> np.ndarray:
    """int64[layers, sizes, heads]: the first primes from `vocab_size` on that no earlier layer, size or head has."""
    used: set[int] = set()
    primes = np.zeros((layers, sizes, heads), np.int64)
    for place in np.ndindex(primes.shape):
        start = vocab_size if place[-1] == 0 else int(primes[place[:-1]][place[-1] - 1]) + 1
        primes[place] = next(n for n in itertools.count(start) if n not in used and is_prime(n))
        used.add(int(primes[place]))
    return primes


def hash_multipliers(layer_ids: Sequence[int], max_ngram: int, compressed_vocab: int) -> np.ndarray:
    """int64[layers, max_ngram]: odd factors, so small that a compressed id times a factor stays below 2^63."""
    bound = max(1, LARGEST_INT64 // compressed_vocab // 2)
    drawn = [np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=max_ngram) for layer in layer_ids]
    return np.array(drawn, np.int64).reshape(len(layer_ids), max_ngram) * 2 + 1


def stand_in_token_map(vocab_size: int, compressed_vocab: int) -> np.ndarray:
    """int64[vocab]: runs of neighbouring ids share a compressed id; id // 2 where the map halves the vocabulary.

    For models that were made here and have no tokenizer. A released checkpoint needs its own: `ops/token_map.py`.
    """
    return np.arange(vocab_size, dtype=np.int64) * compressed_vocab // vocab_size


@dataclasses.dataclass(frozen=True, eq=False)
class NgramHash:
    """Everything that turns tokens into table rows, for all Engram layers (L) of a model. C columns = sizes x heads."""

    token_map: np.ndarray  # int64[vocab] compressed ids
    multipliers: np.ndarray  # int64[L, max_ngram]
    primes: np.ndarray  # int64[L, sizes, heads]
    pad: int  # compressed id in place of tokens that there are none of

    @classmethod
    def of(cls, cfg: ModelConfig, token_map: np.ndarray) -> NgramHash:
        """The hashes of a configuration and its tokenizer's map, which `ops/token_map.py` builds.

        Raises ValueError for a map that does not fit the vocabulary, and for `engram_num_embeddings` that are not the
        rows which the hash functions reach.
        """
        vocab, compressed = cfg.vocab_size, cfg.engram_compressed_vocab_size
        if not cfg.engram_layer_ids:
            raise ValueError("engram_layer_ids=[] has no layer to hash n-grams for.")
        token_map = _checked_map(token_map, vocab, compressed)
        sizes = cfg.engram_max_ngram_size - 1
        primes = hash_primes(len(cfg.engram_layer_ids), sizes, cfg.engram_n_heads, cfg.engram_vocab_size)
        rows = primes.sum((1, 2)).tolist()
        if list(cfg.engram_num_embeddings) != rows:
            rule = f"must be {rows}, the sums of each layer's primes from engram_vocab_size={cfg.engram_vocab_size} on"
            raise ValueError(f"engram_num_embeddings={list(cfg.engram_num_embeddings)} {rule}.")
        if max(rows) > LARGEST_INT32:
            raise ValueError(f"engram_num_embeddings={rows} exceed {LARGEST_INT32}: row numbers travel as int32.")
        multipliers = hash_multipliers(cfg.engram_layer_ids, cfg.engram_max_ngram_size, compressed)
        return cls(token_map, multipliers, primes, int(token_map[cfg.engram_pad_token_id]))

    @property
    def lookback(self) -> int:
        """Tokens before its own that an n-gram reads at most."""
        return self.multipliers.shape[1] - 1

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64[L, C]: first row of each column's run."""
        flat = self.primes.reshape(len(self.primes), -1)
        return np.cumsum(flat, axis=1) - flat

    def rows(self, tokens: Sequence[int], context: Sequence[int] = ()) -> np.ndarray:
        """Row numbers int32[T, L, C] of tokens [T] that follow `context` (newest last; only `lookback` are read).

        EXCLUDED ends the look-back in either, as the start of a sequence does: pad stands there and for all before.
        """
        ids = np.asarray(tokens, np.int64).reshape(-1)
        before = np.asarray(context, np.int64).reshape(-1)[max(0, len(context) - self.lookback) :]
        missing = np.full(self.lookback - len(before), EXCLUDED, np.int64)
        ids = np.concatenate([missing, before, ids])
        count = len(ids) - self.lookback
        compressed = np.where(ids >= 0, self.token_map[np.maximum(ids, 0)], self.pad)
        alive, mixed, columns = np.ones(count, bool), np.zeros((count, len(self.primes)), np.int64), []
        for back in range(self.lookback + 1):
            place = slice(self.lookback - back, self.lookback - back + count)
            alive = alive & (ids[place] >= 0)
            slot = np.where(alive, compressed[place], self.pad)
            mixed = mixed ^ slot[:, None] * self.multipliers[:, back]
            if back:
                columns.append(mixed[:, :, None] % self.primes[:, back - 1])
        return (np.concatenate(columns, axis=-1) + self.offsets).astype(np.int32)


@functools.lru_cache(maxsize=32)
def stand_in_hash(cfg: ModelConfig) -> NgramHash:
    """The hashes of a model without a tokenizer, with `stand_in_token_map`, made once.

    Never for a released checkpoint: its tables were trained with its tokenizer's map.
    """
    return NgramHash.of(cfg, stand_in_token_map(cfg.vocab_size, cfg.engram_compressed_vocab_size))


def _checked_map(token_map: np.ndarray, vocab: int, compressed: int) -> np.ndarray:
    token_map = np.asarray(token_map)
    if token_map.shape != (vocab,) or token_map.dtype.kind not in "iu":
        have = f"{token_map.dtype}{list(token_map.shape)}"
        raise ValueError(f"token_map of type {have} must hold one whole number for each of vocab_size={vocab} ids.")
    low, high = int(token_map.min()), int(token_map.max())
    if low < 0 or high >= compressed:
        rule = f"must lie in 0..{compressed - 1}, below engram_compressed_vocab_size={compressed}"
        raise ValueError(f"token_map: compressed id {low if low < 0 else high} {rule}.")
    return token_map.astype(np.int64)
