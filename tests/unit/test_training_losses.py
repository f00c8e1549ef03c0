"""The loss: masks, means over whole batches, weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.training.losses import count_targets, loss_parts, token_nll

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 6, 10)).astype(np.float32)
TARGETS = RNG.integers(0, 10, (4, 6)).astype(np.int32)
ANSWER = RNG.random((4, 6)) < 0.3
TEXT = ~ANSWER & (RNG.random((4, 6)) < 0.5)


def parts(rows=slice(None), counts=None, kl=0.5):
    masks = ANSWER[rows], TEXT[rows]
    return loss_parts(
        LOGITS[rows], jnp.float32(kl), TARGETS[rows], *masks, counts or count_targets(*masks),
        text_weight=0.3, indexer_weight=2.0,
    )


def test_nll_is_minus_the_log_of_the_target_share():
    share = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(share, TARGETS[..., None], -1)[..., 0])
    np.testing.assert_allclose(token_nll(LOGITS, TARGETS), expected, rtol=1e-5)


def test_gradient_of_nll_is_softmax_minus_one_hot():
    gradient = jax.grad(lambda x: token_nll(x, TARGETS).sum())(jnp.asarray(LOGITS))
    np.testing.assert_allclose(gradient, jax.nn.softmax(LOGITS) - np.eye(10)[TARGETS], atol=1e-6)


def test_each_part_is_the_mean_over_its_own_targets():
    nll = np.asarray(token_nll(LOGITS, TARGETS))
    result = parts()
    assert float(result.answer) == pytest.approx(nll[ANSWER].mean(), rel=1e-5)
    assert float(result.text) == pytest.approx(nll[TEXT].mean(), rel=1e-5)
    assert float(result.total) == pytest.approx(nll[ANSWER].mean() + 0.3 * nll[TEXT].mean() + 2.0 * 0.5, rel=1e-5)


def test_halves_of_a_batch_add_up_to_the_whole():
    counts = count_targets(ANSWER, TEXT)
    halves = [parts(slice(0, 1), counts, 0.25), parts(slice(1, 4), counts, 0.25)]
    for name in ("total", "answer", "text"):
        total = float(sum(getattr(half, name) for half in halves))
        assert total == pytest.approx(float(getattr(parts(), name)), rel=1e-5)


def test_a_kind_without_targets_costs_nothing():
    nothing = np.zeros_like(ANSWER)
    counts = count_targets(nothing, TEXT)
    result = loss_parts(
        LOGITS, jnp.float32(0), TARGETS, nothing, TEXT, counts, text_weight=1.0, indexer_weight=1.0,
    )
    assert float(result.answer) == 0.0 and float(result.total) == float(result.text) > 0
