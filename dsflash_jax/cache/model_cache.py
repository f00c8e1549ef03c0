"""The cache pytree: global pages, window rings, compressor state and committed lengths.

A byte arena is a plain uint8[pages, page_bytes]; `layout.py` knows what lies in a page. The page arena may be wider
than the global group (other groups share its block-id space); the ring is an arena whose page is a sequence slot.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.replay import tail_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
    """Encoder states of each slot's last tokens, keyed by position % rows: what a prefill's decoder starts from.

    `pre` is the mix of the streams that the decoder's first sub-layer reads (report §2.4.1).
    """

    streams: jax.Array  # compute dtype [num_slots, rows, hc, d]
    pre: jax.Array  # float32[num_slots, rows, hc]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelCache:
    """Device state of all sequences. Steps take one and return one; the old one is donated.

    `length` is bookkeeping for the caller and for what stores or moves a sequence: steps and `commit` write it and no
    step reads it. Where a step starts, and so which rows it may read, is what its `StepInfo` says.
    """

    pages: jax.Array  # uint8[num_pages, page_bytes]
    ring: jax.Array  # uint8[num_slots, ring_bytes]
    state: jax.Array  # float32[num_slots, pooled owners, state_rows, 2 * head_dim], keyed by position % state_rows
    length: jax.Array  # int32[num_slots] committed tokens: kept for callers, a step reads its StepInfo only
    tail: Tail | None = None  # present where prefill runs the decoder on the ends of prompts only

    @classmethod
    def abstract(
        cls, cfg: ModelConfig, num_pages: int, num_slots: int, page_bytes: int | None = None, *, decoder: str = "all"
    ) -> ModelCache:
        """Shapes only, for accounting and shape evaluation. `page_bytes` defaults to the global group's.

        decoder: the mode of `prefill` that the cache must serve; "all" needs no tail, "exact" serves "replay" too.
        """
        layout = cache_layout(cfg)
        if page_bytes is not None and page_bytes < layout.page_bytes:
            need = layout.page_bytes
            raise ValueError(f"page_bytes={page_bytes} is smaller than the global group's page of {need} bytes.")
        state = (num_slots, len(layout.state_owners), layout.state_rows, layout.state_width)
        return cls(
            pages=jax.ShapeDtypeStruct((num_pages, page_bytes or layout.page_bytes), jnp.uint8),
            ring=jax.ShapeDtypeStruct((num_slots, layout.ring_bytes), jnp.uint8),
            state=jax.ShapeDtypeStruct(state, jnp.float32),
            length=jax.ShapeDtypeStruct((num_slots,), jnp.int32),
            tail=_abstract_tail(cfg, num_slots, tail_rows(cfg, decoder)),
        )

    @classmethod
    def empty(
        cls, cfg: ModelConfig, num_pages: int, num_slots: int, page_bytes: int | None = None, *, decoder: str = "all"
    ) -> ModelCache:
        """Zeroed caches for `num_slots` sequences sharing `num_pages` pages; `decoder` as in `abstract`."""
        shapes = cls.abstract(cfg, num_pages, num_slots, page_bytes, decoder=decoder)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _abstract_tail(cfg: ModelConfig, num_slots: int, rows: int) -> Tail | None:
    if not rows:
        return None
    streams = jax.ShapeDtypeStruct((num_slots, rows, cfg.hc_mult, cfg.hidden_size), cfg.dtype)
    return Tail(streams, jax.ShapeDtypeStruct((num_slots, rows, cfg.hc_mult), jnp.float32))
