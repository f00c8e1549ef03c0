"""A written checkpoint has the released layout: what was read comes back byte for byte, and never in part."""

import json

import jax
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.weights.export import export_checkpoint
from dsflash_jax.weights.load import load_checkpoint
from dsflash_jax.weights.names import to_released
from dsflash_jax.weights.shards import open_checkpoint
from tests.model import running
from tests.weights import synthetic

CFG, TENSORS = synthetic.golden_tensors("G")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The recorded quantised model in three shards, written by the tests' own writer."""
    return synthetic.write_checkpoint(tmp_path_factory.mktemp("released") / "model", CFG, TENSORS)


def contents(folder, pattern="model*"):
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def test_a_round_trip_is_byte_identical(released, tmp_path):
    """Read, written to the same shards, and read again: shards and index have the bytes of the originals."""
    loaded = load_checkpoint(released)
    places = json.loads((released / synthetic.INDEX).read_text())["weight_map"]
    written = export_checkpoint(loaded.params, loaded.cfg, tmp_path / "written", places=places)
    assert len(contents(released)) == 4
    assert contents(written) == contents(released)
    assert ModelConfig.from_json(written / "config.json") == loaded.cfg
    again = load_checkpoint(written)
    third = export_checkpoint(again.params, again.cfg, tmp_path / "third", places=places)
    assert contents(third, "*") == contents(written, "*")


def test_every_tensor_is_stored_in_the_released_element_type(released, tmp_path):
    loaded = load_checkpoint(released)
    written = export_checkpoint(loaded.params, loaded.cfg, tmp_path / "written", shard_bytes=2**15)
    stored = open_checkpoint(written)
    assert {name: info.dtype for name, info in stored.items()} == {name: t[0] for name, t in TENSORS.items()}
    files = sorted(path.name for path in written.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert all(path.stat().st_size < 2**15 + 2**14 for path in written.glob("*.safetensors"))
    index = json.loads((written / synthetic.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in stored.values())


def test_a_pooling_compressor_is_stored_in_float32(released):
    """Ratio 2 in float32, ratio 1 in bfloat16, as recorded."""
    kinds = {name: dtype for name, (dtype, _) in TENSORS.items() if "compressor.wkv" in name}
    assert kinds == {"layers.1.attn.compressor.wkv.weight": "F32", "layers.2.attn.compressor.wkv.weight": "BF16"}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"quant_method": "fp8", "expert_dtype": "fp4"}])
def test_a_model_of_ours_comes_back_as_it_was(tmp_path, changes):
    """Trained values are no bfloat16 numbers: float32 keeps them, the released types refuse them by name."""
    cfg = running.single(**changes)
    params = steps.init_params(cfg)
    with pytest.raises(ValueError, match=r'weight has values that BF16 cannot hold.*dtype="float32"'):
        export_checkpoint(params, cfg, tmp_path / "rounded")
    assert not list(tmp_path.iterdir())
    back = load_checkpoint(export_checkpoint(params, cfg, tmp_path / "kept", dtype="float32"))
    assert back.cfg == cfg
    assert jax.tree.all(jax.tree.map(np.array_equal, back.params, params))
    assert ("head.weight" in to_released(back.params)) == (not cfg.tie_word_embeddings)


def test_nothing_is_overwritten_and_a_failed_write_leaves_nothing(released, tmp_path, monkeypatch):
    loaded = load_checkpoint(released)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").write_text("mine")
    with pytest.raises(ValueError, match="taken exists"):
        export_checkpoint(loaded.params, loaded.cfg, tmp_path / "taken")
    monkeypatch.setattr("dsflash_jax.weights.export.config_json", lambda cfg: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_checkpoint(loaded.params, loaded.cfg, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16' must be one of released, float32"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"places": {"norm.weight": "a.safetensors"}}, "places must name the tensors"),
    ],
)
def test_options_that_do_not_fit_are_refused(released, tmp_path, options, message):
    loaded = load_checkpoint(released)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(loaded.params, loaded.cfg, tmp_path / "new", **options)


def test_parameters_of_another_config_are_refused(released, tmp_path):
    loaded = load_checkpoint(released)
    with pytest.raises(ValueError, match=r"unexpected: layers.0.attn.wkv.scale"):
        export_checkpoint(loaded.params, loaded.cfg.replace(quant_method="", expert_dtype=""), tmp_path / "plain")
    loaded.params["layers"][0]["attn"]["wkv"]["weight"] = np.zeros((32, 64), np.float32)
    with pytest.raises(ValueError, match=r"layers.0.attn.wkv.weight: float32 parameters do not fit"):
        export_checkpoint(loaded.params, loaded.cfg, tmp_path / "mixed")
