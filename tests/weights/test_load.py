"""Released checkpoints become parameters: the recorded quantised model from shards, and damaged ones are refused."""

import json

import jax
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.weights.load import load_checkpoint
from dsflash_jax.weights.names import to_released
from tests.oracles import packed as oracle
from tests.weights import synthetic

CFG, TENSORS = synthetic.golden_tensors("G")
CODES = "layers.1.attn.wq_b.weight"
EXPERT = "layers.2.ffn.experts.3.w2.weight"


@pytest.fixture
def folder(tmp_path):
    """The recorded FP8 / FP4 model in three shards."""
    return synthetic.write_checkpoint(tmp_path / "model", CFG, TENSORS)


def refused(folder, *words, **options):
    with pytest.raises(ValueError) as refusal:
        load_checkpoint(folder, **options)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert message.endswith(".") and "\n" not in message
    return message


def test_every_tensor_arrives_as_it_is_stored(folder):
    loaded = load_checkpoint(folder)
    assert (loaded.cfg.quant_method, loaded.cfg.expert_dtype, loaded.skipped) == ("fp8", "fp4", {})
    back = to_released(loaded.params)
    assert back.keys() == TENSORS.keys()
    for name, (dtype, array) in TENSORS.items():
        assert np.array_equal(back[name], array), name
        assert back[name].dtype == (np.float32 if dtype in synthetic.NUMPY else np.uint8)
    wanted, got = steps.abstract_params(CFG), jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), loaded.params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), wanted) == got


def test_dequantised_weights_are_codes_times_scales(folder):
    loaded = load_checkpoint(folder, dequantise=True)
    assert (loaded.cfg.quant_method, loaded.cfg.expert_dtype) == ("", "")
    back = to_released(loaded.params)
    assert not [name for name in back if name.endswith(".scale")]
    for name, kind in ((CODES, "fp8"), (EXPERT, "fp4"), ("layers.0.ffn.shared_experts.w1.weight", "fp8")):
        scale = TENSORS[name.removesuffix("weight") + "scale"][1]
        assert np.array_equal(back[name], oracle.unpack(kind, TENSORS[name][1], scale)), name


def test_rows_are_dequantised_in_chunks_of_any_size(folder, monkeypatch):
    whole = to_released(load_checkpoint(folder, dequantise=True).params)
    monkeypatch.setattr("dsflash_jax.weights.shards.CHUNK_BYTES", 64)
    pieces = to_released(load_checkpoint(folder, dequantise=True).params)
    assert all(np.array_equal(whole[name], pieces[name]) for name in whole)


def test_a_folder_without_an_index_is_read(folder):
    (folder / synthetic.INDEX).unlink()
    assert to_released(load_checkpoint(folder).params).keys() == TENSORS.keys()


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = {name: value for name, value in TENSORS.items() if name != "head.weight"}
    cfg = CFG.replace(tie_word_embeddings=True)
    tied = load_checkpoint(synthetic.write_checkpoint(tmp_path / "tied", cfg, tensors))
    assert tied.cfg.tie_word_embeddings and "head" not in tied.params
    same = {**TENSORS, "head.weight": ("F32", TENSORS["embed.weight"][1])}
    untied = load_checkpoint(synthetic.write_checkpoint(tmp_path / "untied", CFG, same))
    results = []
    hidden = np.random.default_rng(0).normal(size=(3, CFG.hidden_size)).astype(np.float32)
    for cfg, params, _ in (tied, untied):
        results.append(np.asarray(steps.bind(params, cfg).to_vocabulary(hidden)))
    assert np.array_equal(*results) and np.ptp(results[0]) > 0.1
    refused(synthetic.write_checkpoint(tmp_path / "both", tied.cfg, TENSORS), "head.weight")


# -- damaged --


