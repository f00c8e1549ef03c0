"""Devices that share a training batch."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def use_cpu_devices(count: int) -> None:
    """Splits the CPU into `count` JAX devices; has effect only before JAX runs its first operation.

    Raises ValueError when count is below 1, RuntimeError when JAX already started with another number.
    """
    if count < 1:
        raise ValueError(f"devices={count} must be at least 1.")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        present = len(jax.devices("cpu"))
        if present != count:
            raise RuntimeError(
                f"devices={count} comes too late: JAX already runs with {present} CPU devices; "
                "call use_cpu_devices before any JAX operation."
            ) from None


def data_mesh(rows: int, devices: int | None = None) -> Mesh:
    """A mesh with the one axis "data" over the first `devices` devices (all without it).

    Raises ValueError when there are not so many, or when they do not divide the rows of a batch.
    """
    available = jax.devices()
    count = len(available) if devices is None else devices
    if not 1 <= count <= len(available):
        raise ValueError(f"devices={count} must lie between 1 and the {len(available)} that JAX has.")
    if rows % count:
        raise ValueError(f"rows={rows} must be divisible by devices={count}: each takes the same number of rows.")
    return Mesh(np.array(available[:count]), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def split_rows(mesh: Mesh) -> NamedSharding:
    """Each device holds its share of the rows."""
    return NamedSharding(mesh, PartitionSpec("data"))
