"""The whole-sequence form: equal to prefill when it rounds alike, its masks as pictures, its switches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.modules import whole_sequence
from dsflash_jax.numerics.formats import straight_through
from dsflash_jax.roles import layer_roles
from tests.model import running
from tests.model.comparing import EQUAL_CODES_ATOL, FLIPPED_ATOL, Tally, count_flips, unrounded

forward = jax.jit(steps.forward, static_argnums=2, static_argnames="indexer_target")


def ids(length, seeds=(0,)):
    return jnp.asarray([running.prompt(length, seed) for seed in seeds])


def differences(cfg, params, length, seeds):
    """[B, T] largest logit difference between forward and a single prefill of each prompt."""
    whole = np.asarray(forward(params, ids(length, seeds), cfg).logits)
    step_cfg = cfg.replace(qat=False)  # rounding is not a choice there; one compiled step less
    sessions = [running.run_chunks(step_cfg, params, running.prompt(length, s), [length], row_bucket=16) for s in seeds]
    parts = [session.runs[0].logits for session in sessions]
    return np.abs(whole - np.array(parts)).max(axis=-1)


def test_forward_equals_prefill_when_it_rounds_alike():
    """Window rows unrounded, entries and keys in FP4: every position within float32 sums."""
    cfg = running.shallow(qat=True, window_format="fp32")
    assert differences(cfg, running.parameters(cfg), 16, (0, 1)).max() <= EQUAL_CODES_ATOL


def whole_rows(cfg, params, tokens, monkeypatch):
    """Whole-sequence form of prompts [B, T]: logits [B, T, V], {(kind, layer): values [B, rows, D] before rounding}."""
    values = []

    def recording(fmt, x):
        values.append(x)
        return straight_through(fmt, x)

    def run(params, tokens):
        values.clear()
        return steps.forward(params, tokens, cfg).logits, list(values)

    monkeypatch.setattr(whole_sequence, "straight_through", recording)
    logits, rounded = jax.jit(run)(params, tokens)
    names = []
    for role in layer_roles(cfg):
        names += [("window", role.layer)] + [(kind, role.layer) for kind in ("main", "index") if role.owns_kv]
    assert len(rounded) == len(names), "window, entries and keys of every layer, in this order"
    return np.asarray(logits), {name: np.asarray(x) for name, x in zip(names, rounded, strict=True)}


def all_stored(cfg, params, session):
    """Packed rows of a session's caches, window rows of every position: the ring keeps only the last ones."""
    stored = {key: rows for key, rows in session.stored(0).items() if key[0] != "open"}
    for member in cache_layout(cfg).ring:
        inputs = unrounded(cfg, params, session.runs[0], "window", member.layer)
        rows = np.asarray(member.format.pack(inputs))
        assert np.array_equal(rows[-cfg.sliding_window :], stored["window", member.layer])
        stored["window", member.layer] = rows
    return stored


def first_differing(rows, others, ratio):
    """The first token that a differing packed row can reach; infinity if none differs."""
    differing = np.flatnonzero((rows != others).any(axis=-1))
    return differing[0] * ratio + ratio - 1 if differing.size else np.inf


@pytest.mark.slow
def test_forward_equals_prefill_in_the_released_formats(monkeypatch):
    """The rule for two runs: what the caches hold is what the whole-sequence form rounds to, but for shown flips.

    Before the first flipped code, or everywhere if there is none, logits agree to 1e-5; behind it to 1e-3.
    """
    cfg, seeds, tally, untouched = running.tiny(qat=True), range(4), Tally(), 0
    params, layout = running.parameters(cfg), cache_layout(cfg)
    members = {(member.kind, member.layer): member for member in layout.members + layout.ring}
    logits, values = whole_rows(cfg, params, ids(16, seeds), monkeypatch)
    for b, seed in enumerate(seeds):
        # Rounding is not a choice in the step: one compiled step less.
        session = running.run_chunks(cfg.replace(qat=False), params, running.prompt(16, seed), [16], row_bucket=16)
        stored = all_stored(cfg, params, session)
        whole = {key: np.asarray(member.format.pack(values[key][b])) for key, member in members.items()}
        count_flips(cfg, whole, stored, lambda *key, b=b: values[key][b], tally)
        reach = min(first_differing(whole[key], stored[key], members[key].tokens_per_row) for key in members)
        apart = np.abs(logits[b] - np.array(session.runs[0].logits)).max(axis=-1)
        assert apart[np.arange(16) < reach].max(initial=0) <= EQUAL_CODES_ATOL and apart.max() <= FLIPPED_ATOL
        untouched += min(reach, 16)
    tally.check()
    assert tally.codes > 4 * 16 * 6 * 32 and untouched >= 32, "mostly equal codes, or little is compared at 1e-5"


