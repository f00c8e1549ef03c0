"""The step functions: forward for training, and prefill, decode, verify and commit on functional caches.

A call takes a cache and returns a cache; the one given is donated. `prefill`, `decode`, `verify` and `commit` are host
functions over jitted ones: they look at shapes and at NumPy leaves (as `make_step` gives) and raise ValueError before
anything is dispatched, so a refused call leaves its cache usable. Arrays on a device are not waited for, hence not
looked into. Jitted code never raises.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsflash_jax.batch import (
    check_accepted,
    check_cache,
    check_few_rows,
    check_ngrams,
    check_step,
    check_tail,
    few_rows,
    rows_to_run,
)
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.asymmetric import prefill_asymmetric
from dsflash_jax.modules.draft_sequence import DraftForward, forward_with_drafts
from dsflash_jax.modules.transformer import Transformer, commit_lengths
from dsflash_jax.modules.whole_sequence import Flags, ForwardOutput, whole_sequence
from dsflash_jax.types import StepInfo

Params = dict[str, Any]  # nested dict of arrays; keys are released tensor names
# XLA may otherwise cancel a cast to bfloat16 and back, and with it a rounding that the reference makes.
EXACT_ROUNDING = {"xla_allow_excess_precision": False}


@functools.lru_cache(maxsize=32)
def _graph(cfg: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and abstract state of a model of `cfg`; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(0))))


def init_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Random parameters (and RoPE tables under "freqs") as a nested dict; equal for equal (cfg, seed)."""
    _graph(cfg)
    return nnx.to_pure_dict(nnx.state(Transformer(cfg, nnx.Rngs(seed))))


def abstract_params(cfg: ModelConfig) -> Params:
    """Shapes and dtypes of `init_params`, nothing allocated."""
    return nnx.to_pure_dict(_graph(cfg)[1])


