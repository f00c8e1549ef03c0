"""Every rule of a configuration, with its sentence, and the border of what it accepts."""

import pytest

from dsflash_jax.config import RopeScaling
from tests.unit.configs import DRAFTS, ENGRAM, TINY, YARN

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
    "implementation-unknown": (
        {"implementation": "cuda"},
        "implementation='cuda' must be one of nothing, xla, pallas_triton.",
    ),
    "interpret-alone": (
        {"interpret": True}, "interpret=True interprets a kernel, so implementation='' must name one.",
    ),
    "kernel-scores": (
        {"implementation": "pallas_triton", "score_dtype": "bfloat16"},
        "score_dtype='bfloat16' must be 'float32' with implementation='pallas_triton': no kernel reproduces it.",
    ),
    "kernel-stale": (
        {"implementation": "pallas_triton", "stale_index_keys": True},
        "stale_index_keys=True must be False with implementation='pallas_triton': no kernel reproduces it.",
    ),
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