def test_forward_without_rounding_is_another_function():
    """Otherwise the two tests above could not tell whether anything is rounded."""
    cfg = running.shallow(window_format="fp32")
    assert differences(cfg, running.parameters(cfg), 16, (0,)).max() > 10 * FLIPPED_ATOL


@pytest.mark.slow
def test_the_shifted_embedding_crosses_chunk_borders():
    """Lab's token shift: the first row of a chunk needs the token before it."""
    cfg = running.single(qat=True, window_format="fp32", token_shift=True)
    params = running.parameters(cfg)
    params = {**params, "token_shift": jnp.asarray(np.random.default_rng(0).normal(size=32), jnp.float32)}
    tokens = running.prompt(16, 0)
    session = running.run_chunks(cfg, params, tokens, [5, 1, 10], row_bucket=16)
    whole = np.asarray(forward(params, jnp.asarray([tokens]), cfg).logits)[0]
    np.testing.assert_allclose(np.array(session.runs[0].logits), whole, rtol=0, atol=EQUAL_CODES_ATOL)


def one_layer(ratio, window):
    """One layer that attends to everything its masks allow."""
    changes = {"compress_ratios": (ratio,), "sliding_window": window, "page_size": 8, "index_topk": 16}
    if not ratio:
        changes |= {"kv_source_layer_ids": (), "index_source_layer_ids": ()}
    return running.single(**changes)


@functools.partial(jax.jit, static_argnums=1)
def influence(params, cfg, use_global, dense):
    """[7, 7]: whether the output of each position depends on each token, by gradients."""
    length = 7
    rows = params["embed"]["weight"][:length]

    def total(rows, t):
        table = params["embed"]["weight"].at[:length].set(rows)
        mine = {**params, "embed": {"weight": table}}
        out = steps.forward(mine, jnp.arange(length)[None], cfg, use_global=use_global, dense=dense)
        return jnp.sum(out.logits[0, t, ::3])

    grads = jax.lax.map(lambda t: jax.grad(total)(rows, t), jnp.arange(length))
    return jnp.any(grads != 0, axis=-1).astype(int)


def picture(text):
    return [[int(c) for c in line] for line in text.split()]


BAND = picture("1000000 1100000 0110000 0011000 0001100 0000110 0000011")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ratio", "window", "expected"),
    [
        (0, 2, BAND),
        (1, 2, picture("1000000 1100000 1110000 1111000 1111100 1111110 1111111")),
        # Token 2 is seen by itself and, once token 3 has closed their pair, by all later ones.
        (2, 1, picture("1000000 1100000 1110000 1111000 1111100 1111110 1111111")),
        # Entry 0 appears at t = 3; at t = 6 token 4 has left the window and its group is still open.
        (4, 2, picture("1000000 1100000 0110000 1111000 1111100 1111110 1111011")),
    ],
)
def test_what_a_token_may_see(ratio, window, expected):
    """B01, B02, B49 as pictures: rows are queries, columns tokens; without the global branch the window is left."""
    cfg = one_layer(ratio, window)
    params = running.parameters(cfg)
    assert influence(params, cfg, True, True).tolist() == expected
    assert influence(params, cfg, False, True).tolist() == (BAND if window == 2 else np.eye(7, dtype=int).tolist())


def test_switches_are_traced():
    """One compilation serves warm-up, sparse training and the control; each switch does something."""
    cfg = running.shallow()
    params, tokens = running.parameters(cfg), ids(20)
    forward(params, tokens, cfg, dense=jnp.asarray(True), use_global=jnp.asarray(True))
    before = forward._cache_size()
    outs = {
        (dense, use): forward(params, tokens, cfg, dense=jnp.asarray(dense), use_global=jnp.asarray(use))
        for dense in (False, True)
        for use in (False, True)
    }
    assert forward._cache_size() == before
    assert np.array_equal(outs[False, False].logits, outs[True, False].logits), "no entries, nothing to select"
    for pair in (((False, True), (True, True)), ((False, True), (False, False))):
        assert np.abs(outs[pair[0]].logits - outs[pair[1]].logits).max() > 1e-3
    # 20 tokens, four selected of up to twenty entries: the first queries see all of theirs, so agree in both modes.
    apart = np.abs(outs[False, True].logits - outs[True, True].logits)[0].max(axis=-1)
    assert apart[:4].max() == 0 < apart[12:].min()


