"""The gate and the write of n-gram memory, against loops and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.ops.engram import gates, signed_sqrt, write_memory
from tests.oracles import engram


@pytest.mark.smoke
@pytest.mark.parametrize(("product", "gate"), [(0.0, 0.50025), (-0.0, 0.49975), (4.0, 0.880797), (-4.0, 0.119203)])
def test_the_gate_keeps_the_sign_of_its_product_also_of_zero(product, gate):
    """B78: a sign function would give 0.5 at both zeros."""
    ours = float(jax.jit(lambda x: jax.nn.sigmoid(signed_sqrt(x)))(jnp.float32(product)))
    assert ours == pytest.approx(gate, abs=2e-6) and engram.gate(product) == pytest.approx(gate, abs=2e-6)


@pytest.mark.parametrize("product", [0.0, -0.0, 1e-7, -1e-7, 1e-6, 1.0, -2.0])
def test_the_gate_has_a_finite_gradient_everywhere(product):
    """B78: the root alone has none at 0."""
    slope = float(jax.grad(lambda x: jax.nn.sigmoid(signed_sqrt(x)))(jnp.float32(product)))
    assert np.isfinite(slope) and slope >= 0


def test_gates_and_write_equal_the_loop():
    draws = np.random.default_rng(0)
    streams, q_weight, k_weight = (draws.normal(size=(3, 16)).astype(np.float32) for _ in range(3))
    table, scales = draws.integers(0, 127, (5, 32)).astype(np.uint8), np.full((5, 1), 121, np.uint8)
    wkv, rows = draws.normal(size=(64, 64)).astype(np.float32) / 8, [4, 0]
    expected = engram.write(streams, rows, table, scales, wkv, q_weight, k_weight, 1e-6)
    values = np.concatenate([engram.quant.unpack_row("mxfp8", bytes(table[r]) + bytes(scales[r]), 32) for r in rows])
    keys, value = np.split(wkv @ values, [48])
    gate = gates(jnp.asarray(streams), jnp.asarray(keys.reshape(3, 16)), q_weight, k_weight, eps=1e-6)
    np.testing.assert_allclose(write_memory(jnp.asarray(streams), gate, value), expected, rtol=0, atol=1e-5)
    assert np.ptp(np.asarray(gate)) > 0.05, "one gate per stream"


def test_a_closed_gate_changes_no_bit():
    streams = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2, 8)), jnp.bfloat16)
    assert np.array_equal(write_memory(streams, jnp.zeros((4, 2)), jnp.ones((4, 8))), streams)


def test_rows_of_zeros_give_a_finite_gate():
    """eps 1e-20, as released: both norms are of zeros."""
    zeros = jnp.zeros((1, 2, 8))
    assert np.allclose(gates(zeros, zeros, jnp.ones((2, 8)), jnp.ones((2, 8)), eps=1e-20), 0.50025, atol=1e-5)
