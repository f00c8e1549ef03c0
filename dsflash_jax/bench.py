"""`dsflash bench`: prefill and decode speed of one shape, compile time apart, beside the machine's own rates.

A table of measurements, not a test. Prefill fills a fresh prompt and returns last-position logits; decode takes one
token per step on packed caches with a host-built `StepInfo` each time, as a user's loop does.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.peer import Peer, load_peer
from dsflash_jax.shipped import config_path
from dsflash_jax.weights.names import walk

CONTEXT = 16_640  # tokens of the benchmark's cache
PREFILL = (512, 1024, 2048)
DECODE = (512, 1024, 2048, 16_384)
DECODE_STEPS = 48
REPEATS = 5
SEED = 7


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machine does in one large float32 matrix product, and in passes over arrays far larger than caches."""

    gflops: float
    copy_gbytes: float
    read_gbytes: float


def run_bench(config: Path | None = None, peer: str | None = None) -> dict[str, Any]:
    """Measures `config` (default: the shipped `bench_base`) and returns plain JSON types.

    Raises ValueError for an unknown peer, or one that is not installed.
    """
    cfg = ModelConfig.from_json(config or config_path("bench_base"))
    cfg = cfg.replace(max_position_embeddings=max(CONTEXT, cfg.page_size))
    params = steps.init_params(cfg, SEED)
    other = load_peer(peer, cfg, params) if peer else None
    rates = machine_rates()
    rows = [_prefill_row(params, cfg, n, rates) for n in PREFILL]
    rows += [_decode_row(params, cfg, n, rates) for n in DECODE]
    if other is not None:
        rows += _peer_rows(other)
    return {
        "config_sha256": cfg.sha256(),
        "parameters": sum(leaf.size for _, leaf in walk(params)),
        "machine": {
            "processor": platform.machine(), "cores": os.cpu_count(), "jax": jax.__version__,
            "python": platform.python_version(), "matmul_gflops": round(rates.gflops, 1),
            "copy_gbytes_per_s": round(rates.copy_gbytes, 1), "read_gbytes_per_s": round(rates.read_gbytes, 1),
        },
        "rows": rows,
        "topology": compile_topology(),
    }  # fmt: skip


def machine_rates() -> Rates:
    """Best of several runs: a 2048-cubed product, a 256 MB copy (read plus written), a 256 MB matrix-vector product."""
    matrix = jnp.ones((2048, 2048), jnp.float32)
    array = jnp.ones((64 * 2**20,), jnp.float32)
    product = min(_times(jax.jit(lambda m: m @ m), matrix))
    copy = min(_times(jax.jit(lambda a: a + 1), array))
    read = min(_times(jax.jit(lambda a, v: a @ v), array.reshape(-1, 1024), jnp.ones((1024,), jnp.float32)))
    return Rates(2 * 2048**3 / product / 1e9, 2 * array.nbytes / copy / 1e9, array.nbytes / read / 1e9)


def _times(fn: Callable, *args: Any, repeats: int = REPEATS) -> list[float]:
    jax.block_until_ready(fn(*args))
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        out.append(time.perf_counter() - start)
    return out


