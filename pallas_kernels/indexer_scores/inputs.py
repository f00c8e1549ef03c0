"""What both score ops ask of their inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.formats import PagedRows, check_rows

SCRATCH_BYTES = 64 << 20  # of the XLA path's temporaries
SCORE_DTYPES = ("float32", "bfloat16")


def check_inputs(
    op: str, q: jax.Array, weights: jax.Array, keys: PagedRows, visible: jax.Array, score_dtype: str, scratch_bytes: int
) -> None:
    """Raises ValueError, one sentence, unless q [..., H, D], weights [..., H], visible [...] and keys fit together."""
    if q.dtype not in (jnp.float32, jnp.bfloat16) or 0 in q.shape:
        raise ValueError(f"{op}: q must be float32 or bfloat16 without an empty axis, got {q.dtype}{list(q.shape)}.")
    for name, value, dtype, shape in (
        ("weights", weights, jnp.float32, q.shape[:-1]),
        ("visible", visible, jnp.int32, q.shape[:-2]),
    ):
        if value.dtype != dtype or value.shape != shape:
            want = f"{jnp.dtype(dtype).name}{list(shape)}"
            raise ValueError(f"{op}: {name} must be {want} for q{list(q.shape)}, got {value.dtype}{list(value.shape)}.")
    check_rows(op, "keys", keys, q.shape[0])
    if keys.layout.width != q.shape[-1]:
        raise ValueError(f"{op}: keys are {keys.layout.width} wide, queries {q.shape[-1]}.")
    if score_dtype not in SCORE_DTYPES:
        raise ValueError(f"{op}: score_dtype={score_dtype!r} is unknown; known: {', '.join(SCORE_DTYPES)}.")
    if scratch_bytes < 1:
        raise ValueError(f"{op}: scratch_bytes={scratch_bytes} must be at least 1.")
