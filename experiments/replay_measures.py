"""What decoder replay changes in one model: its next-token distributions, its recall, and the time of a prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dsflash_jax import steps
from dsflash_jax.analysis.agreement import kl_divergence, same_best
from dsflash_jax.analysis.recall import LagBuckets, recall
from dsflash_jax.batch import Chunk, bucket, make_step
from dsflash_jax.cache.layout import pages_for
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.replay import token_layers
from dsflash_jax.training.data import Batch

TRUNCATED = "truncated"  # the control: the last window of the prompt as a prompt of its own, without global context
COMPARED = ("exact", "replay", TRUNCATED)  # with "all", which runs every layer on every token


def agreement_rows(
    params: Any, cfg: ModelConfig, batches: Sequence[Batch], lengths: Sequence[int], follow: int
) -> Iterator[dict[str, Any]]:
    """Per prompt length and mode: KL(all || mode) in nats, shared best tokens, and recall by distance.

    The prompt is the first tokens of a row; `follow` more are decoded, teacher-forced, so rings left behind are used.
    Raises ValueError for a prompt that leaves fewer than follow + 1 tokens of its row.
    """
    for length in lengths:
        if length + follow + 1 > batches[0].tokens.shape[1]:
            raise ValueError(f"length={length} and follow={follow} exceed rows of {batches[0].tokens.shape[1]} tokens.")
        found = {mode: [answers(params, cfg, batch, length, mode, follow) for batch in batches]
                 for mode in ("all", *COMPARED)}  # fmt: skip
        whole = {mode: np.concatenate(parts, axis=1) for mode, parts in found.items()}
        for mode, logits in whole.items():
            row = {"length": length, "mode": mode, "recall": _recall(logits, cfg, batches, length)}
            yield row if mode == "all" else row | _distance(whole["all"], logits)


def _distance(logits: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """The first row lies behind the prompt, the others behind decoded tokens: both are of interest, apart."""
    kl, same = kl_divergence(logits, others), same_best(logits, others)
    parts = {"prompt": (kl[0], same[0]), "decoded": (kl[1:], same[1:])}
    return {
        name: {"positions": k.size, "kl_mean": float(k.mean()), "kl_max": float(k.max()), "same_best": int(s.sum())}
        for name, (k, s) in parts.items() if k.size
    }  # fmt: skip


def _recall(logits: np.ndarray, cfg: ModelConfig, batches: Sequence[Batch], length: int) -> dict[str, Any]:
    """Recall over the answers that these logits predict; logits[j] stands at position length - 1 + j of the row."""
    span = slice(length - 1, length - 1 + logits.shape[0])
    columns = {name: np.concatenate([getattr(b, name)[:, span] for b in batches])
               for name in ("targets", "answer_mask", "lag", "aligned")}  # fmt: skip
    correct = logits.argmax(axis=-1).T == columns["targets"]
    buckets = LagBuckets.for_model(cfg.sliding_window, cfg.num_hidden_layers)
    return recall(correct, columns["answer_mask"], columns["lag"], columns["aligned"], buckets).as_json()["by_bucket"]


def answers(params: Any, cfg: ModelConfig, batch: Batch, length: int, mode: str, follow: int) -> np.ndarray:
    """float32 logits [1 + follow, B, V] behind the first `length` tokens of each row and behind those decoded next."""
    rows, context = batch.tokens.shape
    first = max(0, length - cfg.sliding_window) if mode == TRUNCATED else 0
    decoder = "all" if mode == TRUNCATED else mode
    pages = pages_for(cfg, context)
    cache = ModelCache.empty(cfg, rows * pages, rows, decoder=decoder)
    tokens = batch.tokens[:, first:]

    def step(start: int, end: int, size: int):
        chunks = [
            Chunk(r, tokens[r, start:end].tolist(), start, range(r * pages, (r + 1) * pages),
                  previous_token=int(tokens[r, start - 1]) if start else -1)
            for r in range(rows)
        ]  # fmt: skip
        return make_step(chunks, cfg, rows=size, seqs=rows, pages=pages)

    at = length - first
    # One shape for every length: a compilation takes longer than the padding.
    logits, cache = steps.prefill(params, cache, step(0, at, bucket(rows * context)), cfg, decoder=decoder)
    found = [logits]
    for position in range(at, at + follow):
        logits, cache = steps.decode(params, cache, step(position, position + 1, rows), cfg)
        found.append(logits)
    return np.stack([np.asarray(part) for part in found])


def prefill_rows(
    params: Any, cfg: ModelConfig, name: str, tokens: Sequence[int], lengths: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Per prompt length and mode: seconds of a cold prefill of one prompt, compiled before; best and median.

    The modes take turns, so that a slow minute of the machine hits all of them.
    """
    for length in lengths:
        modes = ("all", "replay", "exact")
        compiled = {mode: _prefill_seconds(params, cfg, tokens[:length], mode) for mode in modes}
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(repeats):
            for mode in modes:
                seconds[mode].append(_prefill_seconds(params, cfg, tokens[:length], mode))
        for mode in modes:
            yield {
                "model": name, "tokens": length, "mode": mode, "token_layers": token_layers(cfg, length, mode),
                "first_call_s": compiled[mode], "best_s": min(seconds[mode]),
                "median_s": float(np.median(seconds[mode])), "repeats": repeats,
            }  # fmt: skip


def _prefill_seconds(params: Any, cfg: ModelConfig, tokens: Sequence[int], decoder: str) -> float:
    pages = pages_for(cfg, len(tokens))
    step = make_step([Chunk(0, list(tokens), 0, range(pages))], cfg)
    cache = jax.block_until_ready(ModelCache.empty(cfg, pages, 1, decoder=decoder))
    begin = time.perf_counter()
    jax.block_until_ready(steps.prefill(params, cache, step, cfg, decoder=decoder))
    return time.perf_counter() - begin
