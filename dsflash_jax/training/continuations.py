"""Rows that the model itself continued: what draft layers meet when they serve, and data rows are not.

DSpark trains drafts on responses of the target for the same reason. Half of the rows are continued greedily, half are
drawn at temperature 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax.cache.layout import pages_for
from dsflash_jax.config import ModelConfig
from dsflash_jax.sampling import sample
from dsflash_jax.session import Session

SEQUENCES = 256  # that grow together: one decode step serves them all


def continued(params: Any, cfg: ModelConfig, prompts: np.ndarray, new: int, seed: int) -> np.ndarray:
    """int32[N, P + new]: prompts int32[N, P] and `new` tokens that the model put behind each.

    Even rows are greedy, odd ones drawn at temperature 1. Equal arguments give equal rows.
    """
    if not new:
        return prompts
    parts = []
    for first in range(0, len(prompts), SEQUENCES):
        parts.append(_grow(params, cfg, prompts[first : first + SEQUENCES], new, jax.random.key(seed), first))
    return np.concatenate(parts)


def _grow(params: Any, cfg: ModelConfig, prompts: np.ndarray, new: int, key: jax.Array, first: int) -> np.ndarray:
    count, length = prompts.shape
    pages = pages_for(cfg, length + new)
    session = Session(
        params, cfg, num_pages=count * pages, sequences=count, prefill_rows=16 * length, table_pages=pages
    )
    temperature = jnp.arange(count, dtype=jnp.float32) % 2
    rows, tokens = [prompts], prompts
    for position in range(length, length + new):
        logits = session.append(dict(enumerate(tokens.tolist())))
        drawn = jax.random.fold_in(jax.random.fold_in(key, first), position)
        tokens = np.asarray(_choose(logits, jax.random.split(drawn, count), temperature))[:, None]
        rows.append(tokens)
    return np.concatenate(rows, axis=1, dtype=np.int32)


_choose = jax.jit(jax.vmap(sample))
