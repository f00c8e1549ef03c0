"""What each case must at least cost on a device, and what it takes on the one at hand: rows with one schema."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.aot.tables import versions
from pallas_kernels.cases import OPS, all_cases
from pallas_kernels.common.cases import Case, Cost, Update
from pallas_kernels.common.devices import Device
from pallas_kernels.common.draw import Draw

CALLS = 20  # of the op inside one compiled loop
REPEATS = 5  # of that loop; the median counts
SEED = 11


class Rates(NamedTuple):
    """Bytes per second and operations per second that a bound is made with."""

    nbytes: float
    flops: float

    @classmethod
    def of(cls, device: Device) -> Rates:
        """The data sheet's."""
        return cls(device.bandwidth, device.bf16_flops)


def bound(cost: Cost, rates: Rates) -> tuple[float, str]:
    """(seconds that the work takes at least, "memory" or "matrix")."""
    memory, matrix = cost.nbytes / rates.nbytes, cost.flops / rates.flops
    return (memory, "memory") if memory >= matrix else (matrix, "matrix")


def roofline_rows(cases: Sequence[Case], rates: Rates) -> list[dict[str, Any]]:
    """One row per case: its work, intensity, and least time under `rates`. Nothing is run."""
    rows = []
    for case in cases:
        seconds, by = bound(case.cost, rates)
        rows.append({
            "op": case.op, "case": case.name, "megabytes": round(case.cost.nbytes / 1e6, 2),
            "gflop": round(case.cost.flops / 1e9, 2), "flop_per_byte": round(case.cost.flops / case.cost.nbytes, 1),
            "bound": by, "bound_us": round(1e6 * seconds, 4),
        })  # fmt: skip
    return rows


def kernel_report(device: Device, ops: Sequence[str] = (), git_sha: str | None = None) -> dict[str, Any]:
    """The roofline of every case on `device`, and measurements on the machine at hand (`ops`: only these).

    On a GPU each case is timed at full size, kernel and plain XLA, against rates measured there. Elsewhere only the XLA
    path is, at the small size: that such a time says nothing about a GPU is why its row has no bound.

    Raises ValueError for an unknown op.
    """
    unknown = sorted(set(ops) - set(OPS))
    if unknown:
        raise ValueError(f"op={unknown[0]!r} is unknown; known: {', '.join(OPS)}.")
    cases = [case for case in all_cases() if not ops or case.op in ops]
    on_gpu = jax.devices()[0].platform == "gpu"
    rates = device_rates() if on_gpu else None
    ways = ("pallas_triton", "xla") if on_gpu else ("xla",)
    timed = cases if on_gpu else [case for case in cases if case.short]
    return {
        "device": {"kind": device.kind, "source": "data sheet", **Rates.of(device)._asdict()},
        "roofline": roofline_rows(cases, Rates.of(device)),
        "measured_rates": None if rates is None else rates._asdict(),
        "measured": [
            measure(case, way, small=not on_gpu, rates=rates) | {"git_sha": git_sha} for case in timed for way in ways
        ],
    }


def measure(
    case: Case,
    implementation: str,
    *,
    small: bool,
    interpret: bool = False,
    config: Any = None,
    rates: Rates | None = None,
) -> dict[str, Any]:
    """Runs one case and returns a row: compile and steady time per call, error against NumPy (small cases only).

    small: the size that interpretation can do; a row says which was run. rates: what the bound is made with; without
    them, and at the small size, the row has none.
    """
    args = case.args(Draw(SEED), small)
    options = {"implementation": implementation, "interpret": interpret, "config": config}
    if config is None:
        del options["config"]

    def call(*a: Any) -> Any:
        return case.call(*a, **options)

    error = error_of(call, case, args) if small else None
    compile_s, steady_s = time_call(call, args, case.update)
    row = {
        "op": case.op, "case": case.name, "implementation": implementation + (" (interpreted)" if interpret else ""),
        "shape": "small" if small else dict(case.shape), "dtype": str(case.shape.get("dtype", "")),
        "config": None if config is None else repr(config), "device": jax.devices()[0].device_kind,
        "compile_s": round(compile_s, 3), "steady_us": round(1e6 * steady_s, 2), "error": error,
        "versions": versions(),
    }  # fmt: skip
    if rates is not None and not small:
        seconds, by = bound(case.cost, rates)
        row |= {"bound": by, "bound_us": round(1e6 * seconds, 4), "of_bound": round(seconds / steady_s, 3)}
    return row


def error_of(call: Callable[..., Any], case: Case, args: tuple) -> float:
    """Largest difference from `case.want`, as a share of the largest magnitude wanted; inf where infinities differ."""
    # NumPy first: an op may consume its inputs.
    want = jax.tree.leaves(case.want(*jax.tree.map(np.asarray, args)))
    got = jax.tree.leaves(jax.jit(call)(*args))
    return max(relative_error(np.asarray(g), np.asarray(w)) for g, w in zip(got, want, strict=True))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Of integers and bytes how many elements differ, of floats the largest difference over the largest value."""
    if np.issubdtype(want.dtype, np.integer):
        return float(np.sum(got != want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if got.shape != want.shape or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    scale = max(np.abs(want[finite]).max(initial=0.0), 1e-30)
    difference = np.abs(got[finite] - want[finite]).max(initial=0.0)
    return float("inf") if np.isnan(difference) else float(difference / scale)


def time_call(call: Callable[..., Any], args: tuple, update: Update | None = None) -> tuple[float, float]:
    """(seconds to compile, median seconds per call), several calls inside one compiled loop.

    Consumes the argument of `update`.
    """
    updated, others = (None, args) if update is None else update.split(args)
    start = time.perf_counter()
    compiled = calls_in_a_loop(call, update).lower(updated, others).compile()
    compile_s = time.perf_counter() - start
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        updated, _ = jax.block_until_ready(compiled(updated, others))
        seconds.append((time.perf_counter() - start) / CALLS)
    return compile_s, statistics.median(seconds[1:])  # the first warms up


def calls_in_a_loop(call: Callable[..., Any], update: Update | None) -> Any:
    """A jitted program (updated, others) -> (updated, a sum of results) that makes CALLS calls.

    What a call returns for the argument that it updates is the argument of the next one, and the first is donated:
    nothing of its size is copied. Barriers tie each call to the one before: otherwise the compiler hoists it out of the
    loop or shortens it to the one element that the sum needs.
    """

    def calls(updated: Any, others: tuple) -> tuple:
        def once(_: int, state: tuple) -> tuple:
            updated, args, total = lax.optimization_barrier((state[0], others, state[1]))
            result = lax.optimization_barrier(call(*(args if update is None else update.join(updated, args))))
            first = (leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(result))
            return updated if update is None else update.of(result), total + sum(first)

        return lax.fori_loop(0, CALLS, once, (updated, jnp.float32(0)))

    return jax.jit(calls, donate_argnums=0)


def device_rates(nbytes: int = 2**30, side: int = 8192) -> Rates:
    """Measured on the device at hand: one pass of a copy (read plus written), a bfloat16 product of square matrices."""
    array = jnp.ones((nbytes // 4,), jnp.float32)
    copy = time_call(lambda a: a + 1, (array,))[1]
    matrix = jnp.ones((side, side), jnp.bfloat16)
    product = time_call(lambda m: jnp.dot(m, m, preferred_element_type=jnp.float32), (matrix,))[1]
    return Rates(2 * nbytes / copy, 2 * side**3 / product)
