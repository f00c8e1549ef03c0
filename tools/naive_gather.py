"""Times `sparse_mla` on a CPU beside what one would write first: gather the rows' bytes, unpack, two einsums.

128 queries of 64 heads and 512 values over 128 window rows (MXFP8) and 512 selected rows (FP4) of 8,192. Both are
compiled, called in turn, and compared with each other. Prints JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.formats import PagedRows, RowLayout
from pallas_kernels.common.unpack import unpack_rows
from pallas_kernels.kv_insert.xla import pack
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.row_set import RowSet

QUERIES, HEADS, WIDTH, WINDOW, PICKS, ENTRIES, PAGE_ROWS = 128, 64, 512, 128, 512, 8_192, 128
SCALE, CALLS, SEED = WIDTH**-0.5, 7, 0


def main() -> None:
    """Prints times in milliseconds and how many times faster the op is."""
    rng = np.random.default_rng(SEED)
    q = jnp.asarray(rng.normal(size=(QUERIES, HEADS, WIDTH)), jnp.float32)
    position = np.arange(QUERIES)[:, None] + 200 - WINDOW + 1 + np.arange(WINDOW)
    picked = np.stack([np.sort(rng.choice(ENTRIES, PICKS, replace=False)) for _ in range(QUERIES)])
    sets = (
        RowSet(_rows("mxfp8", 512, 512, rng), jnp.asarray(position, jnp.int32), run=True),
        RowSet(_rows("fp4_e4m3", ENTRIES, PAGE_ROWS, rng), jnp.asarray(picked, jnp.int32)),
    )
    args = (q, sets, jnp.zeros(HEADS))
    ways = {"sparse_mla": jax.jit(_op), "naive": jax.jit(_naive)}
    results = {name: np.asarray(way(*args)) for name, way in ways.items()}
    times = _times(ways, args)
    op, naive = times["sparse_mla"], times["naive"]
    report = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "largest_difference": float(np.abs(results["sparse_mla"] - results["naive"]).max()),
    }  # fmt: skip
    for name, of in (("best", min), ("median", statistics.median)):
        report[name] = {"sparse_mla_ms": round(of(op), 1), "naive_ms": round(of(naive), 1)}
        report[name]["times_faster"] = round(of(naive) / of(op), 2)
    print(json.dumps(report, indent=1))


def _rows(name: str, count: int, page_rows: int, rng: np.random.Generator) -> PagedRows:
    layout = RowLayout(name, WIDTH, 0, page_rows)
    packed = pack(jnp.asarray(rng.normal(size=(count, WIDTH)), jnp.float32), layout)
    table = jnp.arange(count // page_rows, dtype=jnp.int32)[None]
    return PagedRows(packed.reshape(count // page_rows, -1), table, jnp.zeros(QUERIES, jnp.int32), layout)


def _op(q: jax.Array, sets: tuple[RowSet, ...], sink: jax.Array) -> jax.Array:
    return sparse_mla(q, sets, sink, scale=SCALE, implementation="xla")


def _naive(q: jax.Array, sets: tuple[RowSet, ...], sink: jax.Array) -> jax.Array:
    keys = jnp.concatenate([_gathered(s) for s in sets], axis=1)
    logits = jnp.einsum("thd,tkd->thk", q, keys) * SCALE
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink[:, None] - top)
    return jnp.einsum("thk,tkd->thd", weights, keys) / total


def _gathered(row_set: RowSet) -> jax.Array:
    rows, layout = row_set.rows, row_set.rows.layout
    page, column = rows.address(row_set.index)
    data = rows.arena[page[..., None], column[..., None] + jnp.arange(layout.row_bytes)]
    return unpack_rows(data, layout.fmt, layout.width)


def _times(ways: dict[str, Callable], args: tuple) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(*args))
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    main()
