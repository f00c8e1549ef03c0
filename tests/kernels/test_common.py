"""What all ops share: dispatch by name and platform, device facts, tiles, packed rows, budgets of compiled kernels."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.numerics.format_table import FORMAT_NAMES, format_facts
from dsflash_jax.numerics.formats import get_format
from pallas_kernels.aot.compile import occupancy
from pallas_kernels.aot.tables import broken_rules
from pallas_kernels.cases import all_cases
from pallas_kernels.common import codes, expected
from pallas_kernels.common.cases import Budget
from pallas_kernels.common.devices import DEVICES, current_target, device_for
from pallas_kernels.common.dispatch import Kernel, UnsupportedError, dispatch
from pallas_kernels.common.draw import Draw
from pallas_kernels.common.formats import FORMATS, PagedRows, RowLayout, arena_reasons, check_rows
from pallas_kernels.common.tiles import TileConfig, shared_memory_reasons, tuned_table
from tests.oracles.quant import pack_row, unpack_row

ROOT = Path(__file__).resolve().parents[2]
H200 = device_for("h200")
x1 = jnp.ones(3)


def double(x):
    return 2 * x


def negate(x):
    return -x


# Dispatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_no_name_serves_a_cpu_by_xla_and_traces_both():
    kernels = {"pallas_triton": Kernel(negate, ())}
    run = jax.jit(lambda x: dispatch("op", None, double, kernels, x))
    np.testing.assert_array_equal(run(x1), [2, 2, 2])
    assert "neg" in str(jax.make_jaxpr(run)(x1)), "the kernel is not part of the traced program"


def test_no_name_falls_back_where_no_kernel_can_serve():
    kernels = {"pallas_triton": Kernel(negate, ("too odd",))}
    program = str(jax.make_jaxpr(lambda x: dispatch("op", None, double, kernels, x))(x1))
    assert "neg" not in program and "mul" in program


def test_a_named_kernel_lists_every_reason():
    kernels = {"pallas_triton": Kernel(negate, ("width=3 is odd", "heads=5 is prime"))}
    with pytest.raises(UnsupportedError, match="width=3 is odd; heads=5 is prime; the platform is cpu"):
        dispatch("op", "pallas_triton", double, kernels, x1)


def test_interpretation_runs_a_named_kernel_on_a_cpu():
    kernels = {"pallas_triton": Kernel(negate, ())}
    got = dispatch("op", "pallas_triton", double, kernels, x1, interpret=True)
    np.testing.assert_array_equal(got, [-1, -1, -1])


@pytest.mark.parametrize(
    ("name", "interpret", "words"),
    [
        ("cuda", False, "implementation='cuda' is unknown; known: xla, pallas_triton, pallas_mosaic_gpu"),
        ("pallas_mosaic_gpu", False, "does not exist for this op; it has: xla, pallas_triton"),
        (None, True, "implementation must name one"),
        ("xla", True, "implementation must name one"),
    ],
)
def test_other_names_are_refused(name, interpret, words):
    with pytest.raises(ValueError, match=words):
        dispatch("op", name, double, {"pallas_triton": Kernel(negate, ())}, x1, interpret=interpret)


def test_only_files_of_that_name_know_triton():
    importers = set()
    for file in (ROOT / "pallas_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            if any("pallas.triton" in name for name in names):
                importers.add(file.name)
    assert importers == {"pallas_triton.py"}


# Devices and tiles ------------------------------------------------------------------------------------------------


def test_devices_are_found_by_either_name():
    assert [device_for(d.arch) for d in DEVICES] == list(DEVICES) == [device_for(d.slug) for d in DEVICES]
    with pytest.raises(ValueError, match="sm_70.*known: sm_80"):
        device_for("sm_70")


def test_the_target_of_a_cpu_process_is_no_gpu():
    assert current_target().platform == "cpu" and current_target().device is None


def test_a_tile_too_large_names_the_limit():
    assert shared_memory_reasons("block_rows=512", H200.block_shared_bytes, H200) == ()
    (reason,) = shared_memory_reasons("block_rows=512", H200.block_shared_bytes + 1, H200)
    assert reason.startswith("block_rows=512 needs 232,449 B, more than the 232,448 B of shared memory")


def test_tile_configs_break_early():
    with pytest.raises(ValueError, match="num_warps=64 .* up to 32; num_stages=0 must be at least 1"):
        TileConfig(num_warps=64, num_stages=0)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.slug)
def test_tuned_tables_hold_fields_and_buckets_that_exist(device):
    cases = {(case.op, case.bucket): case for case in all_cases()}
    for op, buckets in tuned_table(device.slug).get("ops", {}).items():
        for bucket, fields in buckets.items():
            dataclasses.replace(cases[op, bucket].configs[0], **fields)  # validates


# Formats and rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_kernels_and_caches_agree_on_every_format(name):
    """Two owners by design: kernels know nothing of the model. This keeps them one fact."""
    mine, facts = FORMATS[name], format_facts(name)
    assert (mine.element, mine.scale, mine.group) == (facts.element_code, facts.scale_code, facts.group)
    assert mine.amax_floor == facts.amax_floor
    assert [mine.row_bytes(w) for w in (32, 128, 512)] == [facts.row_bytes(w) for w in (32, 128, 512)]
    assert set(FORMATS) == set(FORMAT_NAMES)


@pytest.mark.parametrize(("code", "bits"), [("e2m1", 4), ("e4m3", 8), ("e8m0", 8)])
def test_decoded_codes_are_the_numbers_that_they_stand_for(code, bits):
    every = np.arange(1 << bits)
    got = np.asarray(jax.jit(codes.DECODERS[code])(jnp.asarray(every, jnp.int32)))
    np.testing.assert_array_equal(got, [meaning(code, int(c)) for c in every])


def meaning(code, bits):
    if code == "e8m0":
        return np.nan if bits == 255 else 2.0 ** (bits - 127)
    mantissa_bits, bias, sign_bit = (1, 1, 8) if code == "e2m1" else (3, 7, 128)
    magnitude = bits & (sign_bit - 1)
    if code == "e4m3" and magnitude == 127:
        return np.nan
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    return -value if bits & sign_bit else value


def paged(**changes):
    layout = RowLayout("bf16", 8, 16, 4)
    fields = {
        "arena": jnp.zeros((5, 80), jnp.uint8), "table": jnp.array([[3, -1], [0, 2]], jnp.int32),
        "seq": jnp.array([1, 0], jnp.int32), "layout": layout,
    }  # fmt: skip
    return PagedRows(**(fields | changes))


def test_rows_are_found_through_the_block_table():
    page, offset = paged().address(jnp.array([[0, 5, 8, -1], [3, 4, 1, 0]], jnp.int32))
    assert page.tolist() == [[0, 2, -1, -1], [3, -1, 3, 3]]  # behind the table, below zero, no page: none
    assert offset[:, :2].tolist() == [[16, 32], [64, 16]]


def test_unscaled_rows_may_lie_in_their_own_dtype():
    rows = paged(arena=jnp.zeros((5, 40), jnp.bfloat16))
    check_rows("op", "rows", rows, 2)
    assert rows.address(jnp.array([[1], [1]], jnp.int32))[1].tolist() == [[16], [16]]  # byte 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arena": jnp.zeros((5, 80), jnp.int8)}, "arena must be uint8 or bfloat16"),
        ({"table": jnp.zeros((2, 2), jnp.uint32)}, "table must be int32"),
        ({"seq": jnp.zeros(3, jnp.int32)}, "3 entries for 2 queries"),
        ({"layout": RowLayout("fp5", 8, 0, 4)}, "'fp5' is unknown; known: fp4_e4m3"),
        ({"layout": RowLayout("bf16", 8, 32, 4)}, "rows end at byte 96, behind the page of 80 B"),
        ({"layout": RowLayout("mxfp4", 8, 0, 4)}, "multiple of 32"),
        ({"layout": RowLayout("bf16", 8, 0, 0)}, "rows_per_page=0 must be positive"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check_rows("op", "rows", paged(**changes), 2)


@pytest.mark.parametrize(
    ("pages", "page_bytes", "dtype", "safe"),
    [
        (1 << 15, 1 << 16, jnp.uint8, True),  # 2^31 bytes
        ((1 << 15) + 1, 1 << 16, jnp.uint8, False),
        (1 << 16, 1 << 16, jnp.uint8, False),  # 2^32 bytes
        ((1 << 16) + 1, 1 << 16, jnp.uint8, True),  # 64-bit offsets
        ((1 << 15) + 1, 1 << 16, jnp.bfloat16, True),
    ],
)
def test_arenas_whose_offsets_would_wrap_are_named(pages, page_bytes, dtype, safe):
    reasons = arena_reasons(jax.ShapeDtypeStruct((pages, page_bytes), dtype))
    assert reasons == () if safe else "2^31" in reasons[0]


@pytest.mark.parametrize(
    "name", [n if n in ("fp4_e4m3", "mxfp8") else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS]
)
def test_drawn_rows_are_finite(name):
    layout = RowLayout(name, 64, 8, 3)
    draw = jax.jit(lambda: Draw(0).arena(4, 8 + 3 * layout.row_bytes, layout))  # one program, not one per operation
    values = jax.jit(lambda a: get_format(name).unpack(a[:, 8:].reshape(12, layout.row_bytes), 64))(draw())
    assert np.isfinite(values).all() and 0.05 < np.std(values) < 20


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_cases_expect_are_the_oracle_s(name):
    rng = np.random.default_rng(3)
    values = (rng.normal(size=(6, 64)) * 2.0 ** rng.integers(-12, 9, (6, 1))).astype(np.float32)
    values[0, :4], values[1], values[2] = [0, -0.0, 0.25, -1e30], 0, np.round(values[2])  # ties, saturation, zeros
    packed = expected.pack(values, FORMATS[name])
    assert [row.tobytes() for row in packed] == [pack_row(name, row) for row in values]
    want = [unpack_row(name, row.tobytes(), 64) for row in packed]
    np.testing.assert_array_equal(expected.unpack(packed, FORMATS[name], 64).astype(np.float32), want)


# Cases and budgets ------------------------------------------------------------------------------------------------


def test_every_case_has_its_own_key_and_shapes_without_arrays():
    cases = all_cases()
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        leaves = jax.tree.leaves(case.args(Draw(None), False))
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves), case.key
        assert case.cost.nbytes > 0 and case.budget.instructions > 100, case.key


GOOD = {
    "name": "topk_select__1", "instructions": 900, "matrix": {"HGMMA": 4}, "spill_bytes": 0, "shared_bytes": 1024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "sort", "words"),
    [
        ({}, False, None),
        ({"instructions": 40}, False, "40 instructions, fewer than the floor of 500"),
        ({"spill_bytes": 8}, False, "topk_select__1 spills 8 B, allowed 0"),
        ({"matrix": {}}, False, "no matrix instruction"),
        ({"shared_bytes": 300_000}, False, "300,000 B of 232,448"),
        ({"name": "loop_fusion"}, False, "no kernel named topk_select: loop_fusion"),
        ({}, True, "the program sorts"),
    ],
)
def test_a_broken_budget_is_named(kernel, sort, words):
    report = {"op": "topk_select", "sort": sort, "kernels": [GOOD | kernel]}
    broken = broken_rules(report, Budget(matrix=True, instructions=500), H200)
    assert broken == [] if words is None else any(words in rule for rule in broken)


def test_occupancy_is_bound_by_the_scarcest_resource():
    kernel = {"threads": 256, "registers": 40, "shared_bytes": 1024}
    assert occupancy(H200, kernel) == 6  # 65,536 registers / (40 x 256)
    assert occupancy(H200, kernel | {"shared_bytes": 100_000}) == 2
    assert occupancy(H200, kernel | {"registers": 8}) == 8  # 2,048 threads
    assert occupancy(H200, kernel | {"threads": 0}) == 0  # no launch is known
