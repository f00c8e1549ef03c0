"""What a configuration costs at run time, measured on real caches: bytes per token and time per decoded token."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dsflash_jax.batch import bucket
from dsflash_jax.cache.layout import pages_for
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.cache.pages import PagePool
from dsflash_jax.config import ModelConfig
from dsflash_jax.session import Session
from dsflash_jax.steps import Params

_SEQUENCE = "timed"


def measured_kv_bytes(cfg: ModelConfig, short: int, long: int) -> dict[str, Any]:
    """Bytes that one sequence's cache arrays hold at two lengths (tokens), and what one more token adds.

    The arrays are allocated and asked for their size; `cache/layout.py`'s formulas are not. `fixed` (window rings and
    compressor state) does not grow with the length; `per_token` is the slope between the two lengths.
    Raises ValueError unless both are whole pages, short below long: a page begun would count as tokens.
    """
    if short % cfg.page_size or long % cfg.page_size or not 0 < short < long:
        raise ValueError(f"lengths {short}, {long} must be ascending multiples of page_size={cfg.page_size}.")
    pages, fixed = {}, {}
    for tokens in (short, long):
        num_pages = len(PagePool(long // cfg.page_size, cfg.page_size).reserve(_SEQUENCE, tokens))
        cache = ModelCache.empty(cfg, num_pages, num_slots=1)
        pages[tokens], fixed[tokens] = cache.pages.nbytes, cache.ring.nbytes + cache.state.nbytes
    return {
        "per_token": (pages[long] - pages[short]) / (long - short),
        "fixed": fixed[short],
        "sequence": {str(tokens): pages[tokens] + fixed[tokens] for tokens in (short, long)},
    }


def decode_seconds(
    params: Params,
    cfg: ModelConfig,
    tokens: Sequence[int],
    context: int,
    warmup: int = 8,
) -> dict[str, Any]:
    """Seconds of one `decode` call once the caches hold `context` tokens, batch 1.

    tokens[:context] fill the caches, one decode call each: the caches then hold what a prefill writes, and nothing but
    the timed call has to be compiled. The tokens that follow are timed, all but the first `warmup`: median, 10th and
    90th percentile. Building a step on the host is not part of it.
    Raises ValueError when no token is left to time, FloatingPointError when the last logits are not finite.
    """
    timed = len(tokens) - context - warmup
    if context < 1 or timed < 1:
        raise ValueError(f"context={context} of {len(tokens)} tokens leaves none to time after warmup={warmup}.")
    num_pages = bucket(pages_for(cfg, len(tokens)))
    session = Session(params, cfg, num_pages=num_pages, table_pages=num_pages)
    times, logits = time_decode(session, _SEQUENCE, tokens)
    if not np.isfinite(np.asarray(logits)).all():
        raise FloatingPointError(f"logits of position {len(tokens) - 1} are not finite: the time would mean nothing.")
    low, median, high = np.percentile([each.step for each in times[-timed:]], [10, 50, 90])
    return {"context": context, "steps": timed, "median": float(median), "p10": float(low), "p90": float(high)}


class StepSeconds(NamedTuple):
    """Seconds of one decode step: building and placing its `StepInfo`, then the call until its arrays are there."""

    host: float
    step: float


def time_decode(session: Session, sequence: Hashable, tokens: Sequence[int]) -> tuple[list[StepSeconds], jax.Array]:
    """Appends tokens one by one to a sequence, timing each step; and the last logits [1, V]."""
    times = []
    for token in tokens:
        begin = time.perf_counter()
        planned = session.plan({sequence: [int(token)]})
        planned = planned._replace(step=jax.block_until_ready(jax.device_put(planned.step)))
        placed = time.perf_counter()
        logits = session.run(planned)
        jax.block_until_ready((logits, session.cache))
        times.append(StepSeconds(placed - begin, time.perf_counter() - placed))
    return times, logits
