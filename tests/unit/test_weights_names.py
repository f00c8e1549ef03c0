"""Released tensor names and the parameter tree: one to one, nothing renamed, rescaled or filled in silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsflash_jax import steps
from dsflash_jax.modules.linear import Buffer
from dsflash_jax.weights.names import from_released, released_names, to_released, walk
from dsflash_jax.weights.shapes import expected_shapes
from tests.model import running

pytestmark = pytest.mark.smoke
CFG = running.shallow()


@pytest.fixture(scope="module")
def tensors():
    """Every tensor of the model under its released name, with values that tell them and their elements apart."""
    draws = np.random.default_rng(0)
    abstract = steps.abstract_params(CFG)
    shapes = {name: leaf.shape for name, leaf in to_released(jax.tree.map(zeros, abstract)).items()}
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def zeros(leaf):
    return np.zeros(leaf.shape, leaf.dtype)


def test_every_tensor_comes_back_under_its_name(tensors):
    params = from_released(tensors, steps.abstract_params(CFG))
    back = to_released(params)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    assert set(tensors) >= {
        "embed.weight", "head.weight", "norm.weight", "layers.0.attn.wq_a.weight", "layers.0.attn.attn_sink",
        "layers.0.attn.compressor.wgate.weight", "layers.2.attn.indexer.weights_proj.weight",
        "layers.1.ffn.experts.3.w2.weight", "layers.1.ffn.shared_experts.w1.weight", "layers.2.hc_ffn_base",
    }  # fmt: skip
    assert not [name for name in tensors if "freqs" in name]


def test_ngram_tables_are_tensors_and_rope_tables_are_not():
    """Both are buffers, which take no gradient; only what can be computed stays out of a checkpoint."""
    cfg = running.remembering(
        num_nextn_predict_layers=1, dspark_block_size=2, dspark_target_layer_ids=(2,), dspark_markov_rank=4,
        dspark_n_routed_experts=2, dspark_num_experts_per_tok=1, quant_method="fp8", expert_dtype="fp4",
    )  # fmt: skip
    abstract, buffers = steps.abstract_params(cfg), nnx.to_pure_dict(steps._graph(cfg)[1].filter(Buffer))
    assert set(buffers) == {"freqs", "layers"}
    tables = {f"layers.{layer}.engram.embed.{part}" for layer in (0, 1) for part in ("weight", "scale")}
    assert {".".join(map(str, path)) for path, _ in walk(buffers)} == tables
    assert tables < set(released_names(abstract)) == set(expected_shapes(cfg))
    assert list(walk(abstract)) == list(walk({name: part for name, part in abstract.items() if name != "freqs"}))


def test_experts_are_stacked_in_their_own_order(tensors):
    stacked = from_released(tensors, steps.abstract_params(CFG))["layers"][1]["ffn"]["experts"]["w2"]["weight"]
    for expert in range(CFG.n_routed_experts):
        assert np.array_equal(stacked[expert], tensors[f"layers.1.ffn.experts.{expert}.w2.weight"])
    assert released_names(steps.abstract_params(CFG))["layers.1.ffn.experts.2.w1.weight"].expert == 2


def test_norm_weights_are_loaded_as_they_are(tensors):
    """B67: w = 0.0301 survives within one bfloat16 unit; kept as w - 1 in bfloat16 it would come back as 0.0312."""
    stored = np.asarray(jnp.full(CFG.hidden_size, 0.0301, jnp.bfloat16))
    params = from_released({**tensors, "layers.0.attn_norm.weight": stored}, steps.abstract_params(CFG))
    loaded = np.asarray(params["layers"][0]["attn_norm"]["weight"])
    np.testing.assert_allclose(loaded, 0.0301, rtol=2**-8)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, CFG.hidden_size)), jnp.float32)
    params["freqs"] = running.parameters(CFG)["freqs"]
    normed = steps.bind(params, CFG).layers[0].attn_norm(x)
    unit = np.asarray(x) / np.sqrt(np.mean(np.asarray(x) ** 2, axis=-1, keepdims=True))
    np.testing.assert_allclose(normed, unit * loaded, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.attn.wkv.weight": None}, "missing tensor.s.: layers.0.attn.wkv.weight; unexpected: none"),
        ({"layers.9.extra": np.zeros(2)}, "missing tensor.s.: none; unexpected: layers.9.extra"),
        ({"layers.1.ffn.experts.3.w2.weight": np.zeros((3, 2))}, r"experts.3.w2.weight: shape \(3, 2\) must be"),
        ({"embed.weight": np.zeros((32, 96))}, r"embed.weight: shape \(32, 96\) must be \(96, 32\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tensors, change, message):
    """B61: half of the weights missing, or a transposed one, must not load."""
    given = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        from_released(given, steps.abstract_params(CFG))
