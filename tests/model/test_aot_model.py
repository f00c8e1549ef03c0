"""The report on a whole model compiled for a GPU: what is compiled, what it leaves out, and what it says is broken."""

import jax
import pytest

from dsflash_jax import aot_model, steps
from dsflash_jax.aot_model import Plan
from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import layer_roles
from dsflash_jax.shipped import config_path
from tests.model import running

RELEASED = ModelConfig.from_json(config_path("v41_flash"))
SMALL = Plan(context=40, batch=3, rows=8, pages=32, slots=4)


def test_the_first_layers_keep_their_roles():
    kept = aot_model.first_layers(RELEASED, 25)
    assert layer_roles(kept) == layer_roles(RELEASED)[:25]
    assert kept.num_nextn_predict_layers == 0 and kept.engram_layer_ids == (1, 14)
    assert aot_model.first_layers(RELEASED, 4).candidate_source_layer_id == -1
    assert aot_model.first_layers(RELEASED, 40) is RELEASED


def test_what_is_left_out_is_said():
    cfg, said = aot_model.reduced(RELEASED, None, None)
    assert cfg is RELEASED and said == ["n-gram tables stay on the host: a step brings the rows that it reads."]
    cfg, said = aot_model.reduced(RELEASED, 3, 96)
    assert (cfg.num_hidden_layers, cfg.n_routed_experts) == (3, 96)
    assert said[:2] == ["3 of 40 layers, without draft layers.", "96 of 384 routed experts per layer."]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["v41_flash", "--layers", "0"], "aot_model: layers=0 must lie in 1..num_hidden_layers=40."),
        (
            ["v41_flash", "--experts", "385"],
            "aot_model: experts=385 must lie in num_experts_per_tok=6..n_routed_experts=384.",
        ),
        (["no_such_model"], "aot_model: config 'no_such_model' is neither a file nor a shipped configuration"),
        (
            ["v41_flash", "--arch", "sm_75"],
            "aot_model: device='sm_75' is not one that kernels are compiled for; known: sm_80",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_compiled(arguments, sentence, tmp_path):
    with pytest.raises(SystemExit) as stop:
        aot_model.main([*arguments, "--out", str(tmp_path / "out.json")])
    assert str(stop.value).startswith(sentence) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("step", "rows", "sequences"), [("decode", 3, 3), ("prefill", 8, 1)])
def test_inputs_are_shapes_only_and_n_gram_tables_stay_on_the_host(step, rows, sequences):
    cfg = running.remembering()
    params, cache, info = aot_model.abstract_inputs(cfg, SMALL, step)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((params, cache, info)))
    assert (info.num_rows, info.num_seqs, cache.pages.shape[0]) == (rows, sequences, 32)
    assert "embed" not in params["layers"][0]["engram"] and info.ngrams.fetched.shape == (2, 6 * rows, 33)


def test_a_lowered_step_says_which_layer_and_part_an_operation_belongs_to():
    cfg = running.single()
    lowered = steps.lower_step(*aot_model.abstract_inputs(cfg, SMALL, "decode"), cfg)
    text = lowered.as_text(debug_info=True)
    assert "/layers.0/attn/" in text and "/layers.0/ffn/" in text


PROGRAM = """HloModule jit__step, input_output_alias={ {1}: (1, {}, may-alias) }, entry_computation_layout={}

%part (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %sine = f32[8,8]{1,0} sine(%p)
}

ENTRY %main (x: f32[8,8], cache_pages: u8[96,10], cache_ring: u8[7,5], cache_state: f32[3]) -> (f32[8,8], u8[96,10]) {
  %x = f32[8,8]{1,0} parameter(0), metadata={op_name="x"}
  %cache_pages = u8[96,10]{1,0} parameter(1), metadata={op_name="cache.pages"}
  %cache_ring = u8[7,5]{1,0} parameter(2), metadata={op_name="cache.ring"}
  %copy.1 = u8[7,5]{1,0} copy(%cache_ring)
  %one = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%part, metadata={op_name="jit(_step)/layers.0/attn/sin"}
  %two = f32[8,8]{1,0} fusion(%one), kind=kLoop, calls=%part, metadata={op_name="jit(_step)/layers.0/ffn/sin"}
  ROOT %out = (f32[8,8]{1,0}, u8[96,10]{1,0}) tuple(%two, %cache_pages)
}
"""


def test_a_report_counts_kernels_by_layer_and_says_which_arena_is_copied():
    report = aot_model.program_report(PROGRAM, running.single(), {"pages": 960, "ring": 35})
    assert report["program"] | {"by_kind": None} == {
        "kernels": 3, "launches": 3, "by_kind": None, "loops": 0, "open_loops": 0,
    }  # fmt: skip
    (layer,) = report["layers"]
    assert (layer["role"], layer["kernels"], layer["attn_kernels"], layer["ffn_kernels"]) == ("Full", 2, 1, 1)
    assert report["elsewhere"]["by_kind"] == {"copy": 1} and report["roles"]["Full"]["kernels"] == [2, 2, 2]
    found = report | {"bytes": {"temp_bytes": 1000}}
    assert aot_model.broken_rules(found) == [
        "ring is not updated in the buffer that was given",
        "ring is copied 1 times",
        "temporaries of 1,000 B could hold the pages of 960 B",
    ]
