"""KV formats: bit equality with the released reference, the loop oracle and themselves, eagerly and jitted."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsflash_jax.numerics import minifloat
from dsflash_jax.numerics.format_table import CODE_BITS, FORMAT_NAMES, format_facts
from dsflash_jax.numerics.formats import get_format, straight_through
from dsflash_jax.numerics.minifloat import E2M1, E4M3
from tests.oracles import quant

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "units_quant.npz"
GOLDEN_NAMES = {"act_quant_b32_ue8m0": "mxfp8", "fp4_b16_e4m3": "fp4_e4m3", "fp4_b32_e8m0": "mxfp4"}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
CALLS = {"eager": lambda f: f, "jit": jax.jit}

every_format = pytest.mark.parametrize("name", FORMAT_NAMES)
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
# Jitted except where a test says otherwise: eager calls compile every operation for every shape.
PACK = {name: jax.jit(get_format(name).pack) for name in FORMAT_NAMES}
UNPACK = {name: jax.jit(get_format(name).unpack, static_argnums=1) for name in FORMAT_NAMES}
FAKE_QUANT = {name: jax.jit(get_format(name).fake_quant) for name in FORMAT_NAMES}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as archive:
        return {name: archive[name] for name in archive.files}


def same_bits(actual, expected):
    """Equal dtype, shape and bit patterns: -0 differs from 0, and NaN equals itself."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    as_integer = {1: np.uint8, 2: np.uint16, 4: np.uint32}[actual.dtype.itemsize]
    np.testing.assert_array_equal(actual.view(as_integer), expected.view(as_integer))


def row(*values, width=32):
    """float32 [width]: the values, then zeros."""
    return jnp.zeros(width, jnp.float32).at[: len(values)].set(jnp.array(values, jnp.float32))


# --- against the released reference -----------------------------------------------------------------------------


@pytest.mark.smoke
@every_call
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", GOLDEN_NAMES)
def test_codes_scales_and_values_equal_the_reference(golden, key, dtype, call):
    fmt = get_format(GOLDEN_NAMES[key])
    x = jnp.asarray(golden[f"{key}/{dtype}/x"]).astype(DTYPES[dtype])
    width = x.shape[-1]
    rows = np.concatenate([golden[f"{key}/{dtype}/codes_u8"], golden[f"{key}/{dtype}/scale_u8"]], axis=-1)
    values = golden[f"{key}/{dtype}/dequant"]
    same_bits(call(fmt.pack)(x), rows)
    same_bits(call(lambda r: fmt.unpack(r, width))(jnp.asarray(rows)), values)
    same_bits(call(fmt.fake_quant)(x), jnp.asarray(values).astype(DTYPES[dtype]))


@pytest.mark.smoke
@every_call
@pytest.mark.parametrize("codec, key", [(E4M3, "e4m3_of_clamped"), (E2M1, "e2m1_codes_of_clamped")])
def test_every_bfloat16_value_gets_the_reference_code(golden, codec, key, call):
    codes = call(codec.encode)(jnp.asarray(golden["cast/bf16_all_x"]))
    same_bits(codes.astype(jnp.uint8), golden[f"cast/{key}"])


@every_call
@pytest.mark.parametrize(
    "decode, key",
    [
        (E2M1.decode, "e2m1_table"),
        (E4M3.decode, "e4m3_table_u8_to_f32"),
        (minifloat.ue8m0_decode, "e8m0_table_u8_to_f32"),
    ],
)
def test_every_code_decodes_to_the_reference_table(golden, decode, key, call):
    table = golden[key]
    actual = np.asarray(call(decode)(jnp.arange(len(table), dtype=jnp.uint32)))
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(table))
    same_bits(actual[~np.isnan(table)], table[~np.isnan(table)])


# --- against the loop oracle ------------------------------------------------------------------------------------

WIDTH = 64
# Midpoints between codes: where a lost bit of the quotient shows. The group's largest value is 6 or 448 times a scale.
E2M1_MIDDLES = [(a + b) / 2 for a, b in zip(quant.E2M1, quant.E2M1[1:], strict=False)]
E4M3_MIDDLES = [(a + b) / 2 for a, b in zip(quant.E4M3, quant.E4M3[1:], strict=False)]


def any_float32():
    return st.floats(width=32, allow_nan=False, allow_infinity=False)


