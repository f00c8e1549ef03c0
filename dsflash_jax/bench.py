"""`dsflash bench`: prefill and decode speed of one shape, compile time apart, beside the machine's own rates.

A table of measurements, not a test. Prefill fills a fresh prompt of random tokens and returns last-position logits;
decode first really prefills such a prompt, then takes the random tokens that follow it one per step, on packed caches,
with a host-built `StepInfo` each time, as a user's loop does. A peer is given the same tokens.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.analysis.cost import time_decode
from dsflash_jax.analysis.roofline import Rates, limits, step_work
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.layout import pages_for
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.peer import Peer, load_peer
from dsflash_jax.session import Session
from dsflash_jax.shipped import config_path
from dsflash_jax.weights.names import walk

SEED = 7
REPEATS = 5
PREFILL_CHUNK = 2048  # rows of a prefill step at most
_SEQUENCE = "timed"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured. `context` is the tokens of the cache, whatever the configuration's limit; prompts fit it."""

    context: int = 16_640
    prefill: tuple[int, ...] = (512, 1024, 2048)
    decode: tuple[int, ...] = (512, 1024, 2048, 16_384)
    peer_decode: tuple[int, ...] = (512, 1024, 2048)
    decode_steps: int = 48


def run_bench(config: Path | None = None, peer: str | None = None, plan: Plan = Plan()) -> dict[str, Any]:  # noqa: B008
    """Measures `config` (default: the shipped `bench_base`) and returns plain JSON types.

    Raises ValueError for an unknown peer, or one that is not installed.
    """
    given = ModelConfig.from_json(config or config_path("bench_base"))
    cfg = given.replace(max_position_embeddings=plan.context)
    params = steps.init_params(cfg, SEED)
    other = load_peer(peer, cfg, params) if peer else None
    rates, tokens = machine_rates(), random_tokens(cfg, plan.context)
    rows = [_prefill_row(params, cfg, tokens[:n], rates) for n in plan.prefill]
    rows += [_decode_row(params, cfg, tokens[:n], tokens[n : n + plan.decode_steps + 1], rates) for n in plan.decode]
    if other is not None:
        rows += _peer_rows(other, tokens, plan)
    return {
        "config_sha256": cfg.sha256(),
        "parameters": sum(leaf.size for _, leaf in walk(params)),
        "context_tokens": cfg.max_position_embeddings,
        "context_of_the_config_file": given.max_position_embeddings,
        "machine": {
            "processor": platform.machine(), "cores": os.cpu_count(), "jax": jax.__version__,
            "python": platform.python_version(), "matmul_gflops": round(rates.flops / 1e9, 1),
            "read_gbytes_per_s": round(rates.nbytes / 1e9, 1), "copy_gbytes_per_s": round(copy_rate() / 1e9, 1),
        },
        "rows": rows,
        "topology": compile_topology(),
    }  # fmt: skip


def random_tokens(cfg: ModelConfig, count: int) -> list[int]:
    """Seeded token ids, the same for every row of the table and for the peer."""
    return np.random.default_rng(SEED).integers(0, cfg.vocab_size, count).tolist()


def machine_rates() -> Rates:
    """Best of several runs: a 2048-cubed float32 product, and a matrix-vector product over 256 MB, more than caches."""
    matrix = jnp.ones((2048, 2048), jnp.float32)
    product = min(_times(jax.jit(lambda m: m @ m), matrix))
    array = jnp.ones((64 * 2**10, 2**10), jnp.float32)
    read = min(_times(jax.jit(lambda a, v: a @ v), array, jnp.ones((2**10,), jnp.float32)))
    return Rates(2 * 2048**3 / product, array.nbytes / read)


def copy_rate() -> float:
    """Bytes per second, read plus written, of one pass over 256 MB: the best of several."""
    array = jnp.ones((64 * 2**20,), jnp.float32)
    return 2 * array.nbytes / min(_times(jax.jit(lambda a: a + 1), array))


def _times(fn: Callable, *args: Any, repeats: int = REPEATS) -> list[float]:
    jax.block_until_ready(fn(*args))
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        out.append(time.perf_counter() - start)
    return out


def _session(params: steps.Params, cfg: ModelConfig, tokens: int) -> Session:
    """A session on a cache of the whole context: one compiled prefill serves all rows up to one chunk.

    Block tables grow with the sequence, as a user's do, but are as wide as the context from the start for a prompt of
    several chunks, which would else compile a step for each width.
    """
    pages = pages_for(cfg, cfg.max_position_embeddings)
    table = pages if tokens > PREFILL_CHUNK else None
    return Session(params, cfg, num_pages=pages, prefill_rows=PREFILL_CHUNK, table_pages=table)


def _prefill_row(params: steps.Params, cfg: ModelConfig, prompt: Sequence[int], rates: Rates) -> dict[str, Any]:
    session, seconds = _session(params, cfg, len(prompt)), []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(session.append({_SEQUENCE: prompt}))
        seconds.append(time.perf_counter() - start)
        session.close(_SEQUENCE)
    row = _row("prefill", len(prompt), seconds[0], seconds[1:], len(prompt) / min(seconds[1:]))
    return row | limits(min(seconds[1:]), step_work(cfg, len(prompt)), rates)


def _decode_row(
    params: steps.Params, cfg: ModelConfig, prompt: Sequence[int], following: Sequence[int], rates: Rates
) -> dict[str, Any]:
    session = _session(params, cfg, len(prompt))
    session.append({_SEQUENCE: prompt})
    (first, *seconds), _ = time_decode(session, _SEQUENCE, following, with_host=True)
    row = _row("decode", len(prompt), first, seconds, 1 / min(seconds))
    return row | limits(min(seconds), step_work(cfg, 1, len(prompt)), rates)


def _row(phase: str, length: int, first: float, seconds: list[float], rate: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "tokens": length,
        "first_call_s": round(first, 2),
        "best_ms": round(1e3 * min(seconds), 3),
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "tokens_per_s": round(rate, 1),
    }


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
    """The released layer table at tiny widths: every role, source and ratio of the 40 layers, without draft layers."""
    released = ModelConfig.from_json(config_path("v41_flash"))
    return released.replace(
        compress_ratios=released.compress_ratios[: released.num_hidden_layers],
        vocab_size=256, hidden_size=64, num_attention_heads=4, head_dim=32, q_lora_rank=32, qk_rope_head_dim=8,
        o_groups=2, o_lora_rank=16, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        sliding_window=16, index_n_heads=4, index_head_dim=32, index_topk=16, candidate_topk_blocks=8,
        candidate_block_size=4, max_position_embeddings=512, engram_layer_ids=(), engram_num_embeddings=(),
        num_nextn_predict_layers=0, dspark_target_layer_ids=(), quant_method="", expert_dtype="", dtype="float32",
    )  # fmt: skip


def _peer_rows(other: Peer, tokens: Sequence[int], plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for n in plan.prefill:
        first, *seconds = [other.prefill_seconds(tokens[:n]) for _ in range(REPEATS + 1)]
        rows.append(_row(f"prefill ({other.name})", n, first, seconds, n / min(seconds)))
    for n in plan.peer_decode:
        first, *seconds = other.decode_seconds(tokens[:n], tokens[n : n + plan.decode_steps + 1])
        rows.append(_row(f"decode ({other.name})", n, first, seconds, 1 / min(seconds)))
    return rows
