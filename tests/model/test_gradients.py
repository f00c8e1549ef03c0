"""Gradients of the whole-sequence form: none from the future, none between indexer and model, through rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from tests.model import running

LENGTH = 12
CFG = running.shallow()
QAT = running.single(qat=True)
INDEXER = "indexer"


@pytest.fixture(scope="module")
def params():
    return running.parameters(CFG)


def tokens(seed=0, length=LENGTH):
    return jnp.asarray([running.prompt(length, seed)])


def trained(params):
    """Parameters without the RoPE tables."""
    return {k: v for k, v in params.items() if k != "freqs"}


def run(trainable, params, ids, cfg, dense=False):
    return steps.forward({**trainable, "freqs": params["freqs"]}, ids, cfg, dense=dense)


@pytest.fixture(scope="module")
def gradients(params):
    """{(loss, dense): gradient tree} of next-token loss "lm" and indexer loss "kl", from one compiled function."""

    def losses(trainable, ids, which, dense):
        out = run(trainable, params, ids, CFG, dense)
        lm = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(out.logits[:, :-1]), ids[:, 1:, None], axis=-1))
        return jnp.where(which == 0, lm, out.indexer_kl)

    grad = jax.jit(jax.grad(losses))
    calls = {(name, dense): (i, dense) for i, name in enumerate(("lm", "kl")) for dense in (False, True)}
    out = {key: grad(trained(params), tokens(), which, dense) for key, (which, dense) in calls.items()}
    assert grad._cache_size() == 1, "the switches are traced"
    return out


def by_name(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(getattr(p, "key", p)) for p in path): np.asarray(leaf) for path, leaf in flat}


@pytest.mark.smoke
@pytest.mark.parametrize("dense", [False, True])
def test_the_indexer_learns_from_its_own_loss_only(gradients, dense):
    """Hidden state, query latent and compressor latent are detached; so is the attention that is the target."""
    lm, kl = by_name(gradients["lm", dense]), by_name(gradients["kl", dense])
    assert any(INDEXER in name for name in lm)
    for name in lm:
        if INDEXER in name:
            assert (lm[name] == 0).all(), f"{name} has a gradient from the language loss"
            assert (kl[name] != 0).any(), f"{name} has no gradient from the indexer loss"
        else:
            assert (kl[name] == 0).all(), f"{name} has a gradient from the indexer loss"
    assert all(np.isfinite(leaf).all() for tree in (lm, kl) for leaf in tree.values())


@pytest.mark.smoke
def test_every_other_parameter_learns_from_the_language_loss(gradients):
    lm = by_name(gradients["lm", False])
    silent = [name for name, leaf in lm.items() if INDEXER not in name and not (leaf != 0).any()]
    # The selection bias decides who is chosen and has no gradient.
    assert all(name.endswith("gate.bias") for name in silent), silent


def embedding_influence(cfg, params, ids, probe):
    """[T, T]: whether the logits at each position depend on the embedding of each token, by gradients."""
    table = params["embed"]["weight"]

    def total(rows, t):
        # Every token its own row, so that gradients are per position.
        mine = {**params, "embed": {"weight": rows}}
        out = steps.forward(mine, jnp.arange(ids.shape[1])[None], cfg)
        return jnp.sum(out.logits[0, t] * probe)

    rows = jnp.zeros_like(table).at[: ids.shape[1]].set(table[ids[0]])
    grads = jax.lax.map(lambda t: jax.grad(total)(rows, t)[: ids.shape[1]], jnp.arange(ids.shape[1]))
    return jnp.any(grads != 0, axis=-1)


@pytest.mark.smoke
def test_the_future_has_exactly_no_gradient(params):
    """B02, B01: rows are queries, columns tokens; any one above the diagonal is a leak, also through an open group."""
    probe = jnp.asarray(np.random.default_rng(0).normal(size=CFG.vocab_size), jnp.float32)
    seen = np.asarray(jax.jit(embedding_influence, static_argnums=0)(CFG, params, tokens(), probe))
    assert not np.triu(seen, k=1).any(), seen.astype(int)
    # The recent past, at least, must be seen: the test can fail.
    assert all(seen[t, s] for t in range(LENGTH) for s in range(max(0, t - 3), t + 1))


@pytest.mark.smoke
def test_the_past_is_not_changed_by_the_future(params):
    """B01: with another token 3 the outputs at 0..2 stay bit-identical, in the whole-sequence form."""
    forward = jax.jit(lambda ids: run(trained(params), params, ids, CFG).logits)
    ids = tokens()
    before = np.asarray(forward(ids))
    for position in (3, 4, LENGTH - 1):
        other = ids.at[0, position].set((ids[0, position] + 1) % CFG.vocab_size)
        after = np.asarray(forward(other))
        assert np.array_equal(before[0, :position], after[0, :position])
        assert not np.array_equal(before[0, position], after[0, position])


@pytest.mark.smoke
def test_rounding_passes_gradients_straight_through():
    """Rounding has derivative zero almost everywhere; without the rule these would be exactly zero."""
    params = running.parameters(QAT)
    loss = lambda p: jnp.sum(run(p, params, tokens(), QAT).logits[..., :5] ** 2)  # noqa: E731
    grads = by_name(jax.jit(jax.grad(loss))(trained(params)))
    for part in ("attn.wkv.weight", "attn.kv_norm.weight", "compressor.wkv.weight", "compressor.norm.weight"):
        names = [name for name in grads if name.endswith(part)]
        assert names and all((grads[name] != 0).any() and np.isfinite(grads[name]).all() for name in names), part


@pytest.mark.slow
def test_gradients_through_rounding_equal_the_unrounded_ones_at_equal_values():
    """With formats that change no value, rounding on and off give the same gradients."""
    exact = {"window_format": "fp32", "main_format": "fp32", "index_format": "fp32"}
    on, off = running.single(qat=True, **exact), running.single(**exact)
    params = running.parameters(off)
    grads = []
    for cfg in (on, off):
        loss = lambda p, cfg=cfg: jnp.sum(run(p, params, tokens(), cfg).logits[..., :5] ** 2)  # noqa: E731
        grads.append(by_name(jax.jit(jax.grad(loss))(trained(params))))
    for name, leaf in grads[0].items():
        np.testing.assert_allclose(leaf, grads[1][name], rtol=1e-5, atol=1e-6 * max(np.abs(leaf).max(), 1e-9))


@pytest.mark.slow
def test_own_and_served_targets_differ_only_where_layers_share_a_selection():
    """A second layer reuses the first's selection, so the mean of both is another target than the first's own."""
    forward = jax.jit(steps.forward, static_argnums=2, static_argnames="indexer_target")
    cfg = running.single(num_hidden_layers=2, compress_ratios=(2, 2))
    params = running.parameters(cfg)
    served, own = (forward(params, tokens(), cfg, indexer_target=target) for target in ("served", "own"))
    assert np.array_equal(served.logits, own.logits) and float(served.indexer_kl) != float(own.indexer_kl)
    assert float(served.indexer_kl) > 0 and float(own.indexer_kl) > 0
    single = running.single()
    params = running.parameters(single)
    both = [forward(params, tokens(), single, indexer_target=target).indexer_kl for target in ("served", "own")]
    assert both[0] == both[1]
    with pytest.raises(ValueError, match="indexer_target='mean'"):
        steps.forward(params, tokens(), single, indexer_target="mean")
