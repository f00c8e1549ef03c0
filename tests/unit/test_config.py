"""Configurations: every rule with its sentence, every accepted spelling, one hash per meaning."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsflash_jax.config import ModelConfig, RopeScaling
from dsflash_jax.config_io import read_config

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelConfig.from_json(ROOT / "configs" / "tiny.json")
RELEASED = ModelConfig.from_json(ROOT / "configs" / "v41_flash.json")
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
DRAFTS = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_target_layer_ids": (3, 5), "dspark_markov_rank": 8,
    "dspark_noise_token_id": 9, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1,
}  # fmt: skip
ENGRAM = {
    "engram_layer_ids": (0, 2), "engram_num_embeddings": (420, 508), "engram_max_ngram_size": 3,
    "engram_vocab_size": 100, "engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": 64,
}  # fmt: skip

# fields to change in tiny.json -> how the sentence starts: field, value, rule
REFUSALS = {
    # a consumer before its source
    "consumer-first": (
        {"compress_ratios": (0, 2, 2, 2, 1, 1)},
        "compress_ratios=2 at layer 1 makes the layer a consumer before its source: no KV source at or below it",
    ),
    "reindex-first": (
        {"compress_ratios": (0, 2, 2, 2, 1, 1), "index_source_layer_ids": (1, 2, 4, 5)},
        "compress_ratios=2 at layer 1 makes the layer a consumer before its source",
    ),
    "kv-without-selection": (
        {"index_source_layer_ids": (2, 5), "candidate_source_layer_id": -1},
        "kv_source_layer_ids=4 must also be in index_source_layer_ids",
    ),
    "index-in-window-layer": (
        {"index_source_layer_ids": (1, 2, 4, 5)},
        "index_source_layer_ids=1 names a layer whose compress ratio is 0",
    ),
    "other-ratio-than-source": (
        {"compress_ratios": (0, 0, 2, 1, 1, 1)},
        "compress_ratios=1 at layer 3 differs from ratio 2 of its KV source, layer 2",
    ),
    # layer lists
    "ratio-and-page": (
        {"compress_ratios": (0, 0, 3, 3, 1, 1)}, "compress_ratios=3 at layer 2 must be 0 or divide page_size=8",
    ),
    "negative-ratio": ({"compress_ratios": (0, 0, -2, 2, 1, 1)}, "compress_ratios=-2 at layer 2 must be 0 or divide"),
    "ratios-too-few": (
        {"compress_ratios": (0, 0, 2, 2, 1)}, "compress_ratios=[0, 0, 2, 2, 1] has 5 entries, must have 6.",
    ),
    # n-gram memory, draft layers, packed weights
    "engram-without-heads": (
        {**ENGRAM, "engram_n_heads": 0}, "engram_n_heads=0 must be at least 1 when engram_layer_ids is set.",
    ),
    "engram-one-gram": (
        {**ENGRAM, "engram_max_ngram_size": 1}, "engram_max_ngram_size=1 must be at least 2",
    ),
    "engram-tables": (
        {**ENGRAM, "engram_num_embeddings": (420,)},
        "engram_num_embeddings=[420] must have one entry for each of engram_layer_ids=[0, 2].",
    ),
    "engram-width": ({**ENGRAM, "engram_head_dim": 16}, "engram_head_dim=16 must be a multiple of 32"),
    "engram-pad": ({**ENGRAM, "engram_pad_token_id": 4096}, "engram_pad_token_id=4096 must be below vocab_size="),
    "engram-in-the-decoder": (
        {**ENGRAM, "engram_layer_ids": (0, 4)},
        "engram_layer_ids=[0, 4] names layer 4 at or above 4, where the decoder starts",
    ),
    "drafts-without-block": (
        {**DRAFTS, "dspark_block_size": 0}, "dspark_block_size=0 must be at least 1 when num_nextn_predict_layers",
    ),
    "drafts-beyond-rollback": ({**DRAFTS, "dspark_block_size": 6}, "dspark_block_size=6 exceeds num_draft_tokens=5"),
    "drafts-without-target": (
        {**DRAFTS, "dspark_target_layer_ids": ()}, "dspark_target_layer_ids=[] must name a layer when num_nextn",
    ),
    "drafts-target-outside": ({**DRAFTS, "dspark_target_layer_ids": (6,)}, "dspark_target_layer_ids=[6] names layer 6"),
    "drafts-experts": (
        {**DRAFTS, "dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok=5 exceeds dspark_n_routed_experts=4.",
    ),
    "drafts-noise": ({**DRAFTS, "dspark_noise_token_id": 4096}, "dspark_noise_token_id=4096 must be below vocab_size="),
    "quant-unknown": ({"quant_method": "int4"}, "quant_method='int4' must be one of nothing, fp8."),
    "quant-width": (
        {"quant_method": "fp8", "hidden_size": 48}, "hidden_size=48 must be a multiple of 32 with quant_method='fp8'.",
    ),
    "ratios-neither-with-nor-without-drafts": (
        {"num_nextn_predict_layers": 2, "compress_ratios": (0, 0, 2, 2, 1, 1, 0)},
        "compress_ratios=[0, 0, 2, 2, 1, 1, 0] has 7 entries, must have 6 or 8 (with 2 draft layers).",
    ),
    "ratio-in-a-draft-layer": (
        {"num_nextn_predict_layers": 1, "compress_ratios": (0, 0, 2, 2, 1, 1, 1)},
        "compress_ratios=[0, 0, 2, 2, 1, 1, 1] must be 0 in the draft layers",
    ),
    "layers-not-ascending": ({"kv_source_layer_ids": (4, 2)}, "kv_source_layer_ids=[4, 2] must be ascending"),
    "layers-repeated": ({"index_source_layer_ids": (2, 4, 4)}, "index_source_layer_ids=[2, 4, 4] must be ascending"),
    "layer-outside": ({"kv_source_layer_ids": (2, 6)}, "kv_source_layer_ids=[2, 6] names layer 6 outside 0..5"),
    "memory-layer-outside": ({"engram_layer_ids": (9,)}, "engram_layer_ids=[9] names layer 9 outside 0..5"),
    # candidate pool
    "top-k-above-pool": (
        {"index_topk": 6},
        "index_topk=6 exceeds the smallest candidate pool 5 = (candidate_topk_blocks 3 - 1) * candidate_block_size 2 "
        "+ 1. Raise candidate_topk_blocks or lower index_topk.",
    ),
    "pool-source-not-indexing": (
        {"candidate_source_layer_id": 3},
        "candidate_source_layer_id=3 must be -1 (no pool) or in index_source_layer_ids=[2, 4, 5]",
    ),
    "pool-outlives-its-source": (
        {"candidate_source_layer_id": 2}, "candidate_source_layer_id=2 precedes KV source 4: its pool would name",
    ),
    "pool-without-blocks": ({"candidate_topk_blocks": 0}, "candidate_topk_blocks=0 must be at least 1 when"),
    "pool-without-size": ({"candidate_block_size": 0}, "candidate_block_size=0 must be at least 1 when"),
    "pool-below-none": ({"candidate_source_layer_id": -2}, "candidate_source_layer_id=-2 must be at least -1"),
    # quantisation groups and widths
    "main-groups": (
        {"head_dim": 24, "window_format": "bf16"},
        "main_format='fp4_e4m3' does not fit head_dim=24: width 24 is not a multiple of the fp4_e4m3 group of 16",
    ),
    "window-groups": ({"head_dim": 48}, "window_format='mxfp8' does not fit head_dim=48: width 48 is not a multiple"),
    "index-groups": ({"index_head_dim": 48}, "index_format='mxfp4' does not fit index_head_dim=48: width 48 is"),
    "unknown-format": ({"window_format": "fp5"}, "window_format='fp5' must be one of fp4_e4m3, mxfp4, mxfp8,"),
    # RoPE
    "odd-rope": ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even: RoPE rotates adjacent pairs"),
    "rope-wider-than-head": ({"qk_rope_head_dim": 34}, "qk_rope_head_dim=34 exceeds head_dim=32"),
    "rope-wider-than-index-head": (
        {"head_dim": 64, "qk_rope_head_dim": 34}, "qk_rope_head_dim=34 exceeds index_head_dim=32",
    ),
    "yarn-factor": ({"rope_scaling": RopeScaling(0, 16)}, "rope_scaling.factor=0.0 must be positive"),
    "yarn-length": ({"rope_scaling": RopeScaling(4, -1)}, "rope_scaling.original_max_position_embeddings=-1 must be"),
    "yarn-betas": (
        {"rope_scaling": RopeScaling(4, 16, 1, 32)}, "rope_scaling.beta_fast=1.0 must not be below beta_slow=32.0",
    ),
    "yarn-text": ({"rope_scaling": RopeScaling("4", 16)}, "rope_scaling.factor='4' must be a finite number"),
    "yarn-mapping": ({"rope_scaling": dict(YARN)}, f"rope_scaling={YARN} must be a RopeScaling or nothing"),
    # sizes and choices
    "no-layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
    "no-window": ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    "no-top-k": ({"index_topk": 0}, "index_topk=0 must be at least 1"),
    "negative-drafts": ({"num_draft_tokens": -1}, "num_draft_tokens=-1 must be at least 0"),
    "no-scratch": ({"scratch_bytes": 0}, "scratch_bytes=0 must be at least 1"),
    "shared-experts": ({"n_shared_experts": 2}, "n_shared_experts=2 must be 1"),
    "output-groups": ({"o_groups": 3}, "o_groups=3 must divide num_attention_heads=4"),
    "experts": ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds n_routed_experts=4"),
    "gate": ({"scoring_func": "tanh"}, "scoring_func='tanh' must be one of sqrtsoftplus, sigmoid, softmax"),
    "dtype": ({"dtype": "float16"}, "dtype='float16' must be one of float32, bfloat16"),
    "score-dtype": ({"score_dtype": "f32"}, "score_dtype='f32' must be one of float32, bfloat16"),
    "gate-temperature": ({"gate_temp": 0.0}, "gate_temp=0.0 must be positive"),
    "route-scale": ({"routed_scaling_factor": -1.0}, "routed_scaling_factor=-1.0 must be positive"),
    "norm-eps": ({"rms_norm_eps": 0}, "rms_norm_eps=0.0 must be positive"),
    "clamp": ({"swiglu_limit": -1}, "swiglu_limit=-1.0 must be 0 (no clamp) or positive"),
    # types
    "fraction": ({"hidden_size": 32.5}, "hidden_size=32.5 must be an integer"),
    "whole-float": ({"hidden_size": 32.0}, "hidden_size=32.0 must be an integer"),
    "boolean-size": ({"hidden_size": True}, "hidden_size=True must be an integer"),
    "null-size": ({"candidate_topk_blocks": None}, "candidate_topk_blocks=None must be an integer"),
    "text-number": ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a finite number"),
    "not-a-number": ({"swiglu_limit": float("nan")}, "swiglu_limit=nan must be a finite number"),
    "infinite": ({"rope_theta": float("inf")}, "rope_theta=inf must be a finite number"),
    "boolean-number": ({"hc_eps": True}, "hc_eps=True must be a finite number"),
    "number-for-boolean": ({"qat": 1}, "qat=1 must be true or false"),
    "number-for-text": ({"main_format": 4}, "main_format=4 must be text"),
    "no-list": ({"compress_ratios": None}, "compress_ratios=None must be a list of integers"),
    "text-for-list": ({"compress_ratios": "0,0,2,2,1,1"}, "compress_ratios='0,0,2,2,1,1' must be a list of integers"),
    "fractions-in-list": (
        {"compress_ratios": (0, 0, 2.0, 2, 1, 1)}, "compress_ratios=[0, 0, 2.0, 2, 1, 1] must be a list of integers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_rule(changes, sentence):
    with pytest.raises(ValueError) as refusal:
        TINY.replace(**changes)
    message = str(refusal.value)
    assert message.startswith(sentence)
    assert message.endswith(".") and "\n" not in message and message.count(". ") <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 5},  # exactly the smallest pool
        {"index_topk": 500, "candidate_source_layer_id": -1},  # without a pool there is no such limit
        DRAFTS,  # draft layers need not be listed
        {**DRAFTS, "compress_ratios": (0, 0, 2, 2, 1, 1, 0, 0)},
        {**DRAFTS, "dspark_block_size": 5, "dspark_num_experts_per_tok": 4},
        ENGRAM,
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"qk_rope_head_dim": 32},  # the whole head may rotate
        {"page_size": 6},  # any page that the ratios divide
        {"compress_ratios": (0, 0, 8, 8, 4, 4)},
        {"num_draft_tokens": 0, "swiglu_limit": 0, "rope_scaling": None},
    ],
)
def test_the_border_of_a_rule_is_accepted(changes):
    TINY.replace(**changes)


def test_a_window_only_model_needs_no_index_widths_to_fit():
    bare = {"kv_source_layer_ids": (), "index_source_layer_ids": (), "candidate_source_layer_id": -1}
    TINY.replace(compress_ratios=(0,) * 6, index_head_dim=3, **bare)


# -- spellings --


def reference_spelling(cfg):
    """The argument names of the reference inference code for a config."""
    yarn = cfg.rope_scaling
    return {
        "vocab_size": cfg.vocab_size, "dim": cfg.hidden_size, "n_layers": cfg.num_hidden_layers,
        "n_heads": cfg.num_attention_heads, "head_dim": cfg.head_dim, "q_lora_rank": cfg.q_lora_rank,
        "rope_head_dim": cfg.qk_rope_head_dim, "o_groups": cfg.o_groups, "o_lora_rank": cfg.o_lora_rank,
        "moe_inter_dim": cfg.moe_intermediate_size, "n_routed_experts": cfg.n_routed_experts,
        "n_activated_experts": cfg.num_experts_per_tok, "score_func": cfg.scoring_func,
        "route_scale": cfg.routed_scaling_factor, "swiglu_limit": cfg.swiglu_limit, "window_size": cfg.sliding_window,
        "compress_ratios": list(cfg.compress_ratios), "kv_source_layers": list(cfg.kv_source_layer_ids),
        "index_source_layers": list(cfg.index_source_layer_ids),
        "candidate_source_layer": cfg.candidate_source_layer_id, "candidate_topk_blocks": cfg.candidate_topk_blocks,
        "candidate_block_size": cfg.candidate_block_size, "index_n_heads": cfg.index_n_heads,
        "index_head_dim": cfg.index_head_dim, "index_topk": cfg.index_topk, "norm_eps": cfg.rms_norm_eps,
        "max_seq_len": cfg.max_position_embeddings, "n_mtp_layers": cfg.num_nextn_predict_layers,
        "hc_mult": cfg.hc_mult, "hc_sinkhorn_iters": cfg.hc_sinkhorn_iters, "hc_eps": cfg.hc_eps,
        "original_seq_len": yarn.original_max_position_embeddings, "rope_factor": int(yarn.factor),
        "beta_fast": 32, "beta_slow": 1, "engram_layer_ids": list(cfg.engram_layer_ids),
        # of a run, an allocation, or parts that are not built:
        "max_batch_size": 2, "temperature": 0.0, "dtype": "bf16", "expert_dtype": None, "dspark_block_size": 0,
        "engram_head_dim": 0, "vision_dim": 1024, "image_token_id": 129264,
    }  # fmt: skip


QUANTIZATION = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}  # fmt: skip


def released_spelling(cfg):
    """The released config.json: upstream keys only, the text part nested, more around it."""
    upstream = {*json.loads((ROOT / "configs" / "v41_flash.json").read_text())} - {"dtype"}
    text = {key: value for key, value in cfg.to_dict().items() if key in upstream}
    text["rope_scaling"] = {**text["rope_scaling"], "type": "yarn"}
    text |= {"model_type": "deepseek_v41", "torch_dtype": "bfloat16", "quantization_config": QUANTIZATION}
    text |= BUILT_VALUES
    around = {"model_type": "deepseek_v41", "tie_word_embeddings": False, "vision_config": {"hidden_size": 1024}}
    return {**around, "text_config": text}


# Keys of a released file that no field holds, with the value that the model implements.
BUILT_VALUES = {
    "attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "num_key_value_heads": 1,
    "pretraining_tp": 1, "rope_interleave": True, "topk_method": "noaux_tc",
}  # fmt: skip
OTHER_BUILT_VALUES = {
    "attention_bias": True, "attention_dropout": 0.1, "hidden_act": "gelu", "num_key_value_heads": 8,
    "pretraining_tp": 2, "rope_interleave": False, "topk_method": "greedy",
}  # fmt: skip


RELEASED_F32 = RELEASED.replace(dtype="float32")  # the compute dtype is ours, no spelling but the project's has it
TINY_128 = TINY.replace(page_size=128)  # so is the page size


@pytest.mark.parametrize(("cfg", "spelling"), [
    (RELEASED_F32, released_spelling),
    (RELEASED_F32, lambda cfg: released_spelling(cfg)["text_config"]),
    (TINY_128, reference_spelling),
    (TINY_128, lambda cfg: {"args": reference_spelling(cfg), "prefill": [512], "seed": 7}),
    (TINY, ModelConfig.to_dict),
], ids=["released-nested", "released-flat", "reference-bare", "reference-in-args", "project"])  # fmt: skip
def test_every_spelling_reads_to_the_same_config_and_hash(cfg, spelling, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spelling(cfg)))
    for source in (spelling(cfg), path, str(path)):
        read = ModelConfig.from_json(source)
        assert read == cfg
        assert read.sha256() == cfg.sha256()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.json")), ids=lambda path: path.stem)
def test_shipped_configs_are_read_and_written_back(path, tmp_path):
    cfg = read_config(path)
    (tmp_path / "copy.json").write_text(json.dumps(cfg.to_dict()))
    assert read_config(tmp_path / "copy.json") == cfg
    assert read_config(tmp_path / "copy.json").sha256() == cfg.sha256()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("*.f32.npz")), ids=lambda path: path.stem)
def test_golden_configs_are_read(path):
    raw = json.loads(str(np.load(path)["config_json"]))
    cfg = ModelConfig.from_json(raw)
    assert (cfg.hidden_size, cfg.sliding_window) == (raw["dim"], raw["window_size"])
    assert (cfg.rope_scaling is not None) == (raw["original_seq_len"] > 0)


def test_null_lists_and_a_null_pool_mean_none():
    raw = TINY.to_dict() | {"compress_ratios": [0] * 6, "candidate_source_layer_id": None, "rope_scaling": None}
    cfg = ModelConfig.from_json(raw | {"kv_source_layer_ids": None, "index_source_layer_ids": None})
    assert (cfg.kv_source_layer_ids, cfg.index_source_layer_ids) == ((), ())
    assert (cfg.candidate_source_layer_id, cfg.rope_scaling) == (-1, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 32, "topk": 1}, r"config: unknown config key\(s\) hiden_size, topk; known are candidate_block"),
        ({"rope_scaling": {"factor": 4}}, "config: rope_scaling lacks original_max_position_embeddings"),
        ({"rope_scaling": {}}, "config: rope_scaling lacks factor and original_max_position_embeddings"),
        ({"rope_scaling": 4}, "config: rope_scaling=4 must be an object or null"),
        ({"rope_scaling": {**YARN, "rope_type": "linear"}}, "config: rope_scaling type 'linear' must be yarn"),
        ({"rope_scaling": {**YARN, "factor": "four"}}, "rope_scaling.factor='four' must be a finite number"),
    ],
)
def test_bad_keys_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(TINY.to_dict() | changes)


@pytest.mark.parametrize(("key", "value"), [*OTHER_BUILT_VALUES.items(), ("num_key_value_heads", None)])
@pytest.mark.parametrize("place", ["inside", "beside"])
def test_a_released_file_of_another_arithmetic_is_refused(key, value, place):
    raw = released_spelling(RELEASED_F32)
    (raw["text_config"] if place == "inside" else raw)[key] = value
    with pytest.raises(ValueError, match=rf"config: {key}={value!r} must be {BUILT_VALUES[key]!r}: no other value is"):
        ModelConfig.from_json(raw)


WRAPPED = {
    "text_config": lambda: {"text_config": {k: v for k, v in TINY.to_dict().items() if k not in PROJECT_KEYS}},
    "args": lambda: {"args": reference_spelling(TINY)},
}
PROJECT_KEYS = {"page_size": 16, "dtype": "bfloat16", "main_format": "bf16", "scratch_bytes": 4096}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_project_keys_beside_a_wrapped_model_are_applied(wrapped):
    plain = ModelConfig.from_json(wrapped())
    assert ModelConfig.from_json({**wrapped(), **PROJECT_KEYS, "prefill": [512]}) == plain.replace(**PROJECT_KEYS)


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_key_beside_a_wrapped_model_may_repeat_but_not_contradict(wrapped):
    assert ModelConfig.from_json({**wrapped(), "index_topk": 4}) == ModelConfig.from_json(wrapped())
    wrapper = next(iter(wrapped()))
    with pytest.raises(ValueError, match=f"config: index_topk=3 beside {wrapper} contradicts 4 inside it"):
        ModelConfig.from_json({**wrapped(), "index_topk": 3})
    with pytest.raises(ValueError, match=f"beside {wrapper} contradicts RopeScaling"):
        ModelConfig.from_json({**wrapped(), "rope_scaling": {**YARN, "factor": 8}})


def test_the_compute_dtype_of_a_reference_spelled_file_is_applied_and_its_storage_type_is_not():
    for value, dtype in (("bf16", "float32"), ("fp8", "float32"), ("bfloat16", "bfloat16")):
        assert ModelConfig.from_json({**reference_spelling(TINY), "dtype": value}).dtype == dtype


@pytest.mark.parametrize("key", ["hidden_size", "rope_scaling"])
def test_two_spellings_of_one_argument_are_refused(key):
    with pytest.raises(ValueError, match=f"is a second value for {key}"):
        ModelConfig.from_json({**reference_spelling(TINY), key: TINY.to_dict()[key]})


RAW_YARN = TINY.to_dict()["rope_scaling"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None, "rope_parameters": {**RAW_YARN, "rope_type": "yarn"}},
        {"rope_parameters": {**RAW_YARN, "rope_type": "yarn"}, "rope_scaling": None},
        {"rope_scaling": {**RAW_YARN, "type": "yarn"}, "rope_parameters": None},
        {"rope_scaling": RAW_YARN, "rope_parameters": {**RAW_YARN, "rope_type": "yarn", "rope_theta": 10000}},
        {"rope_scaling": {**RAW_YARN, "truncate": True, "attention_factor": 1.0}},
    ],
)
def test_yarn_is_read_from_either_key_in_any_order(changes):
    raw = {key: value for key, value in TINY.to_dict().items() if key != "rope_scaling"}
    assert ModelConfig.from_json({**changes, **raw}) == ModelConfig.from_json({**raw, **changes}) == TINY


def test_a_theta_among_the_rope_parameters_counts():
    raw = {key: value for key, value in TINY.to_dict().items() if key not in ("rope_scaling", "rope_theta")}
    cfg = ModelConfig.from_json({**raw, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert (cfg.rope_theta, cfg.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {**RAW_YARN, "factor": 8}}, "and rope_parameters contradict each other"),
        ({"rope_parameters": {"rope_type": "default"}}, "and rope_parameters contradict each other"),
        ({"rope_parameters": {**RAW_YARN, "rope_theta": 5e5}}, "rope_theta=500000.0 in rope_parameters contradicts"),
        ({"rope_scaling": {**RAW_YARN, "mscale": 1.0}}, r"rope_scaling has unknown part\(s\) mscale; known are factor"),
        ({"rope_scaling": {**RAW_YARN, "attention_factor": 1.28}}, "rope_scaling.attention_factor=1.28 must be 1"),
        ({"rope_scaling": {**RAW_YARN, "truncate": False}}, "rope_scaling.truncate=False must be True"),
        ({"rope_scaling": {**RAW_YARN, "rope_type": "default"}}, "rope_scaling type 'default' must be yarn"),
    ],
)
def test_rope_values_that_would_be_dropped_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(TINY.to_dict() | changes)


def test_unknown_and_missing_reference_arguments_are_named():
    arguments = reference_spelling(TINY)
    with pytest.raises(ValueError, match=r"unknown config key\(s\) n_head"):
        ModelConfig.from_json({**arguments, "n_head": 3})
    del arguments["rope_factor"]
    with pytest.raises(ValueError, match="rope_scaling lacks factor"):
        ModelConfig.from_json({"args": arguments})


def test_all_missing_keys_are_named():
    raw = TINY.to_dict()
    del raw["vocab_size"], raw["head_dim"]
    with pytest.raises(ValueError, match=r"config: missing config key\(s\) head_dim, vocab_size\."):
        ModelConfig.from_json(raw)


def test_a_file_that_is_no_config_is_named(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "binary.json").write_bytes(bytes([0xAB, 0xFF]))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    for name in ("deep", "binary"):
        with pytest.raises(ValueError, match=rf"{name}\.json: not a JSON file"):
            ModelConfig.from_json(tmp_path / f"{name}.json")
    with pytest.raises(ValueError, match=r"broken\.json: not a JSON file"):
        read_config(tmp_path / "broken.json")
    with pytest.raises(ValueError, match=r"list\.json: a config must be a JSON object, not list"):
        read_config(tmp_path / "list.json")
    with pytest.raises(OSError, match="absent"):
        read_config(tmp_path / "absent.json")


# -- identity --

# Training runs and study results are filed under these. A new field needs a form that leaves them as they are.
PINNED_HASHES = {
    "lab": "92c9e5d4e16940ed8df07792904ec8ff23b37a32a14b7d636d990201795992b6",
    "lab_large": "3c718f96f4d0d4ea2d425fd4297436b059d7f2cde073bbed02364c6d911a05b9",
    "tiny": "63999a8e32a0cf658708d381aaee0b67dae3ba02697727ab818ee14a97447388",
    "v41_flash": "f792f42da21d0776dac5926da33298ab6725a5061222ca3e311837ec4ff7ab94",
    "bench_base": "5af2d2b8048074294fa99f4c342ec3d22ef20fcd8364287171f99d87a8329633",
}
OTHER_VALUES = {
    "compress_ratios": (0, 0, 4, 4, 1, 1), "kv_source_layer_ids": (2, 3, 4), "index_source_layer_ids": (2, 4),
    "candidate_source_layer_id": -1, "engram_layer_ids": (0, 1), "scoring_func": "sigmoid", "dtype": "bfloat16",
    "score_dtype": "bfloat16", "window_format": "bf16", "main_format": "bf16", "index_format": "bf16",
    "rope_scaling": RopeScaling(4, 16, 32, 2), "num_nextn_predict_layers": 2, "engram_num_embeddings": (7,),
    "dspark_target_layer_ids": (1,), "quant_method": "fp8", "expert_dtype": "fp4",
    "n_shared_experts": None, "hidden_size": 48, "head_dim": 64,
    "qk_rope_head_dim": 10, "o_groups": 4, "num_attention_heads": 8, "index_head_dim": 64, "index_topk": 5,
    "num_hidden_layers": 7, "n_routed_experts": 5, "num_experts_per_tok": 3, "page_size": 16,
}  # fmt: skip


def other(cfg, field):
    """`cfg` with one field changed; None if only one value is allowed."""
    value = getattr(cfg, field.name)
    if field.name in OTHER_VALUES:
        new = OTHER_VALUES[field.name]
    else:
        new = not value if field.type == "bool" else value + 1
    if new is None:
        return None
    changes = {field.name: new}
    for switch, part in (("num_nextn_predict_layers", DRAFTS), ("engram_layer_ids", ENGRAM)):
        if field.name == switch:
            changes = part | changes
    if field.name == "kv_source_layer_ids":
        changes["index_source_layer_ids"] = (2, 3, 4, 5)
    if field.name == "num_hidden_layers":
        changes["compress_ratios"] = (*cfg.compress_ratios, 1)
    return cfg.replace(**changes)


@pytest.mark.parametrize("field", dataclasses.fields(ModelConfig), ids=lambda field: field.name)
def test_the_hash_changes_with_every_field(field):
    changed = other(TINY, field)
    if changed is None:
        return
    assert changed.sha256() != TINY.sha256()
    assert field.name in changed.differences(TINY)
    assert changed.differences(TINY)[field.name][1] == TINY.to_dict()[field.name]


def test_equal_configs_have_one_hash_however_numbers_were_written():
    raw = TINY.to_dict() | {"swiglu_limit": 10, "rope_theta": 10_000}
    whole = ModelConfig.from_json(raw)
    pointed = ModelConfig.from_json({**raw, "swiglu_limit": 10.0, "rope_theta": 1e4})
    listed = dataclasses.replace(whole, compress_ratios=list(whole.compress_ratios))
    assert whole == pointed == listed
    assert hash(whole) == hash(pointed) == hash(listed)
    assert whole.sha256() == pointed.sha256() == listed.sha256()
    assert RopeScaling(4, 16, 32, 1) == RopeScaling(4.0, 16)
    hashes = {TINY.replace(rope_scaling=RopeScaling(factor, 16)).sha256() for factor in (4, 4.0)}
    assert len(hashes) == 1


@pytest.mark.parametrize(("name", "digest"), PINNED_HASHES.items())
def test_hashes_that_committed_results_record_stay(name, digest):
    assert ModelConfig.from_json(ROOT / "configs" / f"{name}.json").sha256() == digest


def test_the_hash_is_the_same_in_another_process():
    program = "from dsflash_jax.config import ModelConfig\nprint(ModelConfig.from_json('configs/tiny.json').sha256())"
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True, timeout=60)
    assert printed.strip() == TINY.sha256()


def test_a_config_is_frozen_and_a_key():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.hidden_size = 1
    assert {TINY: 1}[TINY.replace()] == 1


def test_differences_name_fields_with_both_values():
    changed = TINY.replace(index_topk=3, main_format="bf16")
    assert TINY.differences(changed) == {"index_topk": (4, 3), "main_format": ("fp4_e4m3", "bf16")}
    assert TINY.differences(changed.to_dict()) == TINY.differences(changed)
    assert TINY.differences(TINY) == {}
