"""Checkpoints: exact, whole or absent, and refused to a run they do not belong to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from dsflash_jax.training import checkpoints

PARAMS = {"layers": {0: {"w": jnp.arange(12.0).reshape(3, 4) / 7}, 1: {"w": jnp.ones((2, 2), jnp.bfloat16) / 3}}}
TREE = {
    "params": PARAMS, "opt_state": optax.adamw(1e-3).init(PARAMS), "step": jnp.int32(4),
    "average": jnp.float32(np.nan), "dense": jnp.bool_(True),
}
FACTS = {"config": {"ratios": (1, 2), "scale": 0.1, "rope": None}, "devices": 2}


def test_a_tree_comes_back_bit_for_bit(tmp_path):
    checkpoints.save(tmp_path, 4, TREE, FACTS)
    loaded = checkpoints.load(tmp_path, TREE, FACTS)
    assert loaded.step == 4
    assert jax.tree.structure(loaded.tree) == jax.tree.structure(TREE)
    for saved, back in zip(jax.tree.leaves(TREE), jax.tree.leaves(loaded.tree), strict=True):
        assert np.asarray(saved).dtype == back.dtype and np.asarray(saved).tobytes() == back.tobytes()


def test_shapes_alone_are_enough_to_load(tmp_path):
    checkpoints.save(tmp_path, 4, TREE, FACTS)
    shapes = jax.eval_shape(lambda: TREE)
    np.testing.assert_array_equal(
        checkpoints.load(tmp_path, shapes, FACTS).tree["params"]["layers"][0]["w"], PARAMS["layers"][0]["w"]
    )


def test_a_reader_without_the_structure_gets_nested_dicts(tmp_path):
    path = checkpoints.save(tmp_path, 4, TREE, FACTS)
    for folder in (tmp_path, path):
        loaded = checkpoints.load_plain(folder)
        assert loaded.step == 4 and loaded.facts["devices"] == 2
        assert set(loaded.tree["params"]["layers"]) == {0, 1}
        np.testing.assert_array_equal(loaded.tree["params"]["layers"][0]["w"], PARAMS["layers"][0]["w"])


def test_the_newest_is_loaded_and_old_ones_go(tmp_path):
    for step in (9, 10, 100):
        checkpoints.save(tmp_path, step, {**TREE, "step": jnp.int32(step)}, FACTS, keep=2)
    assert checkpoints.saved_steps(tmp_path) == [10, 100]
    assert checkpoints.load(tmp_path, TREE, FACTS).tree["step"] == 100
    assert checkpoints.load(tmp_path, TREE, FACTS, step=10).tree["step"] == 10
    with pytest.raises(FileNotFoundError, match=r"step=9 is not in .* which holds \[10, 100\]"):
        checkpoints.load(tmp_path, TREE, FACTS, step=9)


def test_an_interrupted_save_leaves_nothing_that_could_be_loaded(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, 1, TREE, FACTS)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", killed)  # all data written, not yet renamed
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tmp_path, 2, TREE, FACTS)
    assert len(list(tmp_path.iterdir())) > 1  # the leftover is there, under another name
    assert checkpoints.saved_steps(tmp_path) == [1]


def test_every_differing_field_is_named_with_both_values(tmp_path):
    checkpoints.save(tmp_path, 1, TREE, {**FACTS, "config_sha256": "aa"})
    here = {"config": {**FACTS["config"], "scale": 0.2, "rope": {"factor": 4}}, "devices": 2, "config_sha256": "bb"}
    with pytest.raises(ValueError) as refusal:
        checkpoints.load(tmp_path, TREE, here)
    assert "config.scale is 0.1 there, 0.2 here" in str(refusal.value)
    assert "config.rope is None there" in str(refusal.value)
    assert "sha256" not in str(refusal.value) and "ratios" not in str(refusal.value)


def test_a_hash_that_nothing_explains_is_named(tmp_path):
    checkpoints.save(tmp_path, 1, TREE, {"config_sha256": "aa"})
    with pytest.raises(ValueError, match="config_sha256 is aa there, bb here"):
        checkpoints.load(tmp_path, TREE, {"config_sha256": "bb"})


def test_a_folder_without_checkpoints_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        checkpoints.load_plain(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out='.*file/run' cannot be written \(.+\): choose another folder"):
        checkpoints.check_writable(tmp_path / "file" / "run")
    assert list(checkpoints.check_writable(tmp_path / "new" / "deep").iterdir()) == []
