"""The peer of the benchmark runs the same model: it is given our weights and must return our logits."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.peer import load_peer
from tests.model import running

# Seen: 1e-6. One stored code that another order of summation rounds the other way moves logits by up to about 1e-3.
LIMIT = 1e-3
PROMPT, THEN = running.prompt(29), running.prompt(6, seed=1)


def installed():
    """Skips, saying what is missing, where mlx-lm or its backend cannot be imported."""
    reason = "the peer is not installed (pip install 'dsflash-jax[peers]'): could not import"
    pytest.importorskip("mlx.core", reason=f"{reason} mlx.core", exc_type=ImportError)
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason=f"{reason} mlx_lm", exc_type=ImportError)


def ours(params, cfg):
    """[1 + len(THEN), V]: last logits of the prefilled prompt, then of each token decoded alone."""
    cache, pages = ModelCache.empty(cfg, 16, 1), list(range(running.PAGES))
    rows, position = [], 0
    for tokens in (PROMPT, *([t] for t in THEN)):
        step = make_step([Chunk(0, tokens, position, pages)], cfg, pages=running.PAGES)
        logits, cache = steps.prefill(params, cache, step, cfg)
        rows.append(np.asarray(logits[0]))
        position += len(tokens)
    return np.stack(rows)


def worst(cfg, seed):
    """Largest difference of any logit between ours and the peer's."""
    params = running.parameters(cfg, seed)
    return np.abs(load_peer("mlx-lm", cfg, params).logits(PROMPT, THEN) - ours(params, cfg)).max()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_peer_returns_our_logits(seed):
    installed()
    assert worst(running.tiny(), seed) < LIMIT


def test_the_peer_returns_our_logits_of_another_gate_without_yarn_or_clamp():
    installed()
    assert worst(running.shallow(scoring_func="sigmoid", swiglu_limit=0.0, rope_scaling=None), 0) < LIMIT


def test_a_changed_weight_reaches_the_peer():
    """The comparison can fail: sinks of one layer moved on one side only are seen."""
    installed()
    cfg = running.shallow()
    params = running.parameters(cfg)
    moved = jax.tree.map(lambda leaf: leaf, params)
    moved["layers"][1]["attn"]["attn_sink"] += 1.0
    difference = load_peer("mlx-lm", cfg, moved).logits(PROMPT) - load_peer("mlx-lm", cfg, params).logits(PROMPT)
    assert np.abs(difference).max() > 1e-2


def test_the_peer_times_every_step():
    installed()
    peer = load_peer("mlx-lm", running.shallow(), running.parameters(running.shallow()))
    assert peer.prefill_seconds(PROMPT) > 0
    seconds = peer.decode_seconds(PROMPT, THEN)
    assert len(seconds) == len(THEN) and min(seconds) > 0


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match="peer='llama' is not known, must be mlx-lm"):
        load_peer("llama", running.shallow(), {})


@pytest.mark.parametrize("missing", ["mlx.core", "mlx_lm.models"])
def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)  # makes its import fail, installed or not
    with pytest.raises(ValueError, match=r"pip install 'dsflash-jax\[peers\]'"):
        load_peer("mlx-lm", running.shallow(), {})


@pytest.mark.parametrize(("field", "value"), [("main_format", "bf16"), ("token_shift", True), ("dtype", "bfloat16")])
def test_a_shape_that_the_peer_cannot_run_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*peer='mlx-lm'"):
        load_peer("mlx-lm", running.shallow(**{field: value}), {})


def test_the_benchmark_imports_no_peer_until_asked():
    code = "import sys, dsflash_jax.bench; print(sorted({m.split('.')[0] for m in sys.modules} & {'mlx', 'mlx_lm'}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
