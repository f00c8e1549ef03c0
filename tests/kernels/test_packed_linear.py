"""`packed_linear`: products with packed weights against float64, within what rounding the sums can do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.ops import packed as model
from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.packed_linear import reference
from pallas_kernels.packed_linear.api import packed_linear
from pallas_kernels.packed_linear.config import LinearConfig
from pallas_kernels.packed_linear.weights import KINDS, scale_shape
from tests.oracles import kernels_packed_linear as oracle

# rows, in, out: most leave partial tiles on every side
SHAPES = [(5, 160, 70), (1, 32, 33), (17, 96, 16)]
SMALL = LinearConfig(rows=16, outputs=32, inputs=64, splits=2)


def _xla(*args, kind):
    return jax.jit(lambda *a: packed_linear(*a, kind=kind, implementation="xla"))(*args)


def _kernel(*args, kind, config=SMALL):
    return packed_linear(*args, kind=kind, implementation="pallas_triton", interpret=True, config=config)


def _reference(*args, kind):
    return jax.jit(lambda *a: reference.packed_linear(*a, kind=kind))(*args)


WAYS = {"xla": _xla, "kernel": _kernel, "reference": _reference}


def draw(kind, rows, inputs, out, seed=0):
    """Inputs over 12 binades, with zeros of both signs and a row of zeros; every code but NaN, scales far apart."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, inputs)) * 2.0 ** rng.integers(-6, 6, (rows, inputs))).astype(np.float32)
    x[:, 3], x[:, 4] = 0.0, -0.0
    if rows > 2:
        x[1] = 0
        x[2] *= 1e-6  # below the smallest amax that a scale is made for
    codes = rng.integers(0, 256, (out, inputs if kind == "fp8" else inputs // 2), dtype=np.uint8)
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] ^= 1
    scale = rng.integers(110, 140, scale_shape(out, inputs, kind), dtype=np.uint8)
    return x, codes, scale


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(kind, shape, marks=() if (kind, shape) == ("fp8", SHAPES[0]) else pytest.mark.slow)
        for kind in KINDS
        for shape in SHAPES
    ],
)
def test_products_are_the_exact_ones_up_to_the_rounding_of_sums(kind, shape):
    x, codes, scale = draw(kind, *shape)
    wanted, size = oracle.product(kind, x, codes, scale)
    for way, run in WAYS.items():
        error = np.abs(np.asarray(run(x, codes, scale, kind=kind)) - wanted)
        assert np.all(error <= oracle.bound(size, shape[1])), way


@pytest.mark.parametrize("kind", ["fp4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_every_group_of_rows_takes_the_weight_of_its_expert_and_reads_no_other(kind):
    """An expert twice, one that nobody chose and holds NaN, and a group without an expert, whose rows are NaN."""
    rows, inputs, out, expert = 17, 64, 18, np.array([2, 0, -1, 2], np.int32)
    drawn = [draw(kind, rows, inputs, out, seed) for seed in range(4)]
    x = np.stack([x for x, *_ in drawn])
    x[expert < 0] = np.nan
    codes, scale = (np.stack([d[part] for d in drawn[:3]]) for part in (1, 2))
    scale[1] = 255
    for way, run in WAYS.items():
        got = np.asarray(run(x, codes, scale, expert, kind=kind))
        assert got.shape == (4, rows, out)
        for g, e in enumerate(expert):
            wanted, size = oracle.product(kind, x[g], codes[e], scale[e]) if e >= 0 else (0, 0)
            assert np.all(np.abs(got[g] - wanted) <= oracle.bound(size, inputs)), (way, g)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("fp8", jnp.float32),
        *(
            pytest.param(*p, marks=pytest.mark.slow)
            for p in (("fp8", jnp.bfloat16), ("fp4", jnp.float32), ("fp4", jnp.bfloat16))
        ),
    ],
)
def test_the_xla_path_is_the_product_of_the_model_bit_for_bit(kind, dtype):
    x, codes, scale = draw(kind, 5, 160, 70)
    weight = model.PackedWeight(jnp.asarray(codes), jnp.asarray(scale), kind)
    x = jnp.asarray(x).astype(dtype)
    assert np.array_equal(_xla(x, codes, scale, kind=kind), jax.jit(model.packed_linear)(x, weight))


