"""Rotary position embedding over adjacent pairs, with the YaRN table of the compressed layers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax.config import ModelConfig, RopeScaling


def rope_tables(width: int, length: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32[length, width / 2], computed in float32 as the reference does.

    With `scaling`, pair frequencies blend between theta and theta / factor over the ramp between the two correction
    dimensions (YaRN without a magnitude factor). Source: docs/contract.md "Positions".
    """
    pair = np.arange(0, width, 2, dtype=np.float32)
    # The power is taken in float64 and rounded once: NumPy's float32 power is one unit in the last place off for some
    # pairs, which the position then multiplies.
    power = np.float64(theta) ** (pair / np.float32(width)).astype(np.float64)
    freq = np.float32(1) / power.astype(np.float32)
    if scaling is not None:
        freq = _yarn(freq, width, theta, scaling)
    angle = np.arange(length, dtype=np.float32)[:, None] * freq[None, :]
    return np.cos(angle), np.sin(angle)


def _yarn(freq: np.ndarray, width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    def correction(rotations: float) -> float:
        original = scaling.original_max_position_embeddings
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), width - 1)
    ramp = (np.arange(width // 2, dtype=np.float32) - low) / np.float32(max(high - low, 1e-3))
    ramp = np.clip(ramp, 0, 1).astype(np.float32)
    return (freq / np.float32(scaling.factor) * ramp + freq * (1 - ramp)).astype(np.float32)


def model_tables(cfg: ModelConfig) -> dict[str, dict[str, np.ndarray]]:
    """The two tables of a model: "swa" (rope_theta, no YaRN) and "compressed" (compress_rope_theta, YaRN)."""
    width, length = cfg.qk_rope_head_dim, cfg.max_position_embeddings
    swa = rope_tables(width, length, cfg.rope_theta, None)
    compressed = rope_tables(width, length, cfg.compress_rope_theta, cfg.rope_scaling)
    return {name: {"cos": c, "sin": s} for name, (c, s) in (("swa", swa), ("compressed", compressed))}


def table_buffers(cfg: ModelConfig) -> dict[str, dict[str, jax.Array]]:
    """`model_tables` as device arrays, computed only where values are wanted: under `eval_shape` they are shapes.

    Inside a trace a callback keeps the bits of NumPy's cosine, which XLA's differs from, and leaves the work to the
    run, if there is one: the released context takes half a gigabyte of tables.
    """
    if not isinstance(jnp.zeros(()), jax.core.Tracer):  # nothing is being traced
        return jax.tree.map(jnp.asarray, model_tables(cfg))
    table = jax.ShapeDtypeStruct((cfg.max_position_embeddings, cfg.qk_rope_head_dim // 2), jnp.float32)
    shapes = {name: {"cos": table, "sin": table} for name in ("swa", "compressed")}
    return jax.pure_callback(lambda: model_tables(cfg), shapes)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, inverse: bool = False) -> jax.Array:
    """Rotates the last 2 * cos.shape[-1] elements of x, pairs (2i, 2i + 1), in float32; rounded to x's dtype.

    cos, sin: float32[..., width / 2], broadcast against x's leading axes. `inverse` rotates back.
    """
    half = cos.shape[-1]
    head, tail = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    pairs = tail.astype(jnp.float32).reshape(*tail.shape[:-1], half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    sin = -sin if inverse else sin
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(tail.shape)
    return jnp.concatenate([head, rotated.astype(x.dtype)], axis=-1)