def test_a_truncated_shard_names_the_tensor_that_is_cut_off(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    refused(folder, shard.name, "is cut off: 5 of its bytes")
    shard.write_bytes(shard.read_bytes()[:6])
    refused(folder, shard.name, "header")


@pytest.mark.parametrize(("name", "dtype"), [(CODES, "BF16"), (EXPERT, "F8_E4M3"), ("norm.weight", synthetic.RAW)])
def test_a_wrong_element_type_names_tensor_and_file(tmp_path, name, dtype):
    tensors = {**TENSORS, name: (dtype, np.ones(TENSORS[name][1].shape, np.uint8))}
    folder = synthetic.write_checkpoint(tmp_path / "model", CFG, tensors)
    refused(folder, name, synthetic.shard_of(folder, name).name, f"dtype {dtype} must be")


def test_an_element_type_of_no_checkpoint_is_refused(folder):
    shard = synthetic.shard_of(folder, "norm.weight")
    synthetic.edit_header(shard, lambda header: header["norm.weight"].update(dtype="F4"))
    refused(folder, "norm.weight", shard.name, "F4")


@pytest.mark.parametrize("name", [CODES, EXPERT])
def test_a_missing_scale_names_its_weight(tmp_path, name):
    scale = name.removesuffix("weight") + "scale"
    tensors = {key: value for key, value in TENSORS.items() if key != scale}
    folder = synthetic.write_checkpoint(tmp_path / "model", CFG, tensors)
    refused(folder, name, scale, synthetic.shard_of(folder, name).name)


def test_a_scale_under_a_config_without_packed_weights_is_refused(tmp_path):
    plain = CFG.replace(quant_method="", expert_dtype="")
    message = refused(synthetic.write_checkpoint(tmp_path / "model", plain, TENSORS), ".scale", "not packed")
    assert "quant_method" in message


def test_a_name_in_two_shards_is_refused(folder):
    (folder / synthetic.INDEX).unlink()
    synthetic.write_shard(folder / "model-more.safetensors", {"norm.weight": TENSORS["norm.weight"]})
    refused(folder, "norm.weight", "model-more.safetensors", "again")


def test_a_name_twice_in_one_header_is_refused(folder):
    entry = b'"norm.weight":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
    shard = synthetic.shard_of(folder, "norm.weight")
    synthetic.write_raw(shard, b"{" + entry + b"," + entry + b"}", b"")
    refused(folder, "norm.weight", shard.name, "twice")


def test_an_index_that_points_nowhere_is_refused(folder):
    index = json.loads((folder / synthetic.INDEX).read_text())
    for file, word in (("gone.safetensors", "which is not in"), ("../gone.safetensors", "not a file name")):
        index["weight_map"]["norm.weight"] = file
        (folder / synthetic.INDEX).write_text(json.dumps(index))
        refused(folder, "norm.weight", file, word)


def test_index_and_shards_must_agree(folder):
    index = json.loads((folder / synthetic.INDEX).read_text())
    places = index["weight_map"]
    other = next(file for file in places.values() if file != places["norm.weight"])
    for changed, words in (
        ({**places, "norm.weight": other}, ["norm.weight", other, "but is in"]),
        ({**places, "layers.0.new": other}, ["layers.0.new", other, "does not hold it"]),
        ({k: v for k, v in places.items() if k != "norm.weight"}, ["norm.weight", "is not in", synthetic.INDEX]),
    ):
        (folder / synthetic.INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(folder, *words)


def test_offsets_that_do_not_fit_are_refused(folder):
    shard = synthetic.shard_of(folder, "norm.weight")
    synthetic.edit_header(shard, lambda header: header["norm.weight"].update(shape=[63]))
    refused(folder, "norm.weight", shard.name, "needs 126")


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    tensors = {name: value for name, value in TENSORS.items() if name != "norm.weight"}
    tensors["layers.9.extra"] = ("F32", np.zeros(2, np.float32))
    refused(synthetic.write_checkpoint(tmp_path / "model", CFG, tensors), "norm.weight", "layers.9.extra")


def test_a_transposed_matrix_is_refused(tmp_path):
    name = "layers.0.attn.wq_a.weight"
    tensors = {**TENSORS, name: ("F8_E4M3", TENSORS[name][1].T)}
    refused(synthetic.write_checkpoint(tmp_path / "model", CFG, tensors), name, "(64, 32) must be (32, 64)")


def test_a_folder_that_is_none_names_what_is_missing(tmp_path):
    with pytest.raises(OSError, match="config.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(synthetic.released_config(CFG)))
    refused(tmp_path, "safetensors")


# -- parts without a place --


OTHERS = {
    "drafts": "mtp.0.main_norm.weight",
    "engram": "layers.0.engram.q_weight",
    "vision": "vision.norm.weight",
}


@pytest.mark.parametrize(("role", "name"), OTHERS.items())
def test_tensors_of_other_parts_are_left_out_only_when_asked(tmp_path, role, name):
    tensors = {**TENSORS, name: ("BF16", np.ones(4, np.float32))}
    folder = synthetic.write_checkpoint(tmp_path / "model", CFG, tensors)
    assert f'skip=("{role}",)' in refused(folder, name, role)
    loaded = load_checkpoint(folder, skip=(role,))
    assert loaded.skipped == {role: 1}
    assert to_released(loaded.params).keys() == TENSORS.keys()


def test_an_unknown_part_to_skip_is_refused(folder):
    refused(folder, "heads", "drafts", skip=("heads",))
