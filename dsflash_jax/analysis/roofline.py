"""What a step must at least compute and read, and which of the two bounds its time. Functions of a configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import layer_roles
from dsflash_jax.steps import abstract_params
from dsflash_jax.weights.names import walk

OVERHEAD = 3.0  # a step that takes longer than this many times its larger bound is bound by neither


class Work(NamedTuple):
    """Floating-point operations (a multiply-add is two) and bytes read."""

    flops: int
    nbytes: int


class Rates(NamedTuple):
    """What a machine reaches: operations and bytes per second."""

    flops: float
    nbytes: float


def step_work(cfg: ModelConfig, rows: int, start: int = 0) -> Work:
    """What one step of one sequence needs at least: `rows` tokens from position `start`, logits of the last one.

    Weights that a token meets, attention over picked keys only, scores of the visible entries (of the candidate pool,
    where a layer reads one). Bytes count what is needed once, however often tiles read it: weights (of as many experts
    as the rows can choose), window rows, index keys scanned and entries picked, packed. Activations are left out.
    """
    weights, attention = _weight_work(cfg, rows), _attention_work(cfg, rows, start)
    return Work(weights.flops + attention.flops, weights.nbytes + attention.nbytes)


def _weight_work(cfg: ModelConfig, rows: int) -> Work:
    flops = nbytes = 0
    chosen = cfg.num_experts_per_tok / cfg.n_routed_experts
    for path, leaf in walk(abstract_params(cfg)):
        size, itemsize = int(np.prod(leaf.shape)), np.dtype(leaf.dtype).itemsize
        if path[0] == "embed":  # looked up, not multiplied
            nbytes += rows * cfg.hidden_size * itemsize
            continue
        if path[-3:-1] == ("engram", "embed"):  # n-gram tables: as many rows as there are hash functions
            nbytes += rows * (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads * leaf.shape[1] * itemsize
            continue
        routed = "experts" in path
        meets = 1 if path[0] == "head" else rows
        flops += int(2 * meets * size * (chosen if routed else 1))
        nbytes += int(size * itemsize * (min(1, rows * chosen) if routed else 1))
    return Work(flops, nbytes)


def _attention_work(cfg: ModelConfig, rows: int, start: int) -> Work:
    layout, position = cache_layout(cfg), np.arange(start, start + rows)
    pair = 4 * cfg.num_attention_heads * cfg.head_dim  # q.k and weight.v of one key
    flops = nbytes = 0
    for role in layer_roles(cfg):
        flops += pair * int(np.minimum(position + 1, cfg.sliding_window).sum())
        nbytes += min(start + rows, cfg.sliding_window - 1 + rows) * layout.ring[role.layer].row_bytes
        if not role.ratio:
            continue
        visible = (position + 1) // role.ratio
        picked = int(np.minimum(visible, cfg.index_topk).sum())
        flops += pair * picked
        nbytes += min(picked, int(visible[-1])) * layout.member(role.kv_source, "main").row_bytes
        if role.indexes:
            pool = cfg.candidate_topk_blocks * cfg.candidate_block_size if role.reads_candidates else visible[-1]
            scanned = int(np.minimum(visible, pool).sum())
            flops += 2 * cfg.index_n_heads * cfg.index_head_dim * scanned
            nbytes += min(scanned, int(visible[-1])) * layout.member(role.kv_source, "index").row_bytes
    return Work(flops, nbytes)


def limits(seconds: float, work: Work, rates: Rates) -> dict[str, Any]:
    """Rates reached, the two bounds, and what limits: the larger bound's name, or "overhead" far above both."""
    flop_bound, byte_bound = work.flops / rates.flops, work.nbytes / rates.nbytes
    larger = max(flop_bound, byte_bound)
    name = "matrix products" if flop_bound >= byte_bound else "memory reads"
    return {
        "gflops": round(work.flops / seconds / 1e9, 1),
        "gbytes_per_s": round(work.nbytes / seconds / 1e9, 2),
        "flop_bound_ms": round(1e3 * flop_bound, 3),
        "byte_bound_ms": round(1e3 * byte_bound, 3),
        "times_bound": round(seconds / larger, 2),
        "limited_by": name if seconds <= OVERHEAD * larger else "overhead",
    }
