"""Selecting global entries for the query rows of a ragged step, reading packed index keys from the pages.

Two ways with one result: `select_plain` does what is cheap on a CPU, `select_kernels` chains the ops' GPU kernels.
"""

from __future__ import annotations

import functools

import jax
from jax import lax

from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.select_forms import Query, wanted_forms
from dsflash_jax.modules.select_kernels import select_kernels
from dsflash_jax.modules.select_plain import select_plain
from dsflash_jax.modules.step_index import Tiles
from dsflash_jax.roles import LayerRole
from dsflash_jax.types import Published, StepInfo


def select(
    query: Query,
    published: Published,
    step: StepInfo,
    tiles: Tiles,
    pages: jax.Array,
    role: LayerRole,
    cfg: ModelConfig,
    capture: dict | None = None,
) -> Published:
    """Fresh top-k of an index source, with the candidate pool built or read as the layer's role says."""
    static = {"role": role, "cfg": cfg, "forms": wanted_forms(step, tiles, role, cfg, capture is not None)}
    plain, kernels = (functools.partial(way, **static) for way in (select_plain, select_kernels))
    args = (query, published, step, tiles, pages)
    if cfg.implementation:
        picked, scores = (plain if cfg.implementation == "xla" else kernels)(*args)
    elif cfg.stale_index_keys or cfg.score_dtype != "float32":  # no kernel reproduces these
        picked, scores = plain(*args)
    else:
        picked, scores = lax.platform_dependent(*args, cuda=kernels, default=plain)
    if capture is not None:
        capture["index_score"] = scores
    if role.builds_candidates:
        return picked
    return picked._replace(candidates_TxC=published.candidates_TxC, pool_TxB=published.pool_TxB)
