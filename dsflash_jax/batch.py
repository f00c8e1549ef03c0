"""Host side of a step: builds `StepInfo` from sequences, padded to buckets, and validates before dispatch.

`make_step` checks what a configuration allows; the `check_*` functions behind it, which `steps.py` calls before it
dispatches, check a step against its cache: by shapes and NumPy leaves only, so that no device is waited for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsflash_jax.cache.layout import cache_layout, pages_for, spare_rows
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.config_rules import QUANT_BLOCK
from dsflash_jax.ops.ngram_hash import EXCLUDED, NgramHash
from dsflash_jax.replay import decoder_rows, tail_rows
from dsflash_jax.roles import decoder_start
from dsflash_jax.types import GLOBAL_GROUP, NgramRows, StepInfo


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence for one step. `pages` are its global pages in order (enough for start + tokens).

    context: the tokens before `start`, newest last, which n-grams look back on; at least the last
      `engram_max_ngram_size` - 1 of those there are. EXCLUDED (-1) stands for a token that n-grams do not read.
    alive: per token whether n-grams read it and it reads them; image positions do not. None = all.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    previous_token: int = -1
    replay_start: int = 0
    write_floor: int = 0
    last_chunk: bool = True
    context: Sequence[int] = ()
    alive: Sequence[bool] | None = None


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
    ngram_hash: NgramHash | None = None,
) -> StepInfo:
    """Packs chunks into one ragged step of `rows` rows, `seqs` sequences and block tables `pages` wide.

    Sizes default to the next power of two, `pages` to no more than the longest context needs. `ngram_hash` is what
    Engram layers need: `NgramHash.of` a tokenizer's map, or `stand_in_hash` for a model that has no tokenizer.

    Raises ValueError for a chunk without tokens, token ids out of range, positions past `max_position_embeddings`,
    block tables too short or naming a page twice, repeated or negative slots, facts that contradict `start`, a context
    too short for the n-grams, Engram layers without a hash, and buckets too small.
    """
    check_hash(ngram_hash, cfg)
    for chunk in chunks:
        _check_chunk(chunk, cfg)
    slots = [chunk.slot for chunk in chunks]
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots={slots} must be distinct: one sequence per slot and step.")
    total = sum(len(chunk.tokens) for chunk in chunks)
    widest = max((len(chunk.pages) for chunk in chunks), default=1)
    longest = pages_for(cfg, cfg.max_position_embeddings)
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
    ngrams = _ngram_rows(chunks, rows, ngram_hash) if cfg.engram_layer_ids else None
    return StepInfo(**per_row, **per_seq, last_chunk=last_chunk, block_tables={GLOBAL_GROUP: table}, ngrams=ngrams)


def _ngram_rows(chunks: Sequence[Chunk], rows: int, ngram_hash: NgramHash) -> NgramRows:
    """Row numbers of all tokens; none in padding rows and for excluded tokens, whose gate is closed."""
    layers, columns = ngram_hash.offsets.shape
    index, row = np.full((rows, layers, columns), -1, np.int32), 0
    for chunk in chunks:
        alive = np.ones(len(chunk.tokens), bool) if chunk.alive is None else np.asarray(chunk.alive)
        found = ngram_hash.rows(np.where(alive, chunk.tokens, EXCLUDED), chunk.context)
        index[row : row + len(found)] = np.where(alive[:, None, None], found, -1)
        row += len(found)
    return NgramRows(index)


def check_hash(ngram_hash: NgramHash | None, cfg: ModelConfig) -> None:
    """Raises ValueError for Engram layers without a hash: another token map reads other rows and no error shows it."""
    if cfg.engram_layer_ids and ngram_hash is None:
        rule = "need ngram_hash: NgramHash.of the tokenizer's map, or stand_in_hash for a model without a tokenizer"
        raise ValueError(f"engram_layer_ids={list(cfg.engram_layer_ids)} {rule}.")


def check_tokens(tokens: Sequence[int], start: int, cfg: ModelConfig, where: str) -> None:
    """Raises ValueError, its sentence starting with `where`, unless `tokens` may stand at `start` and after it."""
    n = len(tokens)
    if n == 0:
        raise ValueError(f"{where}: tokens is empty, a chunk needs at least one token.")
    check_token_ids(tokens, cfg, where)
    if start < 0:
        raise ValueError(f"{where}: start={start} must not be negative.")
    if start + n > cfg.max_position_embeddings:
        limit = cfg.max_position_embeddings
        raise ValueError(f"{where}: positions {start}..{start + n - 1} exceed max_position_embeddings={limit}.")


def _check_chunk(chunk: Chunk, cfg: ModelConfig) -> None:
    where = f"slot {chunk.slot}"
    if chunk.slot < 0:
        raise ValueError(f"slot={chunk.slot} must not be negative: only padding has no slot.")
    check_tokens(chunk.tokens, chunk.start, cfg, where)
    _check_facts(chunk, cfg, where)
    if cfg.engram_layer_ids:
        _check_lookback(chunk, cfg, where)
    end = chunk.start + len(chunk.tokens)
    have, need = len(chunk.pages), pages_for(cfg, end)
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


def _check_lookback(chunk: Chunk, cfg: ModelConfig, where: str) -> None:
    have, need = len(chunk.context), min(chunk.start, cfg.engram_max_ngram_size - 1)
    if not need <= have <= chunk.start:
        rule = f"must hold {need} to {chunk.start}: n-grams of {cfg.engram_max_ngram_size} look back across chunks"
        raise ValueError(f"{where}: context of {have} tokens at start={chunk.start} {rule}.")
    known = [token for token in chunk.context if token != EXCLUDED]
    if known:
        check_token_ids(known, cfg, f"{where}, context")
    if chunk.alive is None:
        return
    alive = np.asarray(chunk.alive)
    if alive.shape != (len(chunk.tokens),) or alive.dtype != bool:
        have, count = f"{alive.dtype}{list(alive.shape)}", len(chunk.tokens)
        raise ValueError(f"{where}: alive of type {have} must hold true or false for each of {count} tokens.")


def check_token_ids(tokens: Sequence[int], cfg: ModelConfig, where: str) -> None:
    """Raises ValueError, its sentence starting with `where`, if an id is not an integer in 0..vocab_size - 1."""
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{where}: token ids of type {ids.dtype} must be integers.")
    outside = (ids < 0) | (ids >= cfg.vocab_size)
    if outside.any():
        raise ValueError(f"{where}: token id {ids[outside][0]} is outside 0..{cfg.vocab_size - 1}.")


def check_cache(cache: ModelCache, cfg: ModelConfig) -> None:
    """Raises ValueError if the caches have other rows than those of `cfg`. Pages may be wider than the global group."""
    page_bytes, ring_bytes, state = _row_shapes(cfg)
    for name, have, need, fits in (
        ("pages", cache.pages.shape[1], page_bytes, cache.pages.shape[1] >= page_bytes),
        ("ring", cache.ring.shape[1], ring_bytes, cache.ring.shape[1] == ring_bytes),
        ("state", cache.state.shape[1:], state, cache.state.shape[1:] == state),
    ):
        if not fits:
            rule = f"must be {need} for this configuration: the cache was made for another one"
            raise ValueError(f"cache.{name} with {have} per row {rule}.")


def check_tail(cache: ModelCache, cfg: ModelConfig, decoder: str) -> None:
    """Raises ValueError if the cache keeps fewer encoder states than `decoder` starts from, or there is no decoder."""
    need = tail_rows(cfg, decoder)
    if not need:
        raise ValueError(f"decoder={decoder!r} needs a decoder, and without kv_source_layer_ids there is none.")
    encoder = [layer for layer in cfg.dspark_target_layer_ids if layer < decoder_start(cfg)]
    if encoder and cfg.num_nextn_predict_layers:
        rule = f"does not run layers {encoder} on the rows that the draft layers read (dspark_target_layer_ids)"
        raise ValueError(f"decoder={decoder!r} {rule}: use 'all'.")
    have = 0 if cache.tail is None else cache.tail.pre.shape[1]
    if have < need:
        rule = f"needs a cache with {need} encoder states per slot, this one has {have}"
        raise ValueError(f"decoder={decoder!r} {rule}: make it with decoder={decoder!r}.")


def rows_to_run(step: StepInfo, cfg: ModelConfig, decoder: str) -> tuple[int, ...]:
    """Rows per sequence of each decoder layer for the prompts that end in `step`; () where none ends.

    No more than the longest of them has, as a power of two, so that few shapes are compiled. A step on a device is not
    waited for: it gets the rows of the longest prompt.
    """
    rows = decoder_rows(cfg, decoder)
    facts = (step.slot, step.length, step.replay_start, step.last_chunk)
    if not all(isinstance(leaf, np.ndarray) for leaf in facts):
        return rows
    ending = step.last_chunk & (step.slot >= 0)
    if not ending.any():
        return ()
    longest = bucket(int((step.length - step.replay_start)[ending].max()))
    return tuple(min(count, longest) for count in rows)


@functools.lru_cache(maxsize=64)
def _row_shapes(cfg: ModelConfig) -> tuple[int, int, tuple[int, ...]]:
    layout = cache_layout(cfg)
    return layout.page_bytes, layout.ring_bytes, (len(layout.state_owners), layout.state_rows, layout.state_width)


def check_step(step: StepInfo, cache: ModelCache) -> None:
    """Raises ValueError if a step names a slot or a page that the cache does not have."""
    _check_range("slot", step.slot, cache.ring.shape[0], "slots")
    for group, table in step.block_tables.items():
        _check_range(f"page of block_tables[{group!r}]", table, cache.pages.shape[0], "pages")


def _check_range(field: str, values: Any, count: int, what: str, owner: str = "the cache") -> None:
    if not isinstance(values, np.ndarray) or not values.size or (values.min() >= -1 and values.max() < count):
        return
    bad = values[(values < -1) | (values >= count)][0]
    raise ValueError(f"{field}={bad} must lie in 0..{count - 1}, or be -1 for none: {owner} has {count} {what}.")


def check_ngrams(step: StepInfo, params: Mapping[str, Any], cfg: ModelConfig) -> None:
    """Raises ValueError if a step lacks the rows that the Engram layers of `cfg` read, or a table is not as they are.

    A table that is not among the parameters stays on the host: then the step must bring the fetched rows.
    """
    if not cfg.engram_layer_ids:
        return
    columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    need = (step.num_rows, len(cfg.engram_layer_ids), columns)
    if step.ngrams is None or step.ngrams.index.shape != need:
        have = None if step.ngrams is None else step.ngrams.index.shape
        raise ValueError(f"ngrams.index of shape {have} must be {need}: rows, engram_layer_ids, rows of a table each.")
    width, fetched = cfg.engram_head_dim, step.ngrams.fetched
    row_bytes = width + width // QUANT_BLOCK
    if fetched is not None and (fetched.shape[0], fetched.shape[2:]) != (need[1], (row_bytes,)):
        raise ValueError(f"ngrams.fetched of shape {fetched.shape} must be ({need[1]}, rows, {row_bytes}).")
    for at, (layer, rows) in enumerate(zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True)):
        name, index = f"layers.{layer}.engram.embed", step.ngrams.index[:, at]
        if fetched is not None:
            _check_range(f"ngrams.index of {name}", index, fetched.shape[1], "fetched rows", "the step")
            continue
        table = params["layers"][layer]["engram"].get("embed")
        if not table:
            rule = "is not among the parameters: fetch the rows of every step from the host (HostTables.fetch)"
            raise ValueError(f"{name}.weight {rule}.")
        for part, shape in (("weight", (rows, width)), ("scale", (rows, width // QUANT_BLOCK))):
            if table[part].shape != shape or table[part].dtype != np.uint8:
                have = f"{table[part].dtype}{list(table[part].shape)}"
                raise ValueError(f"{name}.{part} of type {have} must be uint8{list(shape)} (engram_num_embeddings).")
        _check_range(f"ngrams.index of {name}", index, rows, "rows", "the table")


def few_rows(step: StepInfo, cfg: ModelConfig) -> bool:
    """Whether the step has so few rows that no sequence can have more than the ring has to spare; static."""
    return step.num_rows <= spare_rows(cfg)


def check_few_rows(step: StepInfo, cfg: ModelConfig) -> None:
    """Raises ValueError for a sequence with more rows than ring and compressor state can roll back."""
    rows, most = _rows(step), spare_rows(cfg)
    if rows is not None and rows.max(initial=0) > most:
        worst = int(rows.argmax())
        rule = f"exceed num_draft_tokens + 1 = {most}, which ring and state can roll back"
        raise ValueError(f"slot {step.slot[worst]}: {rows[worst]} rows {rule}.")


def check_accepted(step: StepInfo, accepted: Any) -> None:
    """Raises ValueError unless `accepted` is [S] whole numbers, from 0 to the rows of each sequence of the step."""
    if accepted.shape != step.slot.shape or accepted.dtype.kind not in "iu":
        have = f"{accepted.dtype}{list(accepted.shape)}"
        raise ValueError(f"accepted of type {have} must hold one whole number for each of {step.num_seqs} sequences.")
    rows = _rows(step)
    if rows is None or not isinstance(accepted, np.ndarray):
        return
    wrong = ((accepted < 0) | (accepted > rows)) & (np.asarray(step.slot) >= 0)
    if wrong.any():
        s = int(wrong.argmax())
        raise ValueError(f"slot {step.slot[s]}: accepted={accepted[s]} must lie in 0..{rows[s]}, the rows verified.")


def _rows(step: StepInfo) -> np.ndarray | None:
    """[S] rows of each sequence; None where the step lies on a device."""
    known = all(isinstance(leaf, np.ndarray) for leaf in (step.start, step.length, step.slot))
    return step.length - step.start if known else None
