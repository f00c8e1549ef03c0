"""The training form of the draft layers is the draft step on every prefix, and only the draft layers learn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.draft_step import Anchor, make_draft_step
from dsflash_jax.modules.dspark import draft_block
from tests.model import running

DRAFTS = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_target_layer_ids": (0,), "dspark_markov_rank": 8,
    "dspark_noise_token_id": 9, "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 1,
}  # fmt: skip
CFG = running.single(**DRAFTS, max_position_embeddings=32)
TOKENS = running.prompt(20)
ANCHORS = (1, 2, 5, 11, 17)  # shorter than the window of 4, on its border, both parities, and the last that fits


@pytest.fixture(scope="module")
def params():
    return running.parameters(CFG)


@pytest.fixture(scope="module")
def trained(params):
    """The training form on one row, and its gradients: (output, gradient of all parameters)."""
    tokens, anchors = jnp.asarray([TOKENS]), jnp.asarray([ANCHORS])

    def loss(trained, buffers):
        out = steps.forward_drafts({**trained, **buffers}, tokens, anchors, CFG)
        every = jnp.mean(out.drafted.logits**2) + jnp.mean(out.drafted.confidence**2) + jnp.mean(out.target_logits**2)
        return every, out

    weights = {name: leaf for name, leaf in params.items() if name != "freqs"}
    grads, out = jax.jit(jax.grad(loss, has_aux=True))(weights, {"freqs": params["freqs"]})
    return jax.device_get((out, grads))


def served(params, anchor):
    """The draft step behind a prefill of the tokens before the anchor, given the true tokens: (logits, confidence)."""
    pages = -(-len(TOKENS) // CFG.page_size)
    step = make_step([Chunk(0, TOKENS[:anchor], 0, range(pages))], CFG, rows=32, pages=pages)
    _, cache = steps.prefill(params, ModelCache.empty(CFG, pages, 1), step, CFG)
    return _draft(params, cache, make_draft_step([Anchor(0, TOKENS[anchor], anchor)], CFG), jnp.asarray(TOKENS))


@jax.jit
def _draft(params, cache, step, tokens):
    return draft_block(steps.bind(params, CFG), step, cache, lambda i, _: tokens[step.length + 1 + i])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ANCHORS)))
def test_a_block_in_training_is_the_draft_step_on_the_same_prefix(params, trained, number):
    """B80: the block's first row predicts the token behind the anchor, from the rows before the anchor."""
    out = served(params, ANCHORS[number])
    drafted = jax.tree.map(lambda leaf: leaf[0, number], trained[0].drafted)
    np.testing.assert_allclose(drafted.logits, out.logits[0], atol=2e-5, rtol=0)
    np.testing.assert_allclose(drafted.confidence, out.confidence[0], atol=2e-5, rtol=0)
    assert np.abs(out.logits).max() > 0.1


@pytest.mark.slow
def test_target_logits_are_those_behind_the_blocks_tokens(params, trained):
    logits = jax.jit(lambda p, ids: steps.forward(p, ids, CFG.replace(qat=True)).logits)(params, jnp.asarray([TOKENS]))
    for number, anchor in enumerate(ANCHORS):
        np.testing.assert_allclose(trained[0].target_logits[0, number], logits[0, anchor : anchor + 3], atol=1e-5)


@pytest.mark.slow
def test_only_draft_parameters_take_a_gradient(trained):
    _, grads = trained
    for name, part in grads.items():
        largest = [float(np.abs(leaf).max()) for leaf in jax.tree.leaves(part)]
        assert name == "mtp" or not any(largest), name
    # All of the draft layers learn, but for the experts that no row chose and the bias that only chooses.
    silent = {
        ".".join(str(getattr(key, "key", key)) for key in path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads["mtp"])
        if not np.abs(leaf).max()
    }
    assert silent == {"0.ffn.gate.bias", "1.ffn.gate.bias"}


def test_draft_layers_leave_the_backbones_draws_and_logits_alone():
    plain = CFG.replace(num_nextn_predict_layers=0, dspark_target_layer_ids=())
    with_drafts, without = steps.init_params(CFG), steps.init_params(plain)
    assert with_drafts.keys() - without.keys() == {"mtp"}
    del with_drafts["mtp"]
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), with_drafts, without))


@pytest.mark.parametrize(("change", "anchors", "message"), [
    ({"num_nextn_predict_layers": 0}, [[1]], "num_nextn_predict_layers=0 must be at least 1"),
    ({}, [1], r"anchors of shape \(1,\) must be \[1, A\]"),
    ({"dspark_block_size": 5}, [[1]], "rows of 5, must be longer than dspark_block_size=5"),
])  # fmt: skip
def test_what_cannot_be_drafted_is_refused(change, anchors, message):
    with pytest.raises(ValueError, match=message):
        steps.forward_drafts({}, jnp.zeros((1, 5), int), jnp.asarray(anchors), CFG.replace(**change))
