"""Prefixes of a table: whole units, the smallest that holds what is needed, one branch when the table is short."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common.prefixes import prefix_sizes, run_prefix


@pytest.mark.parametrize(
    ("rows", "unit", "sizes"),
    [
        (511, 1, [511]),
        (512, 1, [128, 256, 384, 512]),
        (512, 128, [128, 256, 384, 512]),
        (640, 128, [640]),
        (514, 1, [514]),
    ],
)
def test_sizes_are_quarters_of_whole_units(rows, unit, sizes):
    assert prefix_sizes(rows, unit) == sizes


@pytest.mark.parametrize("needed", [0, 1, 128, 129, 256, 257, 511, 512])
def test_the_smallest_prefix_that_holds_all_runs(needed):
    sizes = prefix_sizes(512)
    ran = jax.jit(lambda n: run_prefix(n, sizes, lambda size: jnp.int32(size)))(needed)
    assert int(ran) == min(size for size in sizes if size >= needed)


def test_a_short_table_has_one_branch():
    assert "cond" not in str(jax.make_jaxpr(lambda n: run_prefix(n, [7], lambda size: n + size))(3))
