"""The draft step: a block of tokens and confidences per sequence from the committed caches, which it does not change.

`draft` is a host function over a jitted one, like those of `steps.py`: it refuses bad input before it dispatches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.batch import bucket, check_cache, check_token_ids
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.dspark import DraftOutput, draft_block
from dsflash_jax.sampling import greedy
from dsflash_jax.speculative import Settings, draft_tokens
from dsflash_jax.types import DraftStep
from dsflash_jax.weights.names import walk


@dataclasses.dataclass(frozen=True)
class Anchor:
    """Where a block is drafted: behind `token`, which stands at position `length` of the sequence in `slot`.

    floor: the lowest position that passed the backbone's target layers, above 0 after a prefix hit or a replay.
    """

    slot: int
    token: int
    length: int
    floor: int = 0


def make_draft_step(anchors: Sequence[Anchor], cfg: ModelConfig, *, seqs: int | None = None) -> DraftStep:
    """Packs anchors into one draft step, padded to a power of two or to `seqs` sequences.

    Raises ValueError for a configuration without draft layers, no anchor, repeated or negative slots, token ids
    outside the vocabulary, a length outside the context and a floor outside 0..length.
    """
    if not cfg.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers=0 must be at least 1: a model without draft layers cannot draft.")
    slots = [anchor.slot for anchor in anchors]
    if not anchors or len(set(slots)) != len(slots) or min(slots) < 0:
        raise ValueError(f"slots={slots} must be distinct, not negative, and at least one.")
    for anchor in anchors:
        check_token_ids([anchor.token], cfg, f"slot {anchor.slot}")
        if not 1 <= anchor.length < cfg.max_position_embeddings:
            limit = f"1..{cfg.max_position_embeddings - 1} (max_position_embeddings - 1)"
            raise ValueError(f"slot {anchor.slot}: length={anchor.length} must lie in {limit} to draft behind it.")
        if not 0 <= anchor.floor <= anchor.length:
            raise ValueError(f"slot {anchor.slot}: floor={anchor.floor} must lie in 0..length={anchor.length}.")
    size = seqs or bucket(len(anchors))
    if size < len(anchors):
        raise ValueError(f"seqs={size} is smaller than the {len(anchors)} that this step needs.")
    rows = {name: np.zeros(size, np.int32) for name in ("tokens", "length", "floor")}
    rows["slot"] = np.full(size, -1, np.int32)
    for name, field in (("tokens", "token"), ("length", "length"), ("slot", "slot"), ("floor", "floor")):
        rows[name][: len(anchors)] = [getattr(anchor, field) for anchor in anchors]
    return DraftStep(**rows)


def draft(
    params: steps.Params, cache: ModelCache, step: DraftStep, cfg: ModelConfig, settings: Settings
) -> DraftOutput:
    """A block per sequence, drawn as `settings` says (each an array [S]): tokens, logits and confidences [S, block].

    The logits are those before temperature: `speculative.distribution` of them is what a token was drawn from. The
    cache is read, not donated. Raises ValueError for a cache of another configuration and slots that it lacks.
    """
    check_draft(cache, step, cfg)
    return _draft(params, cache, step, cfg, settings)


def check_draft(cache: ModelCache, step: DraftStep, cfg: ModelConfig) -> None:
    """Raises ValueError for a cache of another configuration and slots that it lacks."""
    check_cache(cache, cfg)
    if isinstance(step.slot, np.ndarray) and step.slot.max(initial=-1) >= cache.ring.shape[0]:
        raise ValueError(f"slot={step.slot.max()} must lie in 0..{cache.ring.shape[0] - 1}, the cache's slots.")


def check_draft_params(params: Mapping[Any, Any], cfg: ModelConfig) -> None:
    """Raises ValueError naming the first draft parameter that is missing, extra, or of another shape than `cfg`'s."""
    expected = {path: leaf.shape for path, leaf in walk(steps.abstract_params(cfg).get("mtp", {}))}
    given = {path: tuple(leaf.shape) for path, leaf in walk(params.get("mtp", {}))}
    if not expected:
        raise ValueError("num_nextn_predict_layers=0 must be at least 1: a model without draft layers cannot draft.")
    for path in sorted({*expected, *given}, key=str):
        if expected.get(path) != given.get(path):
            name = ".".join(map(str, ("mtp", *path)))
            have, need = given.get(path, "none"), expected.get(path, "none")
            raise ValueError(f"{name} of shape {have} must be {need}: these draft layers belong to another model.")


def run_draft(
    params: steps.Params, cache: ModelCache, step: DraftStep, cfg: ModelConfig, settings: Settings
) -> DraftOutput:
    """`draft`, unchecked and not jitted: for jitted functions that place it on devices (`sharding.py`)."""

    def choose(i: int, logits: jax.Array) -> jax.Array:
        return draft_tokens(logits, settings, step.length + 1 + i)

    return draft_block(steps.bind(params, cfg), step, cache, choose)


_draft = jax.jit(run_draft, static_argnames=("cfg",), compiler_options=steps.EXACT_ROUNDING)


@functools.partial(jax.jit, static_argnames=("cfg",), compiler_options=steps.EXACT_ROUNDING)
def trace_draft(params: steps.Params, cache: ModelCache, step: DraftStep, cfg: ModelConfig):
    """The greedy draft step with all intermediates: (output, one dict of arrays per draft layer). Unchecked."""
    captures: list[dict[str, jax.Array]] = []
    out = draft_block(steps.bind(params, cfg), step, cache, lambda _, logits: greedy(logits), captures)
    return jax.tree.map(jnp.asarray, out), captures
