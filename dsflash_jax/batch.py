"""Host side of a step: builds `StepInfo` from sequences, padded to buckets, and validates before dispatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.types import GLOBAL_GROUP, StepInfo


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence for one step. `pages` are its global pages in order (enough for start + tokens)."""

    slot: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    previous_token: int = -1
    replay_start: int = 0
    write_floor: int = 0
    last_chunk: bool = True


def bucket(n: int, smallest: int = 1) -> int:
    """The smallest power of two that is at least n and `smallest`."""
    return max(smallest, 1 << max(n - 1, 0).bit_length())


def make_step(
    chunks: Sequence[Chunk],
    cfg: ModelConfig,
    *,
    rows: int | None = None,
    seqs: int | None = None,
    pages: int | None = None,
    verify: bool = False,
) -> StepInfo:
    """Packs chunks into one ragged step of `rows` rows, `seqs` sequences and block tables `pages` wide.

    Sizes default to the next power of two, `pages` to no more than the longest context needs. `verify` also refuses
    more rows per sequence than the caches can roll back. Raises ValueError for a chunk without tokens, token ids out of
    range, positions past `max_position_embeddings`, block tables too short or naming a page twice, repeated or negative
    slots, facts that contradict `start`, and buckets too small.
    """
    for chunk in chunks:
        _check_chunk(chunk, cfg)
        if verify and len(chunk.tokens) > cfg.num_draft_tokens + 1:
            rule = f"exceed num_draft_tokens + 1 = {cfg.num_draft_tokens + 1}, which ring and state can roll back"
            raise ValueError(f"slot {chunk.slot}: {len(chunk.tokens)} rows to verify {rule}.")
    slots = [chunk.slot for chunk in chunks]
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots={slots} must be distinct: one sequence per slot and step.")
    total = sum(len(chunk.tokens) for chunk in chunks)
    widest = max((len(chunk.pages) for chunk in chunks), default=1)
    longest = -(-cfg.max_position_embeddings // cfg.page_size)
    rows, seqs = rows or bucket(total), seqs or bucket(len(chunks))
    pages = pages or min(bucket(widest), max(widest, longest))
    for name, have, need in (("rows", rows, total), ("seqs", seqs, len(chunks)), ("pages", pages, widest)):
        if have < need:
            raise ValueError(f"{name}={have} is smaller than the {need} that this step needs.")
    per_row = {n: np.zeros(rows, np.int32) for n in ("tokens", "row_to_seq")}
    per_row |= {"positions": np.full(rows, -1, np.int32)}
    per_seq = {n: np.zeros(seqs, np.int32) for n in ("start", "length", "replay_start", "write_floor")}
    per_seq |= {n: np.full(seqs, -1, np.int32) for n in ("slot", "last_row", "previous_token")}
    last_chunk, table, row = np.zeros(seqs, bool), np.full((seqs, pages), -1, np.int32), 0
    for s, chunk in enumerate(chunks):
        n = len(chunk.tokens)
        span = slice(row, row + n)
        per_row["tokens"][span], per_row["row_to_seq"][span] = chunk.tokens, s
        per_row["positions"][span] = np.arange(chunk.start, chunk.start + n)
        row += n
        values = {"start": chunk.start, "length": chunk.start + n, "slot": chunk.slot, "last_row": row - 1}
        values |= {k: getattr(chunk, k) for k in ("replay_start", "write_floor", "previous_token")}
        for name, value in values.items():
            per_seq[name][s] = value
        last_chunk[s] = chunk.last_chunk
        table[s, : len(chunk.pages)] = chunk.pages
    return StepInfo(**per_row, **per_seq, last_chunk=last_chunk, block_tables={GLOBAL_GROUP: table})


def _check_chunk(chunk: Chunk, cfg: ModelConfig) -> None:
    n = len(chunk.tokens)
    where = f"slot {chunk.slot}"
    if n == 0:
        raise ValueError(f"{where}: tokens is empty, a chunk needs at least one token.")
    if chunk.slot < 0:
        raise ValueError(f"slot={chunk.slot} must not be negative: only padding has no slot.")
    check_token_ids(chunk.tokens, cfg, where)
    end = chunk.start + n
    if chunk.start < 0:
        raise ValueError(f"{where}: start={chunk.start} must not be negative.")
    if end > cfg.max_position_embeddings:
        limit = cfg.max_position_embeddings
        raise ValueError(f"{where}: positions {chunk.start}..{end - 1} exceed max_position_embeddings={limit}.")
    _check_facts(chunk, cfg, where)
    have, need = len(chunk.pages), -(-end // cfg.page_size)
    if have < need and cfg.kv_source_layer_ids:
        short = f"block table of {have} pages is too short"
        raise ValueError(f"{where}: {short}, {end} tokens need {need} pages of {cfg.page_size}.")
    if min(chunk.pages, default=0) < 0 or len(set(chunk.pages)) != have:
        raise ValueError(f"{where}: pages={list(chunk.pages)} must be distinct and not negative.")


def _check_facts(chunk: Chunk, cfg: ModelConfig, where: str) -> None:
    if not 0 <= chunk.replay_start <= chunk.start:
        raise ValueError(f"{where}: replay_start={chunk.replay_start} must lie in 0..start={chunk.start}.")
    if chunk.write_floor < 0:
        raise ValueError(f"{where}: write_floor={chunk.write_floor} must not be negative.")
    first = chunk.previous_token == -1
    if not first:
        check_token_ids([chunk.previous_token], cfg, f"{where}, previous_token")
    if cfg.token_shift and first != (chunk.start == 0):
        rule = "the token before start, which token_shift reads; -1 at start 0 only"
        raise ValueError(f"{where}: previous_token={chunk.previous_token} at start={chunk.start} must be {rule}.")


def check_token_ids(tokens: Sequence[int], cfg: ModelConfig, where: str) -> None:
    """Raises ValueError, its sentence starting with `where`, if an id is not an integer in 0..vocab_size - 1."""
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{where}: token ids of type {ids.dtype} must be integers.")
    outside = (ids < 0) | (ids >= cfg.vocab_size)
    if outside.any():
        raise ValueError(f"{where}: token id {ids[outside][0]} is outside 0..{cfg.vocab_size - 1}.")


def check_capacity(chunks: Sequence[Chunk], cache: ModelCache) -> None:
    """Raises ValueError if a chunk names a page or slot that the cache does not have."""
    num_pages, num_slots = cache.pages.shape[0], cache.ring.shape[0]
    for chunk in chunks:
        if not 0 <= chunk.slot < num_slots:
            raise ValueError(f"slot {chunk.slot} is outside the cache's 0..{num_slots - 1}.")
        bad = [p for p in chunk.pages if not 0 <= p < num_pages]
        if bad:
            raise ValueError(f"slot {chunk.slot}: page {bad[0]} is outside the cache's 0..{num_pages - 1}.")
