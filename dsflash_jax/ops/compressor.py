"""When pooled entries become visible (report §2.3; contract.md, Compressor and entries)."""

from __future__ import annotations

import jax


def visible_entries(positions: jax.Array, ratio: int) -> jax.Array:
    """Entries a query at `positions` may see: floor((p + 1) / m); 0 for padding (position -1)."""
    return (positions + 1) // ratio