def bind(params: Params, cfg: ModelConfig) -> Transformer:
    """The model of `cfg` holding `params`; for use inside traced functions."""
    graph, abstract = _graph(cfg)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def forward(
    params: Params,
    tokens: jax.Array,
    cfg: ModelConfig,
    *,
    dense: jax.Array | bool = False,
    use_global: jax.Array | bool = True,
    indexer_target: str = "served",
    ngram_rows: jax.Array | None = None,
) -> ForwardOutput:
    """Whole sequences int32[B, T] from position 0, differentiable; see `modules/whole_sequence.py`. Not jitted itself.

    `dense` and `use_global` may be traced booleans. `ngram_rows` int32[B, T, L, C], which a model with Engram layers
    needs, are those of `NgramHash.rows`; the tables themselves are packed and take no gradient.

    Raises ValueError for tokens of another rank, rows that are empty or longer than `max_position_embeddings`, an
    unknown `indexer_target`, packed weights, Engram layers without `ngram_rows`, and the two keys that reproduce the
    released scoring (`score_dtype`, `stale_index_keys`): here scores are float32 and every entry has its owner's key.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} must be [B, T].")
    if not 1 <= tokens.shape[1] <= cfg.max_position_embeddings:
        limit = cfg.max_position_embeddings
        raise ValueError(f"tokens has rows of {tokens.shape[1]}, must be 1 to max_position_embeddings={limit} long.")
    check_differentiable(cfg)
    if indexer_target not in ("served", "own"):
        raise ValueError(f'indexer_target={indexer_target!r} must be "served" or "own".')
    if cfg.engram_layer_ids and ngram_rows is None:
        rule = "need ngram_rows in forward: n-grams are hashed on the host (NgramHash.rows)"
        raise ValueError(f"engram_layer_ids={list(cfg.engram_layer_ids)} {rule}.")
    flags = Flags(jax.numpy.asarray(dense), jax.numpy.asarray(use_global))
    return whole_sequence(bind(params, cfg), tokens, flags, indexer_target, ngram_rows)


def check_differentiable(cfg: ModelConfig) -> None:
    """Raises ValueError for a configuration that the whole-sequence form does not follow."""
    for name, only in (("score_dtype", "float32"), ("stale_index_keys", False)):
        if getattr(cfg, name) != only:
            raise ValueError(f"{name}={getattr(cfg, name)!r} must be {only!r} in forward: the steps alone follow it.")
    for name in ("quant_method", "expert_dtype"):
        if getattr(cfg, name):
            raise ValueError(
                f"{name}={getattr(cfg, name)!r} must be empty in forward: packed weights have no gradient; "
                "load them with dequantise=True."
            )


def forward_drafts(
    params: Params, tokens: jax.Array, anchors: jax.Array, cfg: ModelConfig, *, ngram_rows: jax.Array | None = None
) -> DraftForward:
    """Draft blocks behind the tokens at `anchors` int32[B, A] of whole sequences int32[B, T], and the target's logits.

    Differentiable in the draft layers (`params["mtp"]`) alone: the backbone, the embedding and the head that they share
    are constants, and take a gradient of exactly zero. KV is rounded as in the caches, whatever `qat` says: the draft
    layers learn the backbone that will be served. Anchors must lie in 1..T - dspark_block_size. Not jitted itself.

    Raises ValueError as `forward`, for a configuration without draft layers, anchors of another shape and rows that
    are too short for a block.
    """
    if not cfg.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers=0 must be at least 1: a model without draft layers cannot draft.")
    if anchors.ndim != 2 or anchors.shape[0] != tokens.shape[0]:
        raise ValueError(f"anchors of shape {tuple(anchors.shape)} must be [{tokens.shape[0]}, A], some per row.")
    if tokens.shape[1] <= cfg.dspark_block_size:
        rule = f"must be longer than dspark_block_size={cfg.dspark_block_size}: a block starts behind a token"
        raise ValueError(f"tokens has rows of {tokens.shape[1]}, {rule}.")
    cfg = cfg.replace(qat=True)
    frozen = {name: leaf if name == "mtp" else jax.lax.stop_gradient(leaf) for name, leaf in params.items()}
    out = forward(frozen, tokens, cfg, ngram_rows=ngram_rows)
    return forward_with_drafts(bind(frozen, cfg), tokens, anchors, out.main_hidden, out.logits)


@functools.partial(
    jax.jit, static_argnames=("cfg", "logits", "in_ring"), donate_argnames=("cache",), compiler_options=EXACT_ROUNDING
)
def _step(
    params: Params,
    cache: ModelCache,
    step: StepInfo,
    cfg: ModelConfig,
    logits: str,
    advance: jax.Array,
    in_ring: bool = False,
):
    return run_step(params, cache, step, cfg, logits, advance, in_ring)


def run_step(
    params: Params,
    cache: ModelCache,
    step: StepInfo,
    cfg: ModelConfig,
    run: str | tuple[int, ...],
    advance: jax.Array,
    in_ring: bool = False,
) -> tuple[jax.Array, ModelCache]:
    """One ragged step, not jitted: (logits, cache). For jitted functions that place it on devices (`sharding.py`).

    run: logits of all layers on all rows ("last" or "all"), or the rows per decoder layer of an asymmetric prefill.
    advance: whether the lengths move to the end of the step. in_ring: see `Transformer.context`.
    """
    model = bind(params, cfg)
    if isinstance(run, str):
        out, cache = model(step, cache, run, in_ring)
    else:
        out, cache = prefill_asymmetric(model, step, cache, run)
    length = jax.numpy.where(advance, step.length, step.start)
    return out, commit_lengths(cache, step.slot, length)


@functools.partial(
    jax.jit, static_argnames=("cfg", "rows"), donate_argnames=("cache",), compiler_options=EXACT_ROUNDING
)
def _asymmetric(params: Params, cache: ModelCache, step: StepInfo, cfg: ModelConfig, rows: tuple[int, ...]):
    return run_step(params, cache, step, cfg, rows, True)


def prefill(
    params: Params, cache: ModelCache, step: StepInfo, cfg: ModelConfig, *, decoder: str = "all"
) -> tuple[jax.Array, ModelCache]:
    """A chunk (or whole prompt) per sequence: (logits [S, V] of each sequence's last row, cache). Any chunking.

    decoder: "all" runs every layer on every token. "replay" and "exact" run the decoder on the ends of prompts only
    (`last_chunk`), from the cache's tail; see `replay.py`. Logits of a sequence whose prompt goes on are then NaN.

    Raises ValueError for a cache of another configuration, slots and pages that the cache does not have, an unknown
    `decoder` and a cache made for another one; with Engram layers, for a step without their rows and tables that do
    not fit the configuration.
    """
    check_cache(cache, cfg)
    check_step(step, cache)
    check_ngrams(step, params, cfg)
    if decoder == "all":
        # So few rows read the ring anyway (`Transformer.context`): said here, they share the program of `decode`.
        return _step(params, cache, step, cfg, "last", True, few_rows(step, cfg))
    check_tail(cache, cfg, decoder)
    return _asymmetric(params, cache, step, cfg, rows_to_run(step, cfg, decoder))


def decode(params: Params, cache: ModelCache, step: StepInfo, cfg: ModelConfig) -> tuple[jax.Array, ModelCache]:
    """One token (or a few) per sequence: (logits [S, V] of the last rows, cache).

    The same ragged step as `prefill`, with its checks, which reads all window rows from the ring. So a sequence may not
    have more than num_draft_tokens + 1 rows: ValueError.
    """
    check_cache(cache, cfg)
    check_step(step, cache)
    check_ngrams(step, params, cfg)
    check_few_rows(step, cfg)
    return _step(params, cache, step, cfg, "last", True, True)


def lower_step(
    params: Params,
    cache: ModelCache,
    step: StepInfo,
    cfg: ModelConfig,
    *,
    decoding: bool = False,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """`prefill` or `decode` traced but not compiled, from arrays or shapes: for benchmarks and for reading its HLO.

    platform: that of another machine ("cuda"); None = this one's.
    """
    traced = _step.trace(params, cache, step, cfg, "last", True, decoding or few_rows(step, cfg))
    return traced.lower(lowering_platforms=platform and (platform,))


def verify(params: Params, cache: ModelCache, step: StepInfo, cfg: ModelConfig) -> tuple[jax.Array, ModelCache]:
    """k rows per sequence, logits of all [T, V]; lengths stay at `start` until `commit`.

    Raises as `prefill`, and for more than num_draft_tokens + 1 rows of a sequence, which could not be rolled back.
    """
    check_cache(cache, cfg)
    check_step(step, cache)
    check_ngrams(step, params, cfg)
    check_few_rows(step, cfg)
    return _step(params, cache, step, cfg, "all", False, True)


def commit(cache: ModelCache, step: StepInfo, accepted: jax.Array | Sequence[int]) -> ModelCache:
    """Accepts the first accepted[S] rows of a verified step. Only lengths move: later rows are never read.

    Raises ValueError for slots that the cache does not have, and unless each 0 <= accepted <= rows of its sequence.
    """
    check_step(step, cache)
    if not isinstance(accepted, jax.Array):
        accepted = np.asarray(accepted)
    check_accepted(step, accepted)
    return _commit(cache, step, accepted.astype(np.int32))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _commit(cache: ModelCache, step: StepInfo, accepted: jax.Array) -> ModelCache:
    return commit_lengths(cache, step.slot, step.start + accepted)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache",), compiler_options=EXACT_ROUNDING)
def trace_step(params: Params, cache: ModelCache, step: StepInfo, cfg: ModelConfig):
    """The ragged step with all intermediates: (logits [T, V], cache, one dict per layer and a final one). Unchecked."""
    captures: list[dict] = []
    out, cache = bind(params, cfg)(step, cache, "all", captures=captures)
    return out, commit_lengths(cache, step.slot, step.length), captures


@functools.partial(
    jax.jit, static_argnames=("cfg", "rows"), donate_argnames=("cache",), compiler_options=EXACT_ROUNDING
)
def trace_asymmetric(params: Params, cache: ModelCache, step: StepInfo, cfg: ModelConfig, rows: tuple[int, ...]):
    """`prefill` with decoder rows per layer (`batch.rows_to_run`) and all intermediates, as `trace_step`. Unchecked."""
    captures: list[dict] = []
    out, cache = prefill_asymmetric(bind(params, cfg), step, cache, rows, captures)
    return out, commit_lengths(cache, step.slot, step.length), captures
