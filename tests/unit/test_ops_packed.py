"""Packed weights: codes, scales and products equal loop-level NumPy, also where the shape leaves a partial tile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.config import Kernels
from dsflash_jax.modules.linear import Linear
from dsflash_jax.ops.linear import linear, linear_f32
from dsflash_jax.ops.moe import expert, routed_experts
from dsflash_jax.ops.packed import KINDS, PackedWeight, pack_weight, packed_shapes, unpack_weight
from tests.model import running
from tests.oracles import packed as oracle

SHAPES = [(48, 64), (32, 96), (1, 32), (33, 32)]  # out, in: the first and the last two leave a partial tile of rows


def draw(*shape, seed=0, spread=6):
    """Values over `spread` binades, so that tiles have different scales and codes reach subnormals."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-spread, spread, shape)).astype(np.float32)


def packed(kind, out_width, in_width, seed=0):
    return pack_weight(jnp.asarray(draw(out_width, in_width, seed=seed)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_loops(kind, shape):
    weight, x = packed(kind, *shape), draw(3, shape[1], seed=1)
    wanted = oracle.linear(kind, x, np.asarray(weight.codes), np.asarray(weight.scale))
    got = np.asarray(jax.jit(linear_f32)(x, weight))
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_times_scales_equal_the_loops_bit_for_bit(kind, shape):
    weight = packed(kind, *shape)
    assert (weight.codes.shape, weight.scale.shape) == packed_shapes(kind, *shape) and weight.shape == shape
    wanted = oracle.unpack(kind, np.asarray(weight.codes), np.asarray(weight.scale))
    assert np.array_equal(np.asarray(jax.jit(unpack_weight)(weight)), wanted)


def test_the_even_input_is_the_low_nibble():
    """B61: all 16 codes, -0 among them, come back in order; swapped nibbles would exchange neighbours."""
    codes = np.arange(16, dtype=np.uint8)
    row = np.concatenate([codes, codes])
    weight = PackedWeight(jnp.asarray(row[None, 0::2] | row[None, 1::2] << 4), jnp.full((1, 1), 128, jnp.uint8), "fp4")
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    wanted = 2 * np.concatenate([grid, -grid, grid, -grid])
    got = np.asarray(unpack_weight(weight))[0]
    assert np.array_equal(got, wanted) and np.signbit(got[8])


def test_a_tile_is_32_rows_by_32_inputs_and_a_group_one_row_by_32_inputs():
    """A scale that is moved by one code doubles exactly the outputs and inputs that it belongs to."""
    for kind, at, rows, inputs in (("fp8", (1, 0), slice(32, 64), slice(0, 32)),
                                   ("fp4", (5, 1), slice(5, 6), slice(32, 64))):  # fmt: skip
        weight = packed(kind, 64, 64)
        moved = dataclasses.replace(weight, scale=weight.scale.at[at].add(1))
        factor = np.ones((64, 64), np.float32)
        factor[rows, inputs] = 2
        assert np.array_equal(unpack_weight(moved), unpack_weight(weight) * factor), kind


def test_packing_clips_nothing_and_is_within_half_a_step():
    for kind, relative, smallest in (("fp8", 2.0**-4, 2.0**-9), ("fp4", 2.0**-2, 0.5)):
        weight = draw(64, 96)
        codes = pack_weight(jnp.asarray(weight), kind)
        back = np.asarray(unpack_weight(codes))
        again = np.asarray(unpack_weight(pack_weight(jnp.asarray(back), kind)))
        assert np.array_equal(again, back), "packing what was packed changes nothing"
        scale = 2.0 ** (np.asarray(codes.scale).repeat(32, 1).repeat(64 // len(codes.scale), 0).astype(int) - 127)
        assert np.all(np.abs(back - weight) <= np.maximum(relative * np.abs(weight), smallest / 2 * scale))
    assert not np.asarray(unpack_weight(pack_weight(jnp.zeros((32, 32)), "fp8"))).any()


def test_inputs_are_rounded_so_dequantised_weights_give_other_results():
    weight, x = packed("fp8", 32, 64), draw(4, 64, seed=2)
    exact = np.asarray(linear_f32(x, unpack_weight(weight)))
    assert np.abs(np.asarray(linear_f32(x, weight)) - exact).max() > 1e-3 * np.abs(exact).max()


def test_bfloat16_results_are_rounded_once():
    weight, x = packed("fp4", 32, 64), jnp.asarray(draw(4, 64, seed=2), jnp.bfloat16)
    assert linear(x, weight).dtype == jnp.bfloat16
    assert np.array_equal(linear(x, weight), linear_f32(x.astype(jnp.float32), weight).astype(jnp.bfloat16))


# Pairs one by one, and expert by expert.
@pytest.mark.parametrize("rows", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_routed_experts_run_from_stacked_codes(kind, rows):
    count, d, f, k = 4, 64, 32, 2
    matrices = [pack_weight(jnp.asarray(draw(count, *shape, spread=1)), kind) for shape in ((f, d), (d, f), (f, d))]
    rng = np.random.default_rng(3)
    x = draw(rows, d, seed=4, spread=1)
    chosen = np.argsort(rng.random((rows, count)))[:, :k].astype(np.int32)
    gains = rng.random((rows, k)).astype(np.float32)
    run = jax.jit(routed_experts, static_argnames="limit")
    got = np.asarray(run(x, gains, chosen, *matrices, limit=4.0))
    alone = jax.jit(lambda gain, *own: expert(x, *own, 4.0, gain))
    wanted = np.zeros((rows, d), np.float32)
    for e in range(count):
        own = [dataclasses.replace(m, codes=m.codes[e], scale=m.scale[e]) for m in matrices]
        wanted += np.asarray(alone(np.where(chosen == e, gains, 0).sum(-1), *own))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


# A single row, whose experts all differ, and blocks by expert: of 16 rows, of which 17 pairs fill one, and of more.
@pytest.mark.parametrize(
    "rows", [1, 17, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 70, 200))]
)  # fmt: skip
def test_a_kernel_runs_all_experts_at_once_and_gives_what_they_give_in_turn(rows):
    """Number 3 of 3 experts is one that is held elsewhere: its pairs add nothing."""
    count, d, f, k = 3, 64, 32, 2
    rng = np.random.default_rng(rows)
    matrices = [pack_weight(jnp.asarray(draw(count, *shape, spread=1)), "fp4") for shape in ((f, d), (d, f), (f, d))]
    x, gains = draw(rows, d, seed=4, spread=1), rng.random((rows, k)).astype(np.float32)
    chosen = np.argsort(rng.random((rows, count + 1)))[:, :k].astype(np.int32)
    chosen[: rows // 2, 0] = 1  # one expert has more than the others
    results = []
    for kernels in (Kernels("xla"), Kernels("pallas_triton", interpret=True)):
        own = [dataclasses.replace(m, kernels=kernels) for m in matrices]
        run = jax.jit(lambda x, gains, chosen, own=own: routed_experts(x, gains, chosen, *own, limit=4.0))
        results.append(np.asarray(run(x, gains, chosen)))
    in_turn, at_once = results
    # What w2 takes is rounded to E4M3: a sum that differs in its last bit may round the other way.
    np.testing.assert_allclose(at_once, in_turn, rtol=0, atol=2e-3 * np.abs(in_turn).max())


def test_an_input_width_without_whole_groups_is_refused():
    with pytest.raises(ValueError, match="in=48 of a packed weight must be a multiple of 32"):
        packed_shapes("fp8", 32, 48)


def test_exactly_the_released_tensors_are_packed():
    """Gate, embedding, head, norms, wo_a, weights_proj, wk and the compressor stay floats, as recorded in case G."""
    cfg = running.shallow(quant_method="fp8", expert_dtype="fp4")
    layer = steps.abstract_params(cfg)["layers"][1]
    attn, ffn = layer["attn"], layer["ffn"]
    with_scales = {name for name, part in attn.items() if isinstance(part, dict) and "scale" in part}
    assert with_scales == {"wq_a", "wq_b", "wkv", "wo_b"}
    assert {name for name, part in attn["indexer"].items() if "scale" in part} == {"wq_b"}
    assert not [name for name, part in attn["compressor"].items() if "scale" in part]
    assert all("scale" in ffn[part][w] for part in ("experts", "shared_experts") for w in ("w1", "w2", "w3"))
    assert ffn["experts"]["w1"]["weight"].shape[-1] * 2 == cfg.hidden_size and "scale" not in ffn["gate"]


def test_experts_follow_the_dense_weights_unless_told_otherwise():
    experts = steps.abstract_params(running.single(quant_method="fp8"))["layers"][0]["ffn"]["experts"]
    assert experts["w1"]["scale"].shape == (4, 1, 1) and experts["w1"]["weight"].shape[-1] == 32


def test_training_on_packed_weights_is_refused():
    cfg = running.single(quant_method="fp8")
    with pytest.raises(ValueError, match="quant_method='fp8' must be empty in forward: packed weights"):
        steps.forward({}, jnp.zeros((1, 4), jnp.int32), cfg)


def test_a_packed_layer_of_floats_is_the_rounded_layer():
    from flax import nnx

    plain, codes = (Linear(64, 48, rngs=nnx.Rngs(0), packed=kind) for kind in ("", "fp8"))
    rounded = unpack_weight(pack_weight(plain.weight[...], "fp8"))
    assert np.array_equal(unpack_weight(codes.matrix()), rounded)
    assert codes.weight[...].dtype == codes.scale[...].dtype == jnp.uint8
