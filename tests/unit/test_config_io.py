"""Spellings of a configuration: all that are accepted give one meaning, and what no field holds is refused by key."""

import json

import numpy as np
import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.config_io import read_config
from tests.unit.configs import RELEASED, ROOT, TINY, YARN


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
