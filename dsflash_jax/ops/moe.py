"""Mixture of experts: gate and routed experts (contract.md, Hyper-connections, norms, experts)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsflash_jax.ops.linear import Weight, linear, linear_f32
from dsflash_jax.ops.packed import PackedWeight
from pallas_kernels.topk_select.xla import canonical

# Measured on two CPU cores: sorting pays from about two pairs per expert; products of 128 rows run at twice the rate of
# 64, and larger blocks gain nothing.
ALONE_PAIRS_PER_EXPERT = 2
BLOCK_ROWS, LEAST_BLOCK_ROWS = 128, 8
# Without room every other expert needs one more block that is nearly empty (512 tokens on 8 experts: 12 blocks, not 8).
BLOCK_ROOM = 1 / 8
# Of a kernel: the least is what a matrix instruction multiplies at once. Not measured.
GROUP_ROWS, LEAST_GROUP_ROWS = 64, 16


def gate_scores(logits: jax.Array, scoring_func: str) -> jax.Array:
    """Expert scores from float32 logits [T, E]: softmax, sigmoid, or sqrt(softplus)."""
    if scoring_func == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if scoring_func == "sigmoid":
        return jax.nn.sigmoid(logits)
    if scoring_func != "sqrtsoftplus":
        raise ValueError(f"scoring_func={scoring_func!r} is not one of softmax, sigmoid, sqrtsoftplus.")
    # softplus underflows to 0 far below zero, where sqrt has no finite gradient; the floor keeps both finite.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(jnp.float32).tiny))


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    k: int,
    scoring_func: str,
    temp: float,
    normalise: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Chooses k experts per row: (weights float32[T, k], experts int32[T, k], best first).

    `bias` [E] takes part in the choice only; weights come from the unbiased scores. Float32 throughout.
    """
    scores = gate_scores(linear_f32(x.astype(jnp.float32), weight.astype(jnp.float32)) / temp, scoring_func)
    _, experts = lax.top_k(canonical(scores + bias), k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise and k > 1:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * scale, experts


def swiglu(up: jax.Array, gate: jax.Array, limit: float) -> jax.Array:
    """silu(gate) * up in float32; up clamped to +-limit, gate only from above; limit 0 means no clamp."""
    up, gate = up.astype(jnp.float32), gate.astype(jnp.float32)
    if limit > 0:
        up, gate = jnp.clip(up, -limit, limit), jnp.minimum(gate, limit)
    return jax.nn.silu(gate) * up


def expert(
    x: jax.Array, w1: Weight, w2: Weight, w3: Weight, limit: float, route_weight: jax.Array | None = None
) -> jax.Array:
    """One SwiGLU expert on x [..., d]; `route_weight` [...] multiplies before w2, as in the reference."""
    hidden = swiglu(linear(x, w3), linear(x, w1), limit)
    if route_weight is not None:
        hidden = hidden * route_weight[..., None]
    return linear(hidden.astype(x.dtype), w2)


def routed_experts_all(
    x: jax.Array, weights: jax.Array, experts: jax.Array, w1: jax.Array, w2: jax.Array, w3: jax.Array, limit: float
) -> jax.Array:
    """Every expert on every row, unchosen ones weighted 0: float32[T, d]. For training with few small experts.

    w1, w3 [E, f, d] and w2 [E, d, f] act as one expert of width E * f: three plain products, and a gradient without a
    scatter into the stacked weights.
    """
    count, inner, width = w1.shape
    dense = jnp.sum(jax.nn.one_hot(experts, count) * weights[..., None], axis=-2)
    hidden = swiglu(linear(x, w3.reshape(-1, width)), linear(x, w1.reshape(-1, width)), limit)
    hidden = hidden * jnp.repeat(dense, inner, axis=-1)
    return linear_f32(hidden.astype(x.dtype), jnp.moveaxis(w2, 0, 1).reshape(width, -1))


def routed_experts(
    x: jax.Array, weights: jax.Array, experts: jax.Array, w1: Weight, w2: Weight, w3: Weight, limit: float
) -> jax.Array:
    """Chosen experts only: x [T, d], weights and experts [T, k] -> float32[T, d]. Has no reverse gradient for
    many rows: training uses `routed_experts_all`.

    The few (row, expert) pairs of a decode step run one by one. Otherwise pairs are sorted by expert and padded to
    blocks of one expert each, one dense product per block; no row is dropped. An expert number E is one that is held
    elsewhere: its pairs add nothing. Packed weights that a kernel multiplies run all blocks at once (`_run_groups`).
    """
    rows, k = experts.shape
    count = w1.shape[0]

    def one(pairs: jax.Array, w1: Weight, w2: Weight, w3: Weight) -> jax.Array:
        source = jnp.maximum(pairs, 0)
        gain = jnp.where(pairs >= 0, weights.reshape(-1)[source], 0.0)
        return expert(x[source // k], w1, w2, w3, limit, gain)

    def summed(run: Callable, experts: jax.Array) -> jax.Array:
        out, place = run(one, experts.reshape(-1), (w1, w2, w3))
        place, here = place.reshape(rows, k), experts < count
        return sum(jnp.where(here[:, i, None], out[place[:, i]].astype(jnp.float32), 0.0) for i in range(k))

    in_turn = functools.partial(summed, _run_alone if rows * k <= ALONE_PAIRS_PER_EXPERT * count else _run_by_expert)
    at_once = functools.partial(summed, functools.partial(_run_groups, alone=rows == 1))
    implementation = w1.kernels.implementation if isinstance(w1, PackedWeight) else "xla"
    if implementation is None:
        return lax.platform_dependent(experts, cuda=at_once, default=in_turn)
    return (in_turn if implementation == "xla" else at_once)(experts)


def _run_alone(one: Callable, experts: jax.Array, matrices: tuple) -> tuple[jax.Array, jax.Array]:
    """(results [N, d], row of each pair in them): every pair a product of its own, in order."""
    pair = jnp.arange(experts.size)

    def alone(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        pick = functools.partial(lax.dynamic_index_in_dim, index=args[1], axis=0, keepdims=False)
        return one(args[0], *jax.tree.map(pick, matrices))

    out = lax.map(alone, (pair[:, None], experts))
    return out.reshape(experts.size, -1), pair


def _run_by_expert(one: Callable, experts: jax.Array, matrices: tuple) -> tuple[jax.Array, jax.Array]:
    """As `_run_alone`, expert by expert: each one's weights are fetched once, and only blocks that hold pairs run."""
    count = matrices[0].shape[0]
    pair, first, used, place = _blocks_by_expert(experts, count, _block_rows(experts.size, count))
    shape = jax.eval_shape(one, pair[0], *jax.tree.map(lambda w: w[0], matrices))
    empty = jnp.zeros((pair.shape[0], *shape.shape), shape.dtype)

    def blocks(out: jax.Array, args: tuple) -> tuple[jax.Array, None]:
        e, *chosen = args

        def block(i: jax.Array, out: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(out, one(pair[i], *chosen), i, 0)

        return lax.fori_loop(first[e], first[e] + used[e], block, out), None

    out, _ = lax.scan(blocks, empty, (jnp.arange(count), *matrices))
    return out.reshape(pair.size, -1), place


def _run_groups(one: Callable, experts: jax.Array, matrices: tuple, alone: bool) -> tuple[jax.Array, jax.Array]:
    """As `_run_alone`, all at once, for packed weights: a kernel finds the weight of each group of pairs by itself.

    Pairs with one expert share its weight, which is read once per group; of one row's pairs (alone) no two do.
    """
    count = matrices[0].shape[0]
    if alone:
        place = jnp.arange(experts.size)
        pair, chosen = place[:, None], experts
    else:
        pair, _, used, place = _blocks_by_expert(experts, count, _group_rows(experts.size, count))
        chosen = jnp.searchsorted(jnp.cumsum(used), jnp.arange(len(pair)), side="right", method="compare_all")
    chosen = jnp.where(chosen < count, chosen, -1).astype(jnp.int32)
    out = one(pair, *(dataclasses.replace(w, expert=chosen) for w in matrices))
    return out.reshape(pair.size, -1), place


def _blocks_by_expert(experts: jax.Array, count: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Pairs int32[N] sorted by expert and padded to blocks of one expert each, of `block` pairs.

    Returns (pair int32[blocks, rows per block], -1 = padding; first block of each expert; blocks of each expert; place
    of each pair in the flattened blocks).
    """
    total = experts.size
    num_blocks = min(total, -(-total // block) + count - 1)
    order = jnp.argsort(experts, stable=True)
    counts = jnp.sum(jax.nn.one_hot(experts, count, dtype=jnp.int32), axis=0)
    used = -(-counts // block)
    first = jnp.cumsum(used) - used
    held = experts[order] < count
    rank = jnp.arange(total) - (jnp.cumsum(counts) - counts)[experts[order]]
    sorted_place = first[experts[order]] * block + rank
    target = jnp.where(held, sorted_place, num_blocks * block)
    pair = jnp.full(num_blocks * block, -1).at[target].set(order, mode="drop").reshape(num_blocks, block)
    return pair, first, used, jnp.zeros(total, jnp.int32).at[order].set(jnp.where(held, sorted_place, 0))


def _block_rows(pairs: int, experts: int) -> int:
    """Rows per block: an equal part of one expert's mean share, with room for an expert that has a little more."""
    share = -(-pairs // experts)
    part = share / -(-share // BLOCK_ROWS)
    return max(LEAST_BLOCK_ROWS, -(-int(part * (1 + BLOCK_ROOM)) // LEAST_BLOCK_ROWS) * LEAST_BLOCK_ROWS)


def _group_rows(pairs: int, experts: int) -> int:
    """Rows per block of a kernel: the power of two at or below one expert's mean share."""
    share = 1 << (max(1, pairs // experts).bit_length() - 1)
    return min(GROUP_ROWS, max(LEAST_GROUP_ROWS, share))
