"""AdamW: its schedule, what decays, what is trained at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.training.optimizer import decay_mask, learning_rate, make_optimizer, split_buffers
from dsflash_jax.training.settings import TrainSettings

PARAMS = {
    "embed": {"weight": jnp.ones((4, 2))},
    "layers": {0: {
        "attn": {"attn_sink": jnp.ones(2), "q_norm": {"weight": jnp.ones(2)}, "wo_a": jnp.ones((2, 2))},
        "hc_attn_fn": jnp.ones((2, 2)), "hc_attn_base": jnp.ones((2, 2)), "hc_attn_scale": jnp.ones(3),
        "ffn": {"gate": {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}},
    }},
    "token_shift": jnp.zeros(2),
}


def test_only_matrices_decay():
    mask = decay_mask(PARAMS)
    layer = mask["layers"][0]
    assert mask["embed"]["weight"] and layer["attn"]["wo_a"] and layer["hc_attn_fn"] and layer["ffn"]["gate"]["weight"]
    assert not any([
        layer["attn"]["attn_sink"], layer["attn"]["q_norm"]["weight"], layer["hc_attn_base"], layer["hc_attn_scale"],
        layer["ffn"]["gate"]["bias"], mask["token_shift"],
    ])


def test_decay_alone_shrinks_a_matrix_and_leaves_a_norm():
    optimizer = make_optimizer(TrainSettings(learning_rate=0.1, warmup_steps=1, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = optimizer.update(zero, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["embed"]["weight"], -0.1 * 0.5, rtol=1e-6)
    assert float(jnp.abs(updates["layers"][0]["attn"]["q_norm"]["weight"]).max()) == 0.0


def test_schedule_warms_up_peaks_and_ends_at_five_per_cent():
    settings = TrainSettings(steps=400, learning_rate=1e-2, warmup_steps=50)
    rate = learning_rate(settings)
    assert float(rate(0)) == pytest.approx(1e-2 / 50, rel=1e-5)
    assert float(rate(50)) == pytest.approx(1e-2, rel=1e-5)
    assert float(rate(225)) == pytest.approx(1e-2 * (0.05 + 0.95 * 0.5), rel=1e-3)
    assert float(rate(400)) == pytest.approx(5e-4, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_short_runs_have_a_schedule_too(steps):
    settings = TrainSettings(steps=steps)
    rates = [float(learning_rate(settings)(step)) for step in range(steps)]
    assert all(0 < rate <= settings.learning_rate * 1.0001 for rate in rates)


def test_a_large_gradient_is_clipped_to_the_norm():
    settings = TrainSettings(warmup_steps=1, weight_decay=0.0, clip_norm=1.0)
    optimizer = make_optimizer(settings)
    large = {"w": jnp.array([300.0, 400.0])}
    _, state = optimizer.update(large, optimizer.init(large), large)
    momentum = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2,))
    np.testing.assert_allclose(momentum, 0.1 * np.array([0.6, 0.8]), rtol=1e-5)  # (1 - b1) of the clipped gradient


def test_rope_tables_are_buffers():
    trained, buffers = split_buffers({**PARAMS, "freqs": {"swa": jnp.ones(3)}})
    assert set(trained) == set(PARAMS) and set(buffers) == {"freqs"}


@pytest.mark.parametrize(("change", "message"), [
    ({"steps": 0}, "steps=0 must be at least 1"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
    ({"learning_rate": float("nan")}, "learning_rate=nan must be positive"),
    ({"final_share": 1.5}, "final_share=1.5 must lie between 0 and 1"),
    ({"average_decay": 1.5}, "average_decay=1.5 must be at least 0 and below 1"),
    ({"beta2": 1.0}, "beta2=1.0 must be at least 0 and below 1"),
    ({"weight_decay": float("inf")}, "weight_decay=inf must be finite and not negative"),
    ({"seed": -1}, "seed=-1 must not be negative"),
])
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**change)
