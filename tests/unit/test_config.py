"""The identity of a configuration: one hash per meaning, frozen, usable as a key."""

import dataclasses
import subprocess
import sys

import pytest

from dsflash_jax.config import ModelConfig, RopeScaling
from tests.unit.configs import DRAFTS, ENGRAM, ROOT, TINY

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
    "implementation": "xla",
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
    if field.name == "interpret":
        changes["implementation"] = "pallas_triton"
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
