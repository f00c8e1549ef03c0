"""CSA2 attention: sliding window, shared K=V latents, indexer, sink, inverse RoPE, grouped low-rank output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.linear import Linear, RMSNorm
from dsflash_jax.modules.select_forms import Query
from dsflash_jax.numerics.formats import get_format, straight_through
from dsflash_jax.ops.linear import einsum_f32
from dsflash_jax.ops.rope import apply_rope
from dsflash_jax.roles import LayerRole

Rope = tuple[jax.Array, jax.Array]  # cos, sin rows at given positions, each [..., qk_rope_head_dim / 2]


class Compressor(nnx.Module):
    """Projects tokens to latent contributions; `wgate` exists only where a latent pools more than one token."""

    def __init__(self, cfg: ModelConfig, role: LayerRole, rngs: nnx.Rngs):
        self.wkv = Linear(cfg.hidden_size, cfg.head_dim, rngs=rngs)
        if role.ratio > 1:
            self.wgate = Linear(cfg.hidden_size, cfg.head_dim, rngs=rngs)
        self.norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def rows(self, x: jax.Array) -> jax.Array:
        """Un-normed `wkv x` and gate, float32 [..., 2 * head_dim]: what an open group keeps."""
        return jnp.concatenate([self.wkv.f32(x), self.wgate.f32(x)], axis=-1)


class Indexer(nnx.Module):
    """Scores entries for the layer's queries; only KV owners project keys."""

    def __init__(self, cfg: ModelConfig, role: LayerRole, rngs: nnx.Rngs):
        self.cfg = cfg
        width = cfg.index_n_heads * cfg.index_head_dim
        self.wq_b = Linear(cfg.q_lora_rank, width, rngs=rngs, packed=cfg.quant_method, kernels=cfg.kernels)
        self.weights_proj = Linear(cfg.hidden_size, cfg.index_n_heads, rngs=rngs)
        if role.owns_kv:
            self.wk = Linear(cfg.head_dim, cfg.index_head_dim, rngs=rngs)
            self.k_norm = RMSNorm(cfg.index_head_dim, cfg.rms_norm_eps)

    def query(self, x: jax.Array, qr: jax.Array, rope: Rope, rounded: bool = True) -> Query:
        """Queries [..., H, D] from the shared query latent, rounded like the keys, and their signed weights."""
        cfg = self.cfg
        q = self.wq_b(qr).reshape(*qr.shape[:-1], cfg.index_n_heads, cfg.index_head_dim)
        q = apply_rope(q, rope[0][..., None, :], rope[1][..., None, :])
        if rounded:
            q = straight_through(get_format(cfg.index_format), q)
        weights = self.weights_proj(x) * (cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5)
        return Query(q, weights.astype(jnp.float32))

    def key(self, latent: jax.Array) -> jax.Array:
        """Index keys [..., D] from un-rotated, unrounded latents; neither rotated nor rounded."""
        return self.k_norm(self.wk(latent))


class Attention(nnx.Module):
    """Projections of one layer. What it attends to is decided by the callers in `layer.py` and `whole_sequence.py`."""

    def __init__(self, cfg: ModelConfig, role: LayerRole, rngs: nnx.Rngs):
        self.cfg, self.role = cfg, role
        heads, packed = cfg.num_attention_heads, {"packed": cfg.quant_method, "kernels": cfg.kernels}
        self.attn_sink = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.wq_a = Linear(cfg.hidden_size, cfg.q_lora_rank, rngs=rngs, **packed)
        self.q_norm = RMSNorm(cfg.q_lora_rank, cfg.rms_norm_eps)
        self.wq_b = Linear(cfg.q_lora_rank, heads * cfg.head_dim, rngs=rngs, **packed)
        self.wkv = Linear(cfg.hidden_size, cfg.head_dim, rngs=rngs, **packed)
        self.kv_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.wo_a = Linear(heads * cfg.head_dim // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank, rngs=rngs)
        self.wo_b = Linear(cfg.o_groups * cfg.o_lora_rank, cfg.hidden_size, rngs=rngs, **packed)
        if role.owns_kv:
            self.compressor = Compressor(cfg, role, rngs)
        if role.indexes:
            self.indexer = Indexer(cfg, role, rngs)

    @property
    def scale(self) -> float:
        """Softmax scale head_dim^-0.5; YaRN adds no magnitude factor."""
        return self.cfg.head_dim**-0.5

    def query(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """(q [..., H, D] rotated, query latent [..., q_lora_rank]). Only the low-rank latent is normed."""
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).reshape(*x.shape[:-1], self.cfg.num_attention_heads, self.cfg.head_dim)
        return apply_rope(q, rope[0][..., None, :], rope[1][..., None, :]), qr

    def window_latent(self, x: jax.Array) -> jax.Array:
        """Window key = value [..., D], neither rotated (to the token's own position) nor rounded."""
        return self.kv_norm(self.wkv(x))

    def output(self, heads_out: jax.Array, rope: Rope) -> jax.Array:
        """[..., H, D] -> [..., hidden]: inverse rotation at the query position, grouped low rank, projection."""
        cfg = self.cfg
        out = apply_rope(heads_out, rope[0][..., None, :], rope[1][..., None, :], inverse=True)
        out = out.reshape(*out.shape[:-2], cfg.o_groups, -1)
        weight = self.wo_a.weight[...].reshape(cfg.o_groups, cfg.o_lora_rank, -1).astype(out.dtype)
        low = einsum_f32("...gi,goi->...go", out, weight).astype(out.dtype)
        return self.wo_b(low.reshape(*low.shape[:-2], -1))
