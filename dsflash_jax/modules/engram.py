"""Engram: n-gram memory that a layer reads before its block and writes into every residual stream (report §2.4.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.linear import Buffer, Linear
from dsflash_jax.numerics.formats import get_format
from dsflash_jax.ops.engram import gates, write_memory
from dsflash_jax.types import NgramRows

TABLE_FORMAT = get_format("mxfp8")  # E4M3 codes, then one UE8M0 scale for every 32 of them, as released


class NgramTable(nnx.Module):
    """Packed rows under the released names: weight uint8[rows, width] of codes, scale uint8[rows, width / 32].

    Buffers: codes have no gradient. A table that stays on the host (`HostTables`) is left out of the parameters.
    """

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs):
        packed = TABLE_FORMAT.pack(jax.random.normal(rngs.params(), (rows, width)))
        self.weight, self.scale = Buffer(packed[:, :width]), Buffer(packed[:, width:])

    def packed(self, index: jax.Array) -> jax.Array:
        """uint8[..., row bytes] of the rows `index`."""
        return jnp.concatenate([self.weight[...][index], self.scale[...][index]], axis=-1)


class Engram(nnx.Module):
    """One layer's memory. Names are the released tensor names."""

    def __init__(self, cfg: ModelConfig, layer: int, rngs: nnx.Rngs):
        self.index, self.width, self.eps = cfg.engram_layer_ids.index(layer), cfg.engram_head_dim, cfg.rms_norm_eps
        columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
        self.q_weight = nnx.Param(jnp.ones((cfg.hc_mult, cfg.hidden_size)))
        self.k_weight = nnx.Param(jnp.ones((cfg.hc_mult, cfg.hidden_size)))
        self.embed = NgramTable(cfg.engram_num_embeddings[self.index], self.width, rngs)
        self.wkv = Linear(columns * self.width, (cfg.hc_mult + 1) * cfg.hidden_size, rngs=rngs)

    def __call__(self, streams: jax.Array, ngrams: NgramRows) -> jax.Array:
        """Streams [..., hc, d] with the memory of their tokens written in; ngrams.index is [..., L, C].

        Where a row is -1 nothing is read, and the gate of a token without rows is closed: its streams pass unchanged.
        """
        index = ngrams.index[..., self.index, :]
        there, at = index >= 0, jnp.maximum(index, 0)
        packed = self.embed.packed(at) if ngrams.fetched is None else ngrams.fetched[self.index][at]
        # Row 0 stands in for absent rows and may hold NaN codes.
        rows = jnp.where(there[..., None], TABLE_FORMAT.unpack(packed, self.width), 0.0)
        joined = rows.reshape(*index.shape[:-1], -1).astype(streams.dtype)
        keys, value = jnp.split(self.wkv(joined), [streams.shape[-2] * streams.shape[-1]], axis=-1)
        gate = gates(streams, keys.reshape(streams.shape), self.q_weight[...], self.k_weight[...], eps=self.eps)
        return write_memory(streams, jnp.where(there[..., :1], gate, 0.0), value)
