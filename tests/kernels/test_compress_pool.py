"""`compress_pool`: latents and carried state of ragged steps against a loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.compress_pool import reference
from pallas_kernels.compress_pool.api import compress_pool
from pallas_kernels.compress_pool.config import PoolConfig
from pallas_kernels.compress_pool.rows import StepRows
from tests.oracles import kernels_compress_pool as oracle

STATE_ROWS = 8
TOLERANCE = 2e-6  # of float32 exponentials and sums of up to 8 terms against float64
# (slot, start, rows): one token that ends or leaves a group, a chunk longer than the state, an unused entry, a block
SEQUENCES = [(3, 5, 1), (0, 0, 20), (6, 16, 3), (-1, 0, 0), (1, 11, 9), (4, 7, 1)]


def _xla(*args, **static):
    return _jitted(compress_pool, implementation="xla", **static)(*args)


def _kernel(*args, **static):
    return compress_pool(*args, **static, implementation="pallas_triton", interpret=True)


def _reference(*args, **static):
    return _jitted(reference.compress_pool, **static)(*args)


@functools.cache
def _jitted(function, **static):
    """One compiled program per shape, also for the steps of a loop."""
    return jax.jit(functools.partial(function, **static))


WAYS = {"xla": _xla, "kernel": _kernel, "reference": _reference}


def step_of(sequences, ratio, padding=2):
    """(StepRows, done) of sequences one after the other, with padding rows behind them and in `done`."""
    first = np.cumsum([0] + [count for _, _, count in sequences])
    positions = np.full(first[-1] + padding, -1)
    row_to_seq = np.zeros_like(positions)
    for s, (_, start, count) in enumerate(sequences):
        positions[first[s] : first[s + 1]] = np.arange(start, start + count)
        row_to_seq[first[s] : first[s + 1]] = s
    done = [row for row, p in enumerate(positions) if p >= 0 and (p + 1) % ratio == 0] + [-1, -1]
    starts = np.array([start for _, start, _ in sequences])
    lengths = starts + np.array([count for _, _, count in sequences])
    slots = [slot for slot, _, _ in sequences]
    arrays = positions, row_to_seq, first[:-1], starts, lengths, slots
    return StepRows(*(jnp.asarray(np.array(a), jnp.int32) for a in arrays)), jnp.asarray(done, jnp.int32)


def draw(step, width, owners, seed=0):
    """(rows, state): what no sequence may read is NaN - padding rows, state of unused slots and of other owners."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(len(step.positions), 2 * width)).astype(np.float32)
    rows[:, width:] *= 8  # gates far apart: some weights underflow
    rows[np.asarray(step.positions) < 0] = np.nan
    state = np.full((7, owners, STATE_ROWS, 2 * width), np.nan, np.float32)
    for slot in np.asarray(step.slot):
        if slot >= 0:
            state[slot, owners - 1] = rng.normal(size=state.shape[2:])
    return rows, state


def check(got, done, state, latents, wanted_state, owner):
    pooled, kept = (np.asarray(a) for a in got)
    for g, row in enumerate(np.asarray(done)):
        wanted = latents[row] if row >= 0 else np.zeros(pooled.shape[1])
        np.testing.assert_allclose(pooled[g], wanted, rtol=0, atol=TOLERANCE * max(1, np.abs(wanted).max()))
    wanted_state = wanted_state if owner is not None else wanted_state[:, 0]
    assert np.array_equal(kept, wanted_state, equal_nan=True), "exactly the last rows of each sequence are stored"


@pytest.mark.parametrize(
    ("ratio", "owner"),
    [(2, 1), *(pytest.param(*p, marks=pytest.mark.slow) for p in [(2, None), (3, None), (3, 1), (8, None), (8, 1)])],
)
def test_ragged_steps_equal_the_loop(ratio, owner):
    """Groups that began steps ago, chunks that overwrite the state rows they read, unused entries, poison around."""
    step, done = step_of(SEQUENCES, ratio)
    rows, state = draw(step, 24, 2 if owner else 1)
    wanted_state = state.copy()
    sequences = [
        (slot, int(first), start, count)
        for (slot, start, count), first in zip(SEQUENCES, np.asarray(step.first_row), strict=True)
    ]
    latents = oracle.step(rows, wanted_state, owner or 0, sequences, ratio)
    assert len(latents) == len(done) - 2
    args = jnp.asarray(rows), jnp.asarray(state if owner else state[:, 0]), done, step
    for run in WAYS.values():
        check(run(*args, ratio=ratio, owner=owner), done, state, latents, wanted_state, owner)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [4, 5, 6, 7])
