"""Mixing of a layer's residual streams around its two sub-layers, single-pass (report §2.4.1)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.hyper_connections import coefficients, collapse, expand


def initial_streams(embedding: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """(streams [..., hc, d], pre [..., hc]): copies of the embedding, and a one-hot mix on stream 0."""
    streams = jnp.broadcast_to(embedding[..., None, :], (*embedding.shape[:-1], cfg.hc_mult, embedding.shape[-1]))
    pre = jnp.zeros((*embedding.shape[:-1], cfg.hc_mult), jnp.float32).at[..., 0].set(1.0)
    return streams, pre


def init_hyper_connection(cfg: ModelConfig, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """(fn, base, scale) starting near identity mixing: each stream keeps itself, sub-layer outputs reach all."""
    hc = cfg.hc_mult
    fn = 0.02 * jax.random.normal(rngs.params(), ((2 + hc) * hc, hc * cfg.hidden_size))
    base = jnp.concatenate([jnp.zeros(2 * hc), 4.0 * jnp.eye(hc).reshape(-1)])
    return nnx.Param(fn), nnx.Param(base), nnx.Param(jnp.ones((3,)))


def run_sublayer(
    streams: jax.Array,
    pre: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    sublayer: Callable[[jax.Array], jax.Array],
    cfg: ModelConfig,
    capture: dict | None = None,
    name: str = "",
) -> tuple[jax.Array, jax.Array]:
    """One sub-layer: its input is collapsed with the previous sub-layer's `pre`; returns (streams, its own pre)."""
    fn, base, scale = weights
    mix = coefficients(
        streams, fn, base, scale, norm_eps=cfg.rms_norm_eps, hc_eps=cfg.hc_eps, iters=cfg.hc_sinkhorn_iters
    )
    if capture is not None:
        capture |= {f"hc_{name}_pre": mix.pre, f"hc_{name}_post": mix.post, f"hc_{name}_comb": mix.comb}
    out = sublayer(collapse(streams, pre))
    return expand(streams, out, mix), mix.pre
