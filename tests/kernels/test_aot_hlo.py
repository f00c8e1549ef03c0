"""What is read out of a compiled program's text: programs compiled here for the CPU, and lines of one for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import hlo

pytestmark = pytest.mark.smoke
ARENA = jax.ShapeDtypeStruct((300, 40), np.float32)
NBYTES = 300 * 40 * 4


def compiled(function, *args, **jit):
    return hlo.parse(jax.jit(function, **jit).lower(*args).compile().as_text())


def write(arena, rows):
    """Two writes, one of them in a loop."""
    with jax.named_scope("first"):
        arena = arena.at[3].set(rows[0])
    with jax.named_scope("layers.7"):
        return jax.lax.fori_loop(0, 5, lambda i, a: a.at[i].set(a[i + 1] * rows[1]), arena), rows.sum()


ROWS = jax.ShapeDtypeStruct((2, 40), np.float32)


def test_a_given_arena_is_aliased_and_written_in_place():
    program = compiled(write, ARENA, ROWS, donate_argnums=0)
    assert hlo.aliased_parameters(program) == {"arena"}
    assert hlo.copies_of(program, NBYTES) == []


def test_an_arena_that_is_kept_is_not_aliased_and_its_copy_is_found():
    program = compiled(write, ARENA, ROWS)
    assert hlo.aliased_parameters(program) == set()
    (copy,) = hlo.copies_of(program, NBYTES)
    assert "copy" in copy and "f32[300,40]" in copy


def test_arithmetic_on_a_whole_arena_counts_as_a_copy_even_where_its_buffer_is_reused():
    program = compiled(lambda arena: arena * 2 + 1, ARENA, donate_argnums=0)
    assert hlo.aliased_parameters(program) == {"arena"} and len(hlo.copies_of(program, NBYTES)) == 1


def test_loops_multiply_what_they_launch_and_lend_their_scope():
    program = compiled(write, ARENA, ROWS, donate_argnums=0)
    ((loop, scope),) = hlo.loops(program)
    assert hlo.trip_count(loop) == 5 and "/layers.7/" in scope
    inside = [launch for launch in hlo.launches(program) if launch.times == 5]
    assert inside and all("/layers.7/" in launch.scope for launch in inside)
    assert any("/first/" in launch.scope and launch.times == 1 for launch in hlo.launches(program))


def test_a_loop_of_unknown_length_counts_once():
    program = compiled(lambda n, x: jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x) * i, x), 3, np.ones(50, np.float32))
    ((loop, _),) = hlo.loops(program)
    assert hlo.trip_count(loop) is None
    assert {launch.times for launch in hlo.launches(program)} == {1}


def test_of_a_conditional_the_dearest_branch_counts():
    branches = [jnp.cos, lambda x: jax.lax.fori_loop(0, 9, lambda i, x: jnp.sin(x) + i, x)]
    program = compiled(lambda n, x: jax.lax.switch(n, branches, x), 1, np.ones(50, np.float32))
    times = [launch.times for launch in hlo.launches(program)]
    assert max(times) == 9 and 0 in times


def test_sorts_and_products_are_told_apart():
    kinds = {launch.kind for launch in hlo.launches(compiled(lambda x: jnp.sort(x @ x), np.ones((64, 64), np.float32)))}
    assert hlo.SORT in kinds


GPU = """HloModule jit__step, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias) }, entry_computation_layout={}

%fused_scatter (param_0: u8[96,10], param_1: s32[4]) -> u8[96,10] {
  %param_0 = u8[96,10]{1,0} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  ROOT %scatter.1 = u8[96,10]{1,0} scatter(%param_0, %param_1), to_apply=%region_1
}

%fused_convert (param_0.1: u8[96,10]) -> u8[960] {
  %param_0.1 = u8[96,10]{1,0} parameter(0)
  %add.1 = u8[96,10]{1,0} add(%param_0.1, %param_0.1)
  ROOT %bitcast.1 = u8[960]{0} bitcast(%add.1)
}

%gemm (p.0: bf16[8,8]) -> f32[8,8] {
  %p.0 = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p.0, %p.0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x.1: bf16[8,8], step_tokens.1: s32[4], cache_pages.1: u8[96,10]) -> (f32[8,8], u8[96,10]) {
  %x.1 = bf16[8,8]{1,0} parameter(0), metadata={op_name="params['x']"}
  %step_tokens.1 = s32[4]{0} parameter(1), metadata={op_name="step.tokens"}
  %cache_pages.1 = u8[96,10]{1,0} parameter(2), sharding={mesh['_'=1], [{}, {}]}, metadata={op_name="cache.pages"}
  %input_scatter_fusion = u8[96,10]{1,0} fusion(%cache_pages.1, %step_tokens.1), kind=kInput, calls=%fused_scatter, metadata={op_name="jit(_step)/layers.3/attn/scatter"}
  %pallas_call.2 = (u8[96,10]{1,0}, f32[8]{0}) custom-call(%input_scatter_fusion, %x.1), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (0, {})}, metadata={op_name="jit(_step)/layers.3/attn/jit(kv_insert)/kv_insert_mxfp8/pallas_call"}, backend_config={debug = false, ir = "ML(\\0D u8[96,10]{1,0} copy("}
  %gemm_fusion = f32[8,8]{1,0} fusion(%x.1), kind=kCustom, calls=%gemm, metadata={op_name="jit(_step)/layers.3/ffn/dot_general"}
  %fusion-start = ((u8[96,10]{1,0}), u8[960]{0}, u32[]) fusion-start(%input_scatter_fusion), kind=kLoop, calls=%fused_convert, metadata={op_name="jit(_step)/add"}
  %fusion-done = u8[960]{0} fusion-done(%fusion-start)
  ROOT %tuple.1 = (f32[8,8]{1,0}, u8[96,10]{1,0}) tuple(%gemm_fusion, %input_scatter_fusion)
}
"""  # noqa: E501


def test_kernels_of_a_gpu_program_are_named_and_their_code_is_not_read():
    program = hlo.parse(GPU)
    assert hlo.aliased_parameters(program) == {"cache.pages"}
    assert [(launch.kind, launch.scope.split("/")[1]) for launch in hlo.launches(program)] == [
        (hlo.FUSION, "layers.3"), ("kernel:kv_insert_mxfp8", "layers.3"), (hlo.PRODUCT, "layers.3"),
        (hlo.FUSION, "add"),
    ]  # fmt: skip


def test_a_copy_in_another_shape_is_found_and_scatters_and_aliasing_kernels_are_none():
    (copy,) = hlo.copies_of(hlo.parse(GPU), 960)
    assert copy.startswith("fusion-start: fusion-start of ")
    other = hlo.copies_of(hlo.parse(GPU.replace("aliasing={{0}", "aliasing={{1}")), 960)
    assert len(other) == 2 and other[0].startswith("pallas_call.2: custom-call of ")


def test_sizes_of_types():
    assert hlo.array_bytes("(pred[3]{0}, bf16[2,4]{1,0}, s32[], f8e4m3fn[5]{0}, f4e2m1fn[6])") == [3, 16, 4, 5, 3]


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_f {}")
