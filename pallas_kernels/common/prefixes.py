"""Work on a prefix of a table: early tokens of a prompt see only its start, and static shapes would read it whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Four lengths save most of what eight would, at half the code to compile; below 128 rows a branch costs what it saves.
PARTS, SMALLEST = 4, 128


def prefix_sizes(rows: int, unit: int = 1) -> list[int]:
    """Lengths to choose from for a table of `rows` rows, ascending, whole units each; the last is `rows`."""
    if rows < PARTS * SMALLEST or rows % (PARTS * unit):
        return [rows]
    return [rows * (i + 1) // PARTS for i in range(PARTS)]


def run_prefix(needed: jax.Array, sizes: Sequence[int], run: Callable[[int], Any]) -> Any:
    """run(size) with the smallest of `sizes` that holds `needed` rows (int32 scalar); only that branch executes."""
    if len(sizes) == 1:
        return run(sizes[0])
    choice = jnp.sum(needed > jnp.array(sizes[:-1]))
    return lax.switch(choice, [functools.partial(run, size) for size in sizes])