def test_coverage_is_the_share_of_attention_that_the_selection_holds():
    """All of it while only the selected are attended to; a part of it while all visible entries are."""
    cfg = running.shallow()
    params = running.parameters(cfg)
    use = {"use_global": jnp.asarray(True)}
    sparse, dense = (forward(params, ids(20), cfg, dense=jnp.asarray(d), **use) for d in (False, True))
    assert sparse.coverage.shape == (3,)
    np.testing.assert_allclose(sparse.coverage, 1.0, atol=1e-6)
    assert ((np.asarray(dense.coverage) > 0.05) & (np.asarray(dense.coverage) < 0.99)).all()


def test_the_indexer_loss_vanishes_where_nothing_is_to_choose():
    """One visible entry: both distributions are certain. Several: the loss is positive."""
    cfg = running.single(compress_ratios=(1,), page_size=8)
    params = running.parameters(cfg)
    assert float(forward(params, ids(1), cfg).indexer_kl) == pytest.approx(0, abs=1e-6)
    assert float(forward(params, ids(9), cfg).indexer_kl) > 1e-3
    window_only = one_layer(0, 2)
    out = forward(running.parameters(window_only), ids(5), window_only)
    assert float(out.indexer_kl) == 0 and out.coverage.shape == (0,)


@pytest.mark.parametrize("length", [1, 3])
def test_a_row_shorter_than_one_group_has_no_entry_and_equals_prefill(length):
    """Ratio 4: nothing is pooled before the fourth token; the window alone is attended to, in both forms."""
    cfg = running.single(compress_ratios=(4,), qat=True, window_format="fp32")
    assert differences(cfg, running.parameters(cfg), length, (0, 1)).max() <= EQUAL_CODES_ATOL


@pytest.mark.slow
def test_gradients_of_a_row_shorter_than_one_group_are_finite():
    cfg = running.single(compress_ratios=(4,), qat=True)
    params = running.parameters(cfg)

    @jax.jit
    def total(trained):
        out = steps.forward({**trained, "freqs": params["freqs"]}, ids(2, (0, 1)), cfg)
        return jnp.sum(out.logits**2) + out.indexer_kl + jnp.sum(out.coverage)

    gradients = jax.grad(total)({name: value for name, value in params.items() if name != "freqs"})
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
    assert np.abs(gradients["layers"][0]["attn"]["wkv"]["weight"]).max() > 0
    assert not np.any(gradients["layers"][0]["attn"]["compressor"]["wkv"]["weight"])


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((5,), {}, r"tokens of shape \(5,\) must be \[B, T\]"),
        ((1, 0), {}, "tokens has rows of 0, must be 1 to max_position_embeddings=128 long"),
        ((2, 129), {}, "tokens has rows of 129, must be 1 to max_position_embeddings=128 long"),
        ((1, 5), {"score_dtype": "bfloat16"}, "score_dtype='bfloat16' must be 'float32' in forward"),
        ((1, 5), {"stale_index_keys": True}, "stale_index_keys=True must be False in forward"),
    ],
)
def test_bad_input_of_the_whole_sequence_form_is_one_sentence(shape, changes, message):
    cfg = running.shallow(**changes)
    with pytest.raises(ValueError, match=message):
        steps.forward(running.parameters(running.shallow()), jnp.zeros(shape, jnp.int32), cfg)


@pytest.mark.slow
def test_sequences_of_a_batch_do_not_meet():
    cfg = running.shallow()
    params = running.parameters(cfg)
    use = {"dense": jnp.asarray(False), "use_global": jnp.asarray(True)}
    both = forward(params, ids(20, (0, 1)), cfg, **use).logits
    for i, seed in enumerate((0, 1)):
        alone = forward(params, ids(20, (seed,)), cfg, **use).logits[0]
        np.testing.assert_allclose(both[i], alone, rtol=0, atol=EQUAL_CODES_ATOL)