def test_every_ratio_equals_the_loop(ratio):
    test_ragged_steps_equal_the_loop(ratio, 1)


@pytest.mark.smoke
def test_token_by_token_equals_one_chunk_also_after_a_rejection():
    """Verify blocks whose last rows are rejected leave what the next step needs: the state is keyed by position."""
    ratio, width, length = 3, 8, 14
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(length, 2 * width)), jnp.float32)
    whole, done = step_of([(2, 0, length)], ratio, padding=0)
    state = jnp.zeros((4, STATE_ROWS, 2 * width))
    want = _xla(rows, state, done, whole, ratio=ratio)[0]
    for run in (_xla, _kernel):
        kept, got, start = state, [], 0
        while start < length:
            tried = min(4, length - start)
            part, done = step_of([(2, start, tried)], ratio, padding=4 - tried)
            done = jnp.pad(done[:-2], (0, 4 - len(done)), constant_values=-1)
            # Of the block only the first two are kept; the others are speculation with other values.
            block = jnp.where(jnp.arange(4)[:, None] < 2, jnp.pad(rows, ((0, 4), (0, 0)))[start : start + 4], 7.0)
            pooled, kept = run(block, kept, done, part, ratio=ratio)
            got += [pooled[g] for g, row in enumerate(np.asarray(done)) if 0 <= row < 2]
            start += 2
        np.testing.assert_allclose(np.stack(got), want[: len(got)], rtol=0, atol=TOLERANCE * 4)
        assert len(got) == length // ratio


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 64])
def test_channels_of_a_program_do_not_matter(block):
    step, done = step_of(SEQUENCES, 2)
    rows, state = draw(step, 32, 1)
    args = jnp.asarray(rows), jnp.asarray(state[:, 0]), done, step
    wanted = _xla(*args, ratio=2)
    got = compress_pool(*args, ratio=2, implementation="pallas_triton", interpret=True, config=PoolConfig(block=block))
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=TOLERANCE * 8)
    assert np.array_equal(got[1], wanted[1], equal_nan=True)


def test_a_step_without_groups_only_keeps_its_rows():
    step, _ = step_of([(0, 4, 1)], 2, padding=0)
    rows, state = draw(step, 8, 1)
    args = jnp.asarray(rows), jnp.asarray(state[:, 0]), jnp.zeros(0, jnp.int32), step
    for run in (_xla, _kernel):
        pooled, kept = run(*args, ratio=2)
        assert pooled.shape == (0, 8) and np.array_equal(kept[0, 4], rows[0])


def test_a_donated_state_is_updated_in_place():
    step, done = step_of(SEQUENCES, 2)
    rows = jnp.zeros((len(step.positions), 64))
    state = jax.ShapeDtypeStruct((20_000, 2, STATE_ROWS, 64), jnp.float32)
    call = jax.jit(
        lambda s, r, d, t: compress_pool(r, s, d, t, ratio=2, owner=1, implementation="xla"), donate_argnums=0
    )
    memory = call.lower(state, rows, done, step).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * state.size
    assert memory.temp_size_in_bytes < 4 * state.size // 100


def test_bad_input_is_refused_with_its_reason():
    step, done = step_of(SEQUENCES, 2)
    rows, state = (jnp.asarray(a) for a in draw(step, 8, 2))
    wrong = {
        "rows must be float32[T, 2 D], got bfloat16": (rows.astype(jnp.bfloat16), state, done, step, 2, 1),
        "ratio=9 must be 2 to 8": (rows, state, done, step, 9, 1),
        "state must be float32[slots, R, 2 D] with 2 D = 16": (rows, state, done, step, 2, None),
        "owner=2 must number one of the 2 owners": (rows, state, done, step, 2, 2),
        "R=2 rows of state cannot hold a group of ratio=3": (rows, state[:, :, :2], done, step, 3, 1),
        "done must be int32[G], got float32": (rows, state, done * 1.0, step, 2, 1),
        "step.slot": (rows, state, done, step._replace(slot=step.slot * 1.0), 2, 1),
    }
    for sentence, (*args, ratio, owner) in wrong.items():
        with pytest.raises(ValueError) as error:
            compress_pool(*args, ratio=ratio, owner=owner)
        assert sentence in str(error.value) and str(error.value).endswith(".")
    with pytest.raises(UnsupportedError, match="R=6 must be a power of two"):
        compress_pool(
            rows, state[:, :, :6], done, step, ratio=2, owner=1, implementation="pallas_triton", interpret=True
        )
    with pytest.raises(ValueError, match="block=3 must be a power of two"):
        PoolConfig(block=3)
