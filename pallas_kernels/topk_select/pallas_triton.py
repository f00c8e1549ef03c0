"""`topk_select` without a sort: blocks of scores in registers, the k-th largest found by counting, bits at a time.

A row longer than a block is reduced in rounds: the k best of a row are among the k best of its blocks. A round writes
the survivors of each block in order of position, so that equal scores keep being decided by position.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import pallas_triton as common
from pallas_kernels.common.tiles import next_power_of_two, shared_memory_reasons
from pallas_kernels.topk_select.config import TopkConfig

_SIGN, _LARGEST = -(2**31), 2**31 - 1
_KEY_OF_MINUS_INFINITY = -2139095041  # int32 of _key(-inf); Triton cannot bitcast a literal
_KEY_OF_LARGEST_FINITE = 0x7F7FFFFF
_WORD = 32


def unsupported(scores: jax.Array, k: int, config: TopkConfig) -> tuple[str, ...]:
    """Why the kernel cannot serve the call; empty if it can."""
    reasons = []
    block = _block(scores.shape[1], config)
    if scores.shape[1] > block and 2 * k > block:
        reasons.append(f"k={k} of rows longer than block={block} must be at most half a block")
    # Prefix sums and layout changes pass the block through shared memory.
    reasons += shared_memory_reasons(f"block={block}", 4 * block)
    return tuple(reasons + common.grid_reasons("rows", scores.shape[0]))


@functools.partial(jax.jit, static_argnames=("k", "config", "interpret", "name"))
def topk_select(
    scores: jax.Array,
    pinned: jax.Array | None = None,
    *,
    k: int,
    config: TopkConfig,
    interpret: bool,
    name: str = "topk_select",
) -> jax.Array:
    """As `api.topk_select`. pinned int32[T], -1 = none: a position that precedes all others whatever its score; with
    pins +inf counts as the largest finite score, as it does for candidate blocks. name: of the kernel."""
    block, rows = _block(scores.shape[1], config), scores.shape[0]
    run = functools.partial(
        _round, pinned=pinned, rows=rows, k=k, block=block, config=config, interpret=interpret, name=name
    )
    position = None
    while scores.shape[1] > block:
        scores, position = run(scores, position)
    _, position = run(scores, position)
    return position[:rows]


def _block(entries: int, config: TopkConfig) -> int:
    return min(config.block, next_power_of_two(entries))


def _round(scores, position, *, pinned, rows: int, k: int, block: int, config: TopkConfig, interpret: bool, name: str):
    """The k best of each block, in order of position: (scores, positions) [rows + 1, blocks * k], -inf and -1 padded.

    The last row is spare: lanes that store nothing aim at it. A spare slot a block would give rows an odd length, whose
    loads are not vectors and spill registers. Inputs may have that row, too.
    """
    width = scores.shape[1]
    blocks = pl.cdiv(width, block)
    operands = {"score": scores, "position": position, "pinned": pinned}
    operands = {key: value for key, value in operands.items() if value is not None}
    kernel = functools.partial(_kernel, names=tuple(operands), width=width, k=k, block=block, bits=config.bits)
    out = [jax.ShapeDtypeStruct((rows + 1, blocks * k), dtype) for dtype in (jnp.float32, jnp.int32)]
    return common.call(
        kernel, *operands.values(), name=name, grid=(blocks, rows), out_shape=out, config=config,
        interpret=interpret,
    )  # fmt: skip


def _kernel(*refs, names: tuple[str, ...], width: int, k: int, block: int, bits: int):
    *inputs, value_ref, index_ref = refs
    ref = dict(zip(names, inputs, strict=True))
    part, row = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(block, dtype=jnp.int32)
    at = jnp.full((block,), row, jnp.int32), part * block + lane
    inside = at[1] < width
    score = common.load_at(ref["score"], at, inside, float("-inf"))
    position = common.load_at(ref["position"], at, inside, -1) if "position" in ref else at[1]
    key = _key(score)
    if "pinned" in ref:
        # A position of -1 is padding between the rounds, a pin of -1 none, a pin behind the row none either.
        pinned = (position == ref["pinned"][row]) & (position >= 0) & inside
        key = jnp.where(pinned, _LARGEST, jnp.minimum(key, _KEY_OF_LARGEST_FINITE))
    threshold = _kth_largest(key, k, bits)
    above, equal = key > threshold, key == threshold
    spare = k - jnp.sum(above.astype(jnp.int32))
    chosen = above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= spare))
    chosen &= key > _KEY_OF_MINUS_INFINITY
    place = jnp.cumsum(chosen.astype(jnp.int32)) - 1
    count = jnp.sum(chosen.astype(jnp.int32))
    slot = jnp.arange(next_power_of_two(k), dtype=jnp.int32)
    free = (slot >= count) & (slot < k)
    for out_ref, value, padding in ((value_ref, score, float("-inf")), (index_ref, position, -1)):
        _store(out_ref, row, part * k, place, value, chosen)
        _store(out_ref, row, part * k, slot, jnp.full(slot.shape, padding, out_ref.dtype), free)


def _store(ref, row: jax.Array, first: jax.Array, slot: jax.Array, value: jax.Array, mask: jax.Array) -> None:
    """ref[row, first + slot] = value where mask; other lanes aim at the spare row."""
    spare = ref.shape[0] - 1
    common.scatter(ref, (jnp.where(mask, row, spare), jnp.where(mask, first + slot, 0)), value, mask)


def _key(score: jax.Array) -> jax.Array:
    """int32 in the order of the scores: equal for both zeros, lowest for NaN."""
    bits = lax.bitcast_convert_type(jnp.where(score == 0.0, 0.0, score), jnp.int32)
    key = bits ^ ((bits >> (_WORD - 1)) & 0x7FFFFFFF)
    return jnp.where(score != score, _SIGN, key)


def _kth_largest(key: jax.Array, k: int, bits: int) -> jax.Array:
    """The largest value that at least k keys reach (the lowest of all where there are fewer), digit by digit."""

    def decide(digit: jax.Array, low: jax.Array) -> jax.Array:
        shift = _WORD - bits * (digit + 1)
        found = low
        for value in range(1, 1 << bits):
            candidate = low | (value << shift)
            reached = jnp.sum((key >= (candidate ^ _SIGN)).astype(jnp.int32))
            found = jnp.where(reached >= k, candidate, found)
        return found

    return lax.fori_loop(0, _WORD // bits, decide, jnp.int32(0)) ^ _SIGN
