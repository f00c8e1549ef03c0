"""Checkpoints in another layout are refused by the name of that layout, with what is read instead."""

import json

import numpy as np
import pytest

from dsflash_jax.weights.load import load_checkpoint
from dsflash_jax.weights.variants import READ, refuse_variant
from tests.weights import synthetic

PLAIN = {"model_type": "deepseek_v41"}


def quantised(**keys):
    return {**PLAIN, "quantization_config": keys}


@pytest.mark.parametrize(
    ("config", "names", "variant"),
    [
        (quantised(quant_method="awq", bits=4, group_size=128), [], "an AWQ checkpoint"),
        (quantised(quant_method="gptq", bits=4), [], "a GPTQ checkpoint"),
        (quantised(quant_method="compressed-tensors", format="pack-quantized"), [], "a compressed-tensors checkpoint"),
        ({**PLAIN, "text_config": quantised(quant_method="modelopt")}, [], "a ModelOpt (NVFP4) checkpoint"),
        (quantised(quant_method="fp8", weight_block_size=[128, 128]), [], "an FP8 128x128-block checkpoint"),
        ({"model_type": "deepseek_v4"}, [], "a deepseek_v4 checkpoint"),
        ({**PLAIN, "quantization": {"group_size": 32, "bits": 4}}, [], "an MLX-quantised checkpoint"),
        (PLAIN, ["layers.0.attn.wkv.weight", "layers.0.attn.wkv.weight_scale_inv"], "a `weight_scale_inv`"),
        (PLAIN, ["layers.0.attn.wkv.qweight", "layers.0.attn.wkv.qzeros"], "an AWQ or GPTQ checkpoint"),
        (PLAIN, ["layers.0.attn.wkv.weight_packed", "layers.0.attn.wkv.weight_scale"], "a compressed-tensors"),
        (PLAIN, ["layers.0.attn.wkv.weight_scale", "layers.0.attn.wkv.weight_scale_2"], "a ModelOpt (NVFP4)"),
        (PLAIN, ["model.embed_tokens.weight", "lm_head.weight"], "`model.`-prefixed"),
        (PLAIN, ["model.layers.0.mlp.experts.switch_mlp.up_proj.scales"], "an MLX-quantised checkpoint"),
        (PLAIN, ["model.layers.0.attn.wkv.weight"], "a `model.`-prefixed checkpoint"),
    ],
)
def test_a_known_variant_is_refused_by_name(tmp_path, config, names, variant):
    with pytest.raises(ValueError) as refusal:
        refuse_variant(tmp_path, config, names)
    message = str(refusal.value)
    assert variant in message and READ in message and message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(("file", "variant"), [("model.gguf", "a GGUF"), ("pytorch_model-1.bin", "a PyTorch pickle")])
def test_other_files_are_refused_by_name(tmp_path, file, variant):
    (tmp_path / file).write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    with pytest.raises(ValueError, match=variant):
        load_checkpoint(tmp_path)


def test_the_released_layout_is_no_variant(tmp_path):
    cfg, tensors = synthetic.golden_tensors("G")
    refuse_variant(tmp_path, synthetic.released_config(cfg), tensors)


def test_a_variant_is_named_by_loading_too(tmp_path):
    """From the files alone: neither the config's own rules nor the list of missing names comes first."""
    cfg, tensors = synthetic.golden_tensors("G")
    renamed = {name.replace(".scale", ".weight_scale_inv"): value for name, value in tensors.items()}
    with pytest.raises(ValueError, match="weight_scale_inv"):
        load_checkpoint(synthetic.write_checkpoint(tmp_path / "inverse", cfg, renamed))
    prefixed = {f"model.{name}": ("F32", np.zeros(1, np.float32)) for name in tensors}
    with pytest.raises(ValueError, match="`model.`-prefixed"):
        load_checkpoint(synthetic.write_checkpoint(tmp_path / "prefixed", cfg, prefixed))
