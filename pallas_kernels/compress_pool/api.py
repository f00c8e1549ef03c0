"""Gated pooling of m tokens into one latent, with the open group carried between steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.compress_pool import pallas_triton, xla
from pallas_kernels.compress_pool.config import PoolConfig, default_config
from pallas_kernels.compress_pool.rows import StepRows

OP = "compress_pool"
MAX_RATIO = 8


def compress_pool(
    rows: jax.Array,
    state: jax.Array,
    done: jax.Array,
    step: StepRows,
    *,
    ratio: int,
    owner: int | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: PoolConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Latents of the groups that a step completes, and the state with the step's last rows in it.

    Args:
      rows: float32[T, 2 D], of each row the un-normed value and then the gate.
      state: float32[slots, R, 2 D], or [slots, owners, R, 2 D] of which `owner` is meant. The row of position p lies at
        p % R, so what a rejected speculative row overwrote is at least R positions old. Donate it: updated in place.
      done: int32[G] rows whose token completes a group of `ratio`, -1 = padding.
      step: which rows belong to which sequence. Positions before `start` are read from the state.
      ratio: m, 2 to 8. R must be at least m.
      implementation, interpret: see `common.dispatch.dispatch`. config: tiles of the kernels, None = the tuned ones.

    Returns: (float32[G, D], state). A latent is the sum of its members' values weighted by a softmax of their gates per
    channel, float32; padding gives exactly 0. Of each sequence the last R rows are stored.

    Raises ValueError for other dtypes and shapes, UnsupportedError where a named implementation cannot serve.
    Source: report §2.3, reference inference/model.py.
    """
    step = StepRows(*step)
    _check(rows, state, done, step, ratio, owner)
    config = config or default_config(rows.shape[0])
    static = {"ratio": ratio, "owner": owner}
    kernel = Kernel(
        functools.partial(pallas_triton.compress_pool, **static, config=config, interpret=interpret),
        pallas_triton.unsupported(rows, state),
    )
    plain = functools.partial(xla.compress_pool, **static)
    return dispatch(OP, implementation, plain, {"pallas_triton": kernel}, rows, state, done, step, interpret=interpret)


def _check(rows, state, done, step: StepRows, ratio: int, owner: int | None) -> None:
    if rows.dtype != jnp.float32 or rows.ndim != 2 or rows.shape[1] < 2 or rows.shape[1] % 2:
        raise ValueError(f"{OP}: rows must be float32[T, 2 D], got {rows.dtype}{list(rows.shape)}.")
    if not 2 <= ratio <= MAX_RATIO:
        raise ValueError(f"{OP}: ratio={ratio} must be 2 to {MAX_RATIO}.")
    wanted = "[slots, R, 2 D]" if owner is None else "[slots, owners, R, 2 D]"
    ndim = 3 if owner is None else 4
    if state.dtype != jnp.float32 or state.ndim != ndim or state.shape[-1] != rows.shape[1]:
        got = f"{state.dtype}{list(state.shape)}"
        raise ValueError(f"{OP}: state must be float32{wanted} with 2 D = {rows.shape[1]}, got {got}.")
    if owner is not None and not 0 <= owner < state.shape[1]:
        raise ValueError(f"{OP}: owner={owner} must number one of the {state.shape[1]} owners of the state.")
    if state.shape[-2] < ratio:
        raise ValueError(f"{OP}: R={state.shape[-2]} rows of state cannot hold a group of ratio={ratio}.")
    if done.dtype != jnp.int32 or done.ndim != 1:
        raise ValueError(f"{OP}: done must be int32[G], got {done.dtype}{list(done.shape)}.")
    lengths = {"positions": rows.shape[0], "row_to_seq": rows.shape[0]}
    for name, value in step._asdict().items():
        length = lengths.get(name, step.slot.shape[0])
        if value.dtype != jnp.int32 or value.shape != (length,):
            raise ValueError(f"{OP}: step.{name} must be int32[{length}], got {value.dtype}{list(value.shape)}.")
