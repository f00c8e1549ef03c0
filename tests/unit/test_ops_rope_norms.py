"""RoPE tables, rotation and RMS norm against the loop oracles."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.config import RopeScaling
from dsflash_jax.ops.norms import rms_norm
from dsflash_jax.ops.rope import apply_rope, model_tables, rope_tables
from tests.model import running
from tests.oracles import norms as norms_oracle
from tests.oracles import rope as rope_oracle

pytestmark = pytest.mark.smoke
RNG = np.random.default_rng(0)
TABLE_ATOL = 1.2e-7  # one unit in the last place of a cosine near 1


@pytest.mark.parametrize(
    ("width", "length", "theta", "yarn"),
    [
        (64, 300, 1e4, None),
        (64, 300, 1.6e5, (16, 65536, 32, 1)),
        (8, 100, 1.6e5, (4, 16, 32, 1)),
        (2, 33, 1e4, None),
        (6, 40, 500.0, (2.5, 64, 8, 2)),
    ],
)
def test_tables(width, length, theta, yarn):
    ours = rope_tables(width, length, theta, RopeScaling(*yarn) if yarn else None)
    for table, expected in zip(ours, rope_oracle.tables(width, length, theta, yarn), strict=True):
        assert table.shape == (length, width // 2) and table.dtype == np.float32
        np.testing.assert_allclose(table, expected, rtol=0, atol=TABLE_ATOL)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("width", "rotated", "heads"), [(32, 8, 3), (10, 10, 1), (7, 2, 2)])
def test_rotation_turns_the_tail_by_pairs(width, rotated, heads, inverse):
    x = RNG.normal(size=(5, heads, width)).astype(np.float32)
    cos, sin = rope_tables(rotated, 5, 100.0, None)
    ours = np.asarray(apply_rope(jnp.asarray(x), cos[:, None], sin[:, None], inverse=inverse))
    expected = np.stack([rope_oracle.rotate(x[t], cos[t], sin[t], inverse) for t in range(5)])
    np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-7)


def test_pairs_are_adjacent_elements():
    """B26: both pair layouts are shift-invariant, so only element-wise values tell them apart."""
    cos, sin = rope_tables(8, 10, 100.0, None)
    for pair, part in ((0, 0), (2, 1), (3, 0)):
        x = np.zeros(8, np.float32)
        x[2 * pair + part] = 1
        turned = (1j if part else 1) * np.exp(1j * 7 * 100.0 ** (-2 * pair / 8))
        expected = np.zeros(8)
        expected[2 * pair : 2 * pair + 2] = turned.real, turned.imag
        np.testing.assert_allclose(apply_rope(jnp.asarray(x), cos[7], sin[7]), expected, atol=1e-6)


def test_yarn_stays_off_in_window_layers():
    """B20: with theta 1e4 YaRN would move pairs 21..31 only, by up to 2.10 degrees over 127 positions."""
    plain = np.float64(1e4) ** (-np.arange(0, 64, 2) / 64)
    cos, sin = rope_tables(64, 128, 1e4, None)
    angle = np.arange(128)[:, None] * plain
    np.testing.assert_allclose(cos, np.cos(angle), atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angle), atol=2e-5)
    scaled = rope_tables(64, 2, 1e4, RopeScaling(16, 65536, 32, 1))
    moved = np.abs(np.arcsin(scaled[1][1].astype(np.float64)) - np.arcsin(sin[1].astype(np.float64)))
    assert np.flatnonzero(moved > 1e-7 * np.arcsin(sin[1])).tolist() == list(range(21, 32))
    assert np.degrees(127 * moved.max()) == pytest.approx(2.10, abs=0.01)


def test_each_layer_kind_has_its_table():
    """B21, U2: theta 160000 with YaRN for layers with entries, theta 10000 without for the others."""
    cfg = running.tiny()
    tables = model_tables(cfg)
    s = cfg.rope_scaling
    yarn = (s.factor, s.original_max_position_embeddings, s.beta_fast, s.beta_slow)
    for name, theta, scaling in (("swa", 1e4, None), ("compressed", 1.6e5, yarn)):
        cos, sin = rope_oracle.tables(8, cfg.max_position_embeddings, theta, scaling)
        np.testing.assert_allclose(tables[name]["cos"], cos, atol=TABLE_ATOL)
        np.testing.assert_allclose(tables[name]["sin"], sin, atol=TABLE_ATOL)


@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_parameters_hold_the_tables_bit_for_bit(call):
    cfg = running.tiny()
    held = call(lambda: steps.init_params(cfg)["freqs"])()
    for name, table in model_tables(cfg).items():
        for part, values in table.items():
            assert held[name][part].dtype == values.dtype == np.float32
            np.testing.assert_array_equal(np.asarray(held[name][part]).view(np.uint32), values.view(np.uint32))


def test_shapes_of_parameters_allocate_no_table():
    """The four tables of these 2^24 positions would take 1 GiB; tracing the rest of the model takes some megabytes."""
    cfg = running.tiny(max_position_embeddings=2**24)
    tracemalloc.start()
    try:
        table = steps.abstract_params(cfg)["freqs"]["compressed"]["cos"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (table.shape, table.dtype) == ((2**24, cfg.qk_rope_head_dim // 2), jnp.float32)
    assert peak < 2**26


def test_yarn_matters_at_distance_1000():
    """B21: theta 160000 with and without YaRN differ by 0.33 rad at distance 1000."""
    yarn = rope_oracle.frequencies(64, 1.6e5, (16, 65536, 32, 1)).astype(np.float64)
    plain = rope_oracle.frequencies(64, 1.6e5).astype(np.float64)
    assert np.abs(1000 * (yarn - plain)).max() == pytest.approx(0.33, abs=0.01)
    ours = rope_tables(64, 1001, 1.6e5, RopeScaling(16, 65536, 32, 1))
    np.testing.assert_allclose(ours[1][1000], np.sin(1000 * yarn), atol=1e-4)


def test_positions_stay_exact_up_to_the_context_limit():
    """B09: positions are integers; a float32 position is exact up to 2^24, sixteen times the released limit."""
    assert np.float32(2**20 - 1) == 2**20 - 1
    cos, _ = rope_tables(2, 2**20, 1e4, None)
    exact = np.cos(np.arange(2**20 - 50, 2**20, dtype=np.float64))
    np.testing.assert_allclose(cos[-50:, 0], exact, atol=1e-6)


@pytest.mark.parametrize(("shape", "eps"), [((3, 5), 1e-6), ((2, 3, 32), 1e-20), ((1, 1), 1e-20)])
def test_rms_norm(shape, eps):
    x, weight = RNG.normal(size=shape).astype(np.float32), RNG.normal(size=shape[-1]).astype(np.float32)
    np.testing.assert_allclose(rms_norm(x, weight, eps), norms_oracle.rms_norm(x, weight, eps), rtol=1e-6)


def test_rms_norm_with_the_released_eps():
    """B66: zeros stay zeros, tiny rows feel eps 1e-20, overflowing squares do not silently become zeros."""
    ones = np.ones(4, np.float32)
    row = lambda value: np.asarray(rms_norm(jnp.full((1, 4), value, jnp.float32), ones, 1e-20))[0]  # noqa: E731
    assert (row(0.0) == 0).all()
    np.testing.assert_allclose(row(1e-11), 0.0995, rtol=1e-3)
    np.testing.assert_allclose(row(1e-8), 1.0, rtol=1e-4)
    assert np.isnan(row(1e20)).all()
    assert (np.asarray(rms_norm(jnp.zeros((1, 4), jnp.bfloat16), ones, 1e-20)) == 0).all()


def test_rms_norm_rounds_once_to_bfloat16():
    x = jnp.asarray(RNG.normal(size=(4, 64)), jnp.bfloat16)
    weight = RNG.normal(size=64).astype(np.float32)
    ours = rms_norm(x, weight, 1e-20)
    expected = norms_oracle.rms_norm(np.asarray(x, np.float32), weight, 1e-20)
    assert ours.dtype == jnp.bfloat16
    assert (np.asarray(ours, np.float32) == np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float32)).mean() > 0.99
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=2**-8)