def check_integers(kind, configs):
    """Sums that float32 holds exactly leave no room for an error, so every tile and split gives the same bits."""
    rng = np.random.default_rng(0)
    rows, inputs, out = 3, 192, 40
    x = rng.integers(-8, 9, (rows, inputs)).astype(np.float32)
    codes = rng.integers(0, 256, (out, inputs // (1 if kind == "fp8" else 2)), dtype=np.uint8)
    if kind == "fp8":
        codes = np.where(codes & 1, 0x38, 0xC0).astype(np.uint8)  # 1 and -2
    scale = rng.integers(126, 129, scale_shape(out, inputs, kind), dtype=np.uint8)
    wanted, _ = oracle.product(kind, x, codes, scale)
    for config in configs:
        assert np.array_equal(_kernel(x, codes, scale, kind=kind, config=config), wanted), config
    assert np.array_equal(_xla(x, codes, scale, kind=kind), wanted)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_small_integers_are_exact(kind):
    check_integers(kind, [LinearConfig(outputs=16, inputs=32, splits=4)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_small_integers_are_exact_whatever_the_tiles(kind):
    check_integers(kind, [SMALL, LinearConfig(), LinearConfig(inputs=256)])


@pytest.mark.parametrize("kind", ["fp8", pytest.param("fp4", marks=pytest.mark.slow)])
def test_a_row_of_nan_stays_in_its_row(kind):
    x, codes, scale = draw(kind, 5, 160, 70)
    wanted = np.asarray(_kernel(x, codes, scale, kind=kind))
    x[3] = np.nan
    got = np.asarray(_kernel(x, codes, scale, kind=kind))
    others = [0, 1, 2, 4]
    assert np.array_equal(got[others], wanted[others])


def test_bad_input_is_refused_with_its_reason():
    x, codes, scale = (jnp.asarray(a) for a in draw("fp4", 4, 64, 40))
    wrong = {
        "kind='int4' is unknown; known: fp8, fp4": (x, codes, scale, "int4"),
        "x must be float32 or bfloat16 [T, in], not empty, got float32[4]": (x[:, 0], codes, scale, "fp4"),
        "in=48 must be a multiple of 32": (x[:, :48], codes, scale, "fp4"),
        "codes must be uint8[out, 64], got uint8[40, 32]": (x, codes, scale, "fp8"),
        "codes must be uint8[out, 32], got int32[40, 32]": (x, codes.astype(jnp.int32), scale, "fp4"),
        "scale must be uint8[40, 2], got uint8[39, 2]": (x, codes, scale[:39], "fp4"),
    }
    x3, codes2, scale2, expert = *(jnp.stack([a] * n) for a, n in ((x, 3), (codes, 2), (scale, 2))), jnp.zeros(3, int)
    wrong |= {
        "expert must be int32[G], not empty, got float32[3]": (x3, codes2, scale2, expert.astype(float), "fp4"),
        "x must be float32 or bfloat16 [3, T, in], not empty, got float32[4, 64]": (x, codes2, scale2, expert, "fp4"),
        "x has 3 groups of rows for 2 entries of expert": (x3, codes2, scale2, expert[:2], "fp4"),
        "codes must be uint8[E, out, 32], got uint8[40, 32]": (x3, codes, scale, expert, "fp4"),
        "scale must be uint8[2, 40, 2], got uint8[1, 40, 2]": (x3, codes2, scale2[:1], expert, "fp4"),
    }
    for sentence, (*args, kind) in wrong.items():
        with pytest.raises(ValueError) as error:
            packed_linear(*args, kind=kind)
        assert sentence in str(error.value) and str(error.value).endswith(".")
    big = jax.ShapeDtypeStruct((2**17, 128, 256), jnp.uint8), jax.ShapeDtypeStruct((2**17, 4, 8), jnp.uint8)
    with pytest.raises(UnsupportedError, match="codes has 4,294,967,296 elements in 4,294,967,296 B; 32-bit offsets"):
        jax.eval_shape(
            lambda *a: packed_linear(*a, implementation="pallas_triton", interpret=True),
            jax.ShapeDtypeStruct((3, 1, 256), jnp.float32), *big, expert,
        )  # fmt: skip
    with pytest.raises(UnsupportedError, match="outputs=8 is less than 16"):
        packed_linear(x, codes, scale, kind="fp4", implementation="pallas_triton", config=LinearConfig(outputs=8))
    with pytest.raises(ValueError, match="inputs=16 must be at least the 32 of one scale"):
        LinearConfig(inputs=16)
