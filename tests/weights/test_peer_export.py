"""A float32 export is read by another library: mlx-lm loads it and continues a prompt as we do (skipped without it)."""

import json

import numpy as np
import pytest

from dsflash_jax import Session
from dsflash_jax.weights.export import export_checkpoint
from dsflash_jax.weights.load import load_checkpoint
from dsflash_jax.weights.shards import INDEX_NAME
from tests.model import running

pytestmark = pytest.mark.slow
PROMPT, NEW, LIMIT = running.prompt(29), 12, 1e-4


@pytest.fixture(scope="module")
def mlx():
    """(mlx.core, mlx-lm's loader); skips, saying what is missing, where they cannot be imported."""
    reason = "the peer is not installed (pip install 'dsflash-jax[peers]'): could not import"
    core = pytest.importorskip("mlx.core", reason=f"{reason} mlx.core", exc_type=ImportError)
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason=f"{reason} mlx_lm", exc_type=ImportError)
    return core, pytest.importorskip("mlx_lm.utils", reason=f"{reason} mlx_lm", exc_type=ImportError)


def theirs(mlx, folder):
    """(logits [1 + NEW, V], greedy tokens [NEW]) of the exported model: prompt, then token by token."""
    core, utils = mlx
    rows, tokens, ids = [], [], PROMPT
    with core.stream(core.cpu):
        model, _ = utils.load_model(folder, lazy=False, strict=True)
        cache = model.make_cache()
        for _ in range(NEW + 1):
            rows.append(np.array(model(core.array([ids]), cache=cache)[0, -1]))
            tokens.append(int(rows[-1].argmax()))
            ids = tokens[-1:]
    return np.stack(rows), tokens[:-1]


def ours(params, cfg):
    """As `theirs`."""
    session, rows, tokens, ids = Session(params, cfg, num_pages=16), [], [], PROMPT
    for _ in range(NEW + 1):
        rows.append(np.asarray(session.append({"a": ids})[0]))
        tokens.append(int(rows[-1].argmax()))
        ids = tokens[-1:]
    return np.stack(rows), tokens[:-1]


@pytest.mark.parametrize("seed", [0, 1])
def test_an_export_of_several_shards_loads_in_mlx_lm_with_our_logits_and_tokens(mlx, tmp_path, seed):
    cfg = running.tiny()
    params = running.parameters(cfg, seed)
    folder = export_checkpoint(params, cfg, tmp_path / "model", dtype="float32", shard_bytes=2**16)
    assert len(set(json.loads((folder / INDEX_NAME).read_text())["weight_map"].values())) > 3
    logits, tokens = theirs(mlx, folder)
    own, own_tokens = ours(params, cfg)
    assert tokens == own_tokens and len(set(tokens)) > 1
    assert np.abs(logits - own).max() < LIMIT < np.ptp(own)


def test_a_changed_weight_reaches_the_other_library(mlx, tmp_path):
    """The comparison can fail: a head moved in the file alone moves its logits."""
    cfg = running.shallow()
    params = running.parameters(cfg)
    plain = theirs(mlx, export_checkpoint(params, cfg, tmp_path / "plain", dtype="float32"))[0]
    changed = {**params, "norm": {"weight": params["norm"]["weight"] * 1.01}}
    moved = theirs(mlx, export_checkpoint(changed, cfg, tmp_path / "moved", dtype="float32"))[0]
    assert np.abs(moved[0] - plain[0]).max() > 10 * LIMIT


def test_what_mlx_lm_reads_is_read_here_too(tmp_path):
    """The exported folder needs no option to come back."""
    cfg = running.shallow()
    folder = export_checkpoint(running.parameters(cfg), cfg, tmp_path / "model", dtype="float32")
    assert load_checkpoint(folder).cfg == cfg