def near_boundary():
    """A rounding boundary of either element code times a short scale, or a float32 neighbour of it."""

    def build(middle, exponent, mantissa, step, sign):
        value = np.float32(middle * mantissa / 8 * 2.0**exponent)
        bits = int(value.view(np.uint32)) + step
        return sign * float(np.uint32(max(bits, 0)).view(np.float32))

    return st.builds(
        build,
        st.sampled_from(E2M1_MIDDLES + E4M3_MIDDLES + [6.0, 448.0]),
        st.integers(-30, 20),
        st.integers(8, 15),
        st.integers(-1, 1),
        st.sampled_from([-1.0, 1.0]),
    )


@st.composite
def any_row(draw):
    """One row: arbitrary bit patterns, rounding boundaries, or a Gaussian of any magnitude with holes."""
    kind = draw(st.sampled_from(["floats", "boundaries", "gaussian"]))
    if kind != "gaussian":
        element = any_float32() if kind == "floats" else near_boundary()
        return np.array(draw(st.lists(element, min_size=WIDTH, max_size=WIDTH)), np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.standard_normal(WIDTH) * 2.0 ** rng.integers(-40, 40, WIDTH // 16).repeat(16)
    return (values * (rng.random(WIDTH) < 0.9)).astype(np.float32)


@every_format
@settings(max_examples=60, deadline=None)
@given(x=any_row(), rounded=st.booleans())
def test_rows_equal_the_loop_oracle(name, x, rounded):
    """Bytes and values, for float32 and for bfloat16 inputs (`rounded`), whatever the row holds."""
    if rounded:
        x = np.array([quant.bfloat16_bits(v) << 16 for v in x], np.uint32).view(np.float32)
        if not np.isfinite(x).all():
            return
    packed = PACK[name](jnp.asarray(x, jnp.bfloat16 if rounded else jnp.float32))
    assert bytes(np.asarray(packed)) == quant.pack_row(name, x)
    same_bits(UNPACK[name](packed, WIDTH), quant.fake_quant(name, x))


# --- with themselves --------------------------------------------------------------------------------------------


def assorted_rows(shape):
    """Finite rows of many magnitudes with zeros, negative zeros and denormals."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    x = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0, 1e-40, -3e-39], shape), x)
    return jnp.asarray(x, jnp.float32)


def assert_fake_quant_is_pack_then_unpack(name, x, call):
    fmt, width = get_format(name), x.shape[-1]

    def both_ways(x):
        return fmt.pack(x), fmt.fake_quant(x), fmt.unpack(fmt.pack(x), width)

    rows, quantised, in_one_go = call(both_ways)(x)
    values = call(lambda r: fmt.unpack(r, width))(rows)
    assert rows.shape == (*x.shape[:-1], fmt.row_bytes(width)) and rows.dtype == jnp.uint8
    assert values.shape == x.shape and values.dtype == jnp.float32
    same_bits(in_one_go, values)
    same_bits(quantised, values.astype(x.dtype))


@every_format
@pytest.mark.parametrize("leading", [(), (2, 1, 3), (0,)], ids=str)
def test_fake_quant_is_pack_then_unpack(name, leading):
    assert_fake_quant_is_pack_then_unpack(name, assorted_rows((*leading, 96)), jax.jit)


@every_format
def test_fake_quant_is_pack_then_unpack_in_bfloat16(name):
    assert_fake_quant_is_pack_then_unpack(name, assorted_rows((5, 96)).astype(jnp.bfloat16), jax.jit)


@every_format
def test_fake_quant_is_pack_then_unpack_eagerly(name):
    assert_fake_quant_is_pack_then_unpack(name, assorted_rows((125, 64)), lambda f: f)


@every_format
def test_fusing_into_a_larger_computation_does_not_change_a_bit(name):
    """XLA drops precision round trips and rewrites divisions across operations; one operation alone shows neither."""
    fmt = get_format(name)
    x = assorted_rows((16, 64))

    def inside(x):
        x = jnp.flip(x, 0)
        return fmt.fake_quant(x), jax.vmap(fmt.pack)(x)

    flipped = jnp.asarray(np.asarray(x)[::-1])
    values, rows = jax.jit(inside)(x)
    folded = jax.jit(lambda: fmt.pack(flipped))()
    expected = np.array([list(quant.pack_row(name, r)) for r in np.asarray(flipped)], np.uint8)
    same_bits(rows, expected)
    same_bits(folded, expected)
    same_bits(values, UNPACK[name](expected, 64))


def rows_of_every_code(name):
    """Packed rows that together hold every code under every scale, each group with its largest code present."""
    if name in ("bf16", "fp32"):
        bits = np.arange(0, 0x10000, dtype=np.uint32) << 16
        finite = bits[(bits & 0x7F800000) != 0x7F800000].reshape(-1, 64)
        return finite.view(np.uint8) if name == "fp32" else (finite >> 16).astype(np.uint16).view(np.uint8)
    if name in ("fp4_e4m3", "mxfp4"):
        pairs = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4, np.uint8)
        scales = np.arange(1, 127 if name == "fp4_e4m3" else 253, dtype=np.uint8)[:, None]
        return np.concatenate([np.tile(pairs, (len(scales), 1)), scales.repeat(4 if name == "fp4_e4m3" else 2, 1)], 1)
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    groups = np.full((12, 32), 0x7E, np.uint8)
    groups[:, :22] = np.resize(codes, (12, 22))
    rows = groups.reshape(6, 64)
    exponents = np.arange(105, 247, dtype=np.uint8)
    rows = np.tile(rows, (len(exponents), 1))
    exponents = exponents.repeat(6)[:, None]
    if name == "mxfp8":
        return np.concatenate([rows, exponents, exponents], 1)
    scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    return np.concatenate([rows, scales.view(np.uint8).reshape(-1, 4)], 1)


@every_format
def test_every_code_and_scale_survives_unpack_then_pack(name):
    rows = rows_of_every_code(name)
    values = UNPACK[name](rows, 64)
    assert np.isfinite(values).all()
    same_bits(PACK[name](values), rows)


# --- traps met by other implementations, by number in the project's list -----------------------------------------


def test_power_of_two_scale_rounds_up_and_values_are_divided_by_the_rounded_scale():
    """B54: amax 7 takes scale 2, so 7 becomes 8 (a floored scale would saturate at 6)."""
    x = row(7.0, 6.0, 2.0, -1.0)
    assert PACK["mxfp4"](x)[-1] == 128
    assert FAKE_QUANT["mxfp4"](x)[:4].tolist() == [8.0, 6.0, 2.0, -1.0]
    assert FAKE_QUANT["mxfp8"](row(449.0, 448.0))[:2].tolist() == [448.0, 448.0]
    assert PACK["mxfp8"](row(449.0))[-1] == 128
    assert PACK["mxfp8"](row(448.0))[-1] == 127


def test_a_scale_past_448_saturates_instead_of_becoming_nan():
    """B55: JAX's own cast turns 465 into NaN and with it the whole group."""
    x = row(2790.0, -2790.0, 400.0, 448.0, width=16)
    assert np.isnan(jnp.float32(465).astype(jnp.float8_e4m3fn))
    assert PACK["fp4_e4m3"](x)[-1] == 0x7E
    assert FAKE_QUANT["fp4_e4m3"](x)[:4].tolist() == [2688.0, -2688.0, 448.0, 448.0]
    codes = jax.jit(E4M3.encode)(jnp.array([448.0, 464.0, 465.0, -1e30], jnp.float32))
    assert codes.tolist() == [0x7E, 0x7E, 0x7E, 0xFE]


def test_zero_and_tiny_groups_keep_a_finite_scale():
    """B56: amax is floored, so no scale is zero and no zero group turns into NaN."""
    zero_scale = {
        "fp4_e4m3": b"\x01\x01",
        "mxfp4": b"\x01",
        "mxfp8": bytes([127 - 22]),
        "fp8_fp32": (np.float32(1e-4) / np.float32(448)).tobytes(),
    }
    for name, scale in zero_scale.items():
        packed = np.asarray(PACK[name](row()))
        assert bytes(packed[-len(scale) :]) == scale
        assert not packed[: -len(scale)].any()
        same_bits(FAKE_QUANT[name](row()), np.zeros(32, np.float32))
        same_bits(FAKE_QUANT[name](-row()), -np.zeros(32, np.float32))
    tiny = row(0.005, width=16)
    packed = PACK["fp4_e4m3"](tiny)
    assert (packed[0], packed[-1]) == (5, 1)
    assert FAKE_QUANT["fp4_e4m3"](tiny)[0] == 3 * 2.0**-9


@pytest.mark.parametrize(
    "name, width, expected",
    [("fp4_e4m3", 512, 288), ("mxfp4", 128, 68), ("mxfp8", 512, 528), ("fp8_fp32", 128, 132)]
    + [("bf16", 512, 1024), ("fp32", 128, 512)],
)
def test_the_recipes_are_not_mixed_row_bytes(name, width, expected):
    """B60: main rows take one E4M3 scale per 16, index keys one UE8M0 per 32, the window FP8 with one UE8M0 per 32."""
    assert get_format(name).row_bytes(width) == expected
    assert PACK[name](jnp.ones(width)).shape == (expected,)


def test_main_and_index_recipes_scale_differently():
    """B60: a large and a small half tell 16 per scale from 32, and 1.125 an E4M3 scale from a power of two."""
    x = jnp.zeros(32).at[0].set(6 * 1.125).at[16].set(1.125)
    assert FAKE_QUANT["fp4_e4m3"](x)[::16].tolist() == [6.75, 1.125]
    assert FAKE_QUANT["mxfp4"](x)[::16].tolist() == [6.0, 1.0]


def test_low_nibble_holds_the_even_index_and_negative_zero_survives():
    """B61: the sixteen codes in order."""
    values = jnp.asarray(quant.E2M1 + [-v for v in quant.E2M1], jnp.float32)
    packed = PACK["mxfp4"](jnp.tile(values, 2))
    assert bytes(np.asarray(packed)) == bytes([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2 + [127])
    same_bits(UNPACK["mxfp4"](packed, 32), jnp.tile(values, 2))


@every_format
def test_rows_of_another_width_or_dtype_are_refused(name):
    """B61: a wrong shape must not be read as something else."""
    fmt = get_format(name)
    rows = jnp.zeros((3, fmt.row_bytes(64)), jnp.uint8)
    with pytest.raises(ValueError, match=rf"{name} rows of width 32 are uint8 \[\.\.\., {fmt.row_bytes(32)}\], got"):
        fmt.unpack(rows, 32)
    with pytest.raises(ValueError, match="got int8"):
        fmt.unpack(rows.astype(jnp.int8), 64)
    with pytest.raises(ValueError, match="packs float32 or bfloat16 rows, got float16"):
        fmt.pack(jnp.ones((3, 64), jnp.float16))


# --- registry, gradients ----------------------------------------------------------------------------------------


def test_widths_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(ValueError, match="width 40 is not a multiple of the mxfp4 group of 32"):
        get_format("mxfp4").check_width(40)
    with pytest.raises(ValueError, match="width 24 is not a multiple of the fp4_e4m3 group of 16"):
        get_format("fp4_e4m3").pack(jnp.ones(24))
    with pytest.raises(ValueError, match="width 0 of a fp32 row is not positive"):
        get_format("fp32").row_bytes(0)
    get_format("fp8_fp32").check_width(7)


def test_odd_widths_of_ungrouped_formats_pack():
    for name in ("fp8_fp32", "bf16", "fp32"):
        x = assorted_rows((4, 7))
        rows = PACK[name](x)
        assert [bytes(r) for r in np.asarray(rows)] == [quant.pack_row(name, r) for r in np.asarray(x)]
        same_bits(UNPACK[name](rows, 7), quant.fake_quant(name, x))


@every_format
def test_codes_have_the_widths_that_sizes_count_with(name):
    fmt = get_format(name)
    facts = format_facts(name)
    assert CODE_BITS[facts.element_code] == fmt.element.bits
    assert (facts.scale_code is None) == (fmt.scale is None)
    if fmt.scale is not None:
        assert (CODE_BITS[facts.scale_code], facts.amax_floor) == (fmt.scale.bits, fmt.scale.floor)
    assert fmt.row_bytes(64) == facts.row_bytes(64) == PACK[name](jnp.ones(64)).size


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown KV format 'fp6'; known formats: fp4_e4m3, mxfp4, mxfp8, "):
        get_format("fp6")


def test_a_format_is_a_static_argument():
    traces = []

    def f(x, fmt):
        traces.append(fmt.name)
        return fmt.fake_quant(x)

    jitted = jax.jit(f, static_argnames="fmt")
    for name in (*FORMAT_NAMES, *FORMAT_NAMES):
        jitted(jnp.ones(32), fmt=get_format(name))
    assert traces == list(FORMAT_NAMES)
    assert len({get_format(name) for name in FORMAT_NAMES}) == len(FORMAT_NAMES)


@pytest.mark.parametrize("name, dtype", [(n, jnp.float32) for n in FORMAT_NAMES] + [("fp8_fp32", jnp.bfloat16)])
def test_straight_through_rounds_forward_and_is_the_identity_backward(name, dtype):
    fmt = get_format(name)
    x = assorted_rows((4, 32)).astype(dtype)
    cotangent = jnp.linspace(-3, 5, x.size, dtype=dtype).reshape(x.shape)

    @jax.jit
    def forward_and_back(x):
        value, pull = jax.vjp(jax.checkpoint(lambda x: straight_through(fmt, x)), x)
        return value, pull(cotangent)[0]

    value, gradient = forward_and_back(x)
    same_bits(value, FAKE_QUANT[name](x))
    same_bits(gradient, cotangent)
