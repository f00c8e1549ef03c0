"""Products that evidence is made for: three weights of the released model, each with 1, 32 and 128 rows, and w1 of
a quarter of the routed experts, with the pairs of 32 decoded tokens and with blocks of a prefill chunk."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.cases import Budget, Case, Cost
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.expected import decode, nearest, power_of_two_scale
from pallas_kernels.common.formats import FORMATS
from pallas_kernels.packed_linear.api import packed_linear
from pallas_kernels.packed_linear.config import LinearConfig, bucket
from pallas_kernels.packed_linear.weights import BLOCK, scale_shape

# name: (kind, in, out); the second product of grouped output is shown by its widest form
WEIGHTS = {"wq_b": ("fp8", 1280, 64 * 512), "wo_b": ("fp8", 8 * 1024, 5120), "w1": ("fp4", 5120, 2304)}


EXPERTS = 96
GROUPS = {1: 192, 64: 256}  # rows of a group: groups


def _args(draw: Draw, small: bool, *, rows: int, kind: str, inputs: int, out: int, groups: int = 0):
    inputs, out = (256, 96) if small else (inputs, out)
    groups, experts = (min(groups, 5), 3) if small else (groups, EXPERTS)
    lead, many = ((groups,), (experts,)) if groups else ((), ())
    codes = draw.integers(0, 256, (*many, out, inputs if kind == "fp8" else inputs // 2), jnp.uint8)
    if kind == "fp8" and not draw.abstract:
        codes = codes & 0xBF  # magnitudes below 2: no NaN
    scale = draw.integers(118, 124, (*many, *scale_shape(out, inputs, kind)), jnp.uint8)
    expert = (draw.integers(-1, experts, lead),) if groups else ()
    return draw.normal((*lead, rows, inputs), jnp.bfloat16), codes, scale, *expert


def _want(x, codes, scale, *expert, kind: str):
    if expert:
        chosen = np.asarray(expert[0])
        products = [_want(x[g], codes[max(e, 0)], scale[max(e, 0)], kind=kind) for g, e in enumerate(chosen)]
        return np.where(chosen[:, None, None] < 0, 0.0, products)
    x, codes, scale = np.asarray(x).astype(np.float32), np.asarray(codes), np.asarray(scale)
    groups = x.reshape(len(x), -1, BLOCK)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(FORMATS["mxfp8"].amax_floor))
    factor = np.float32(2.0) ** (power_of_two_scale(amax, 448.0) - 127)
    inputs = (decode(nearest(groups / factor, "e4m3"), "e4m3") * factor).reshape(x.shape)
    if kind == "fp4":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    else:
        scale = scale.repeat(BLOCK, 0)[: len(codes)]
    weight = decode(codes, "e2m1" if kind == "fp4" else "e4m3").reshape(len(codes), -1, BLOCK)
    weight *= 2.0 ** (scale[..., None].astype(np.float64) - 127)
    return inputs @ weight.reshape(codes.shape).T


def _cost(rows: int, kind: str, inputs: int, out: int, groups: int = 0) -> Cost:
    weight = out * inputs // (2 if kind == "fp4" else 1) + int(np.prod(scale_shape(out, inputs, kind)))
    total = max(1, groups) * rows
    weights = min(groups, EXPERTS) if groups else 1  # a group may choose the expert of another
    return Cost(weights * weight + 2 * total * inputs + 4 * total * out, 2 * total * inputs * out)


def _case(rows: int, name: str, groups: int = 0) -> Case:
    kind, inputs, out = WEIGHTS[name]
    size = {"rows": rows, "kind": kind, "inputs": inputs, "out": out} | ({"groups": groups} if groups else {})
    return Case(
        op="packed_linear",
        name=f"{name}_{'experts_' if groups else ''}{rows}",
        args=functools.partial(_args, **size),
        call=functools.partial(packed_linear, kind=kind),
        want=functools.partial(_want, kind=kind),
        cost=_cost(**size),
        budget=Budget(matrix=True, instructions=500),
        # Sums of up to 8,192 terms: rounding and the truncation inside matrix units, which is not documented.
        tolerance=2e-4,
        short=(rows == 1 if groups else rows == 32) and name != "wo_b",
        configs=tuple(
            LinearConfig(rows=max(16, rows), outputs=o, inputs=i, splits=s, num_warps=w)
            for o in (32, 64, 128) for i in (64, 128) for w in (4, 8)
            for s in ((1,) if groups or name == "wq_b" else (2, 4, 8))
        ),
        bucket=bucket(rows, inputs, out, kind, grouped=bool(groups)),
        shape={"in" if name == "inputs" else name: value for name, value in size.items()},
    )  # fmt: skip


CASES = (
    *(_case(rows, name) for name in WEIGHTS for rows in (1, 32, 128)),
    *(_case(rows, "w1", groups) for rows, groups in GROUPS.items()),
)