def _prefill_row(params: steps.Params, cfg: ModelConfig, length: int, rates: Rates) -> dict[str, Any]:
    tokens = np.random.default_rng(length).integers(0, cfg.vocab_size, length).tolist()
    step = make_step([Chunk(0, tokens, 0, range(-(-length // cfg.page_size)))], cfg)
    cache = _cache(cfg)
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        logits, cache = steps.prefill(params, cache, step, cfg)
        jax.block_until_ready(logits)
        seconds.append(time.perf_counter() - start)
    best, work = min(seconds[1:]), prefill_flops(cfg, length)
    return _row("prefill", length, seconds[0], seconds[1:], length / best) | {
        "gflops": round(work / best / 1e9, 1), "share_of_matmul": round(work / best / 1e9 / rates.gflops, 3),
        "bound": "matrix products", "bound_ms": round(1e3 * work / rates.gflops / 1e9, 3),
    }  # fmt: skip


def _decode_row(params: steps.Params, cfg: ModelConfig, length: int, rates: Rates) -> dict[str, Any]:
    cache, seconds = _cache(cfg), []
    for n in range(DECODE_STEPS + 1):
        start = time.perf_counter()
        step = make_step([Chunk(0, [5], length + n, range(-(-(length + n + 1) // cfg.page_size)))], cfg)
        logits, cache = steps.decode(params, cache, step, cfg)
        jax.block_until_ready(logits)
        seconds.append(time.perf_counter() - start)
    best, moved = min(seconds[1:]), decode_bytes(params, cfg)
    return _row("decode", length, seconds[0], seconds[1:], 1 / best) | {
        "gbytes_per_s": round(moved / best / 1e9, 2), "share_of_read": round(moved / best / 1e9 / rates.read_gbytes, 3),
        "bound": "reading active weights", "bound_ms": round(1e3 * moved / rates.read_gbytes / 1e9, 3),
    }  # fmt: skip


def _row(phase: str, length: int, first: float, seconds: list[float], rate: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "tokens": length,
        "first_call_s": round(first, 2),
        "best_ms": round(1e3 * min(seconds), 3),
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "tokens_per_s": round(rate, 1),
    }


def _cache(cfg: ModelConfig) -> ModelCache:
    return ModelCache.empty(cfg, -(-cfg.max_position_embeddings // cfg.page_size), 1)


def active_parameters(cfg: ModelConfig) -> int:
    """Weights that one token meets: all but the embedding and the experts that it is not routed to."""
    total = 0
    for path, leaf in walk(steps.abstract_params(cfg)):
        if path[0] == "embed":
            continue
        share = cfg.num_experts_per_tok / cfg.n_routed_experts if "experts" in path else 1
        total += int(np.prod(leaf.shape) * share)
    return total


def prefill_flops(cfg: ModelConfig, length: int) -> int:
    """Multiply-adds (counted twice) of weights and of attention as published: picked keys only, head once."""
    head = cfg.vocab_size * cfg.hidden_size
    weights = 2 * ((active_parameters(cfg) - head) * length + head)
    position = np.arange(length) + 1
    attention = 0
    for ratio in cfg.layer_ratios:
        keys = np.minimum(position, cfg.sliding_window).sum()
        keys += np.minimum(position // ratio, cfg.index_topk).sum() if ratio else 0
        attention += 4 * cfg.num_attention_heads * cfg.head_dim * int(keys)
    scored = sum((position // cfg.layer_ratios[i]).sum() for i in cfg.index_source_layer_ids)
    return int(weights + attention + 2 * cfg.index_n_heads * cfg.index_head_dim * scored)


def decode_bytes(params: steps.Params, cfg: ModelConfig) -> int:
    """Bytes of weights that one decoded token must read; packed cache rows are small beside them."""
    itemsize = np.dtype(params["head"]["weight"].dtype).itemsize
    return active_parameters(cfg) * itemsize


def compile_topology() -> dict[str, Any]:
    """Trace and compile time of a decode step of the released 40-layer topology at tiny widths."""
    cfg = released_topology()
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), steps.abstract_params(cfg))
    step = make_step([Chunk(0, [1], 40, range(1))], cfg)
    start = time.perf_counter()
    lowered = steps.lower_step(shapes, ModelCache.abstract(cfg, 4, 1), step, cfg)
    traced = time.perf_counter()
    lowered.compile()
    return {
        "layers": cfg.num_hidden_layers,
        "trace_s": round(traced - start, 1),
        "compile_s": round(time.perf_counter() - traced, 1),
    }


def released_topology() -> ModelConfig:
    """The released layer table at tiny widths: every role, source and ratio of the 40 layers."""
    released = ModelConfig.from_json(config_path("v41_flash"))
    return released.replace(
        vocab_size=256, hidden_size=64, num_attention_heads=4, head_dim=32, q_lora_rank=32, qk_rope_head_dim=8,
        o_groups=2, o_lora_rank=16, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        sliding_window=16, index_n_heads=4, index_head_dim=32, index_topk=16, candidate_topk_blocks=8,
        candidate_block_size=4, max_position_embeddings=512, engram_layer_ids=(), dtype="float32",
    )  # fmt: skip


def _peer_rows(other: Peer) -> list[dict[str, Any]]:
    rows = []
    for n in PREFILL:
        first, *seconds = [other.prefill_seconds(n) for _ in range(REPEATS + 1)]
        rows.append(_row(f"prefill ({other.name})", n, first, seconds, n / min(seconds)))
    for n in PREFILL:
        first, *seconds = other.decode_seconds(n, DECODE_STEPS)
        rows.append(_row(f"decode ({other.name})", n, first, seconds, 1 / min(seconds)))
    return rows
