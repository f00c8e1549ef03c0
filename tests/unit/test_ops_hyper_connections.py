"""Hyper-connections: coefficients, Sinkhorn, collapse and expansion against the loop oracles."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.ops.hyper_connections import Mix, coefficients, collapse, expand, sinkhorn, split_mixes
from tests.oracles import hyper_connections as oracle

pytestmark = pytest.mark.smoke
RNG = np.random.default_rng(3)
ATOL = 3e-6


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("tokens", "streams", "width", "iters"), [(5, 4, 6, 20), (1, 2, 7, 1), (3, 3, 1, 4)])
def test_coefficients(tokens, streams, width, iters):
    x, size = normal(tokens, streams, width), (2 + streams) * streams
    fn, base, scale = normal(size, streams * width), normal(size), normal(3)
    ours = coefficients(x, fn, base, scale, norm_eps=1e-6, hc_eps=1e-6, iters=iters)
    for t in range(tokens):
        raw = oracle.mixes(x[t], fn, 1e-6)
        for mine, expected in zip(ours, oracle.coefficients(raw, scale, base, streams, iters, 1e-6), strict=True):
            np.testing.assert_allclose(mine[t], expected, rtol=0, atol=ATOL)


def test_parts_come_as_pre_post_comb():
    """B63: the vector is [pre | post | comb]; pre carries eps, post does not; equal logits give a uniform comb."""
    base = jnp.array([9.0, -99.0, 9.0, -99.0, 0, 0, 0, 0])
    mix = split_mixes(jnp.zeros(8), base, jnp.ones(3), hc=2, eps=1e-3, iters=3)
    np.testing.assert_allclose(mix.pre, [1 + 1e-3, 1e-3], atol=2e-4)
    np.testing.assert_allclose(mix.post, [2, 0], atol=3e-4)
    np.testing.assert_allclose(mix.comb, 0.5, atol=2e-3)


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn_against_float64(iters):
    """B63: softmax plus eps, columns, then rows and columns; a logit of 50 stays finite; sums within 1e-4 at 20."""
    logits = normal(4, 4)
    logits[1, 2] = 50
    m = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    m = m / m.sum(axis=1, keepdims=True) + 1e-6
    m /= m.sum(axis=0, keepdims=True) + 1e-6
    for _ in range(iters - 1):
        m /= m.sum(axis=1, keepdims=True) + 1e-6
        m /= m.sum(axis=0, keepdims=True) + 1e-6
    ours = np.asarray(sinkhorn(jnp.asarray(logits), eps=1e-6, iters=iters))
    np.testing.assert_allclose(ours, m, rtol=0, atol=ATOL)
    np.testing.assert_allclose(ours, oracle.sinkhorn(logits, iters, 1e-6), rtol=0, atol=ATOL)
    np.testing.assert_allclose(ours.sum(axis=0), 1, atol=1e-4)


def test_twenty_rounds_balance_rows_too():
    ours = np.asarray(sinkhorn(jnp.asarray(normal(6, 4, 4)), eps=1e-6, iters=20))
    np.testing.assert_allclose(ours.sum(axis=-1), 1, atol=1e-4)


def test_comb_is_read_from_source_to_destination():
    """B62: with this matrix the untransposed product would give [0.3, 1.4, 2.5, 1.8]; both have the same sums."""
    comb = jnp.array([[0.7, 0.3, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.5, 0.5], [0.3, 0.1, 0.1, 0.5]])
    streams = jnp.arange(4.0)[:, None]
    mix = Mix(jnp.zeros(4), jnp.zeros(4), comb)
    np.testing.assert_allclose(expand(streams, jnp.zeros(1), mix)[:, 0], [0.9, 0.9, 1.7, 2.5], atol=1e-6)
    one_hot = jnp.zeros((4, 1)).at[0].set(1.0)
    np.testing.assert_allclose(expand(one_hot, jnp.zeros(1), mix)[:, 0], comb[0], atol=1e-7)


@pytest.mark.parametrize(("tokens", "streams", "width"), [(5, 4, 6), (1, 2, 3)])
def test_collapse_and_expand(tokens, streams, width):
    x, sub = normal(tokens, streams, width), normal(tokens, width)
    pre, post, comb = normal(tokens, streams), normal(tokens, streams), normal(tokens, streams, streams)
    collapsed, expanded = collapse(jnp.asarray(x), pre), expand(jnp.asarray(x), jnp.asarray(sub), Mix(pre, post, comb))
    for t in range(tokens):
        np.testing.assert_allclose(collapsed[t], oracle.collapse(x[t], pre[t]), rtol=0, atol=ATOL)
        np.testing.assert_allclose(expanded[t], oracle.expand(x[t], sub[t], post[t], comb[t]), rtol=0, atol=ATOL)


def test_coefficients_stay_float32_beside_bfloat16_streams():
    """B64: 40 layers of near-identity mixing keep every stream's mass within 1e-3; rounded coefficients would not."""
    logits = 6.0 * np.eye(4, dtype=np.float32) + 0.3 * normal(40, 4, 4)
    combs = np.asarray(sinkhorn(jnp.asarray(logits), eps=1e-6, iters=20))
    assert combs.dtype == np.float32
    mass = rounded = np.ones(4)
    for comb in combs:
        mass = comb.T @ mass
        rounded = np.asarray(jnp.asarray(comb, jnp.bfloat16), np.float64).T @ rounded
    assert np.abs(mass - 1).max() < 1e-3 < np.abs(rounded - 1).max()
    streams = jnp.asarray(normal(2, 4, 8), jnp.bfloat16)
    size = 24
    mix = coefficients(streams, normal(size, 32), normal(size), normal(3), norm_eps=1e-20, hc_eps=1e-6, iters=20)
    assert {part.dtype for part in mix} == {jnp.dtype("float32")}
    assert expand(streams, streams[:, 0], mix).dtype == collapse(streams, mix.pre).dtype == jnp.bfloat16
