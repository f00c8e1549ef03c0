"""Gate and experts: both ways to run the routed experts against the loop oracle, and the gate's corner cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.ops.moe import expert, gate_scores, route, routed_experts, routed_experts_all, swiglu
from tests.oracles import moe as oracle

pytestmark = pytest.mark.smoke
RNG = np.random.default_rng(4)
SCORING = ("sqrtsoftplus", "sigmoid", "softmax")
CHOSEN, ALL = jax.jit(routed_experts, static_argnums=6), jax.jit(routed_experts_all, static_argnums=6)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def stacked(count, width, inner):
    """w1, w2, w3 of `count` experts."""
    return normal(count, inner, width), normal(count, width, inner), normal(count, inner, width)


def by_loops(x, weights, experts, w1, w2, w3, limit):
    out = np.zeros(x.shape, np.float32)
    for t in range(len(x)):
        for e, w in sorted(zip(experts[t].tolist(), weights[t], strict=True)):
            out[t] += oracle.expert(x[t], w1[e], w2[e], w3[e], limit, w)
    return out


def check_experts(x, weights, experts, matrices, limit):
    expected = by_loops(x, weights, experts, *matrices, limit)
    scale = max(np.abs(expected).max(), 1.0)
    for run in (CHOSEN, ALL):
        ours = run(x, weights, experts, *matrices, limit)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-6 * scale)


SHAPES = [(1, 1, 1), (1, 2, 8), (3, 2, 4), (9, 3, 5), (17, 1, 2), (70, 2, 4), (150, 4, 4), (400, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_routed_experts(shape):
    """Pairs alone (decode) and blocks of 8 to 128 rows, ragged last blocks, every expert chosen and some not at all."""
    rows, k, count = shape
    experts = np.stack([RNG.permutation(count)[:k] for _ in range(rows)]).astype(np.int32)
    check_experts(normal(rows, 6), np.abs(normal(rows, k)), experts, stacked(count, 6, 5), 1.5)


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 130])
@pytest.mark.parametrize("chosen", [0, 6])
def test_every_row_may_go_to_one_expert(rows, chosen):
    """No capacity, so no row is dropped: the fullest possible expert and six empty ones."""
    experts = np.full((rows, 1), chosen, np.int32)
    check_experts(normal(rows, 6), np.abs(normal(rows, 1)), experts, stacked(7, 6, 5), 0.0)


def test_a_zero_weight_gives_zero():
    x, matrices = normal(4, 6), stacked(3, 6, 5)
    experts, weights = np.array([[0, 1]] * 4, np.int32), np.zeros((4, 2), np.float32)
    for run in (CHOSEN, ALL):
        assert (np.asarray(run(x, weights, experts, *matrices, 1.0)) == 0).all()


def test_both_ways_have_the_same_gradients():
    """7 rows of 2 among 7 experts are few enough to run pair by pair, which has a gradient."""
    x, weights, matrices = normal(7, 6), np.abs(normal(7, 2)), stacked(7, 6, 5)
    experts = jnp.asarray(np.stack([RNG.permutation(7)[:2] for _ in range(7)]), jnp.int32)
    grads = []
    for run in (routed_experts, routed_experts_all):
        loss = lambda x, w, m, run=run: jnp.sum(run(x, w, experts, *m, 1.5) ** 2)  # noqa: E731
        grads.append(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weights, matrices))
    for mine, yours in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(mine, yours, rtol=0, atol=1e-5 * np.abs(mine).max())


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("k", "normalise", "temp"), [(1, True, 1.0), (3, True, 0.7), (3, False, 1.0)])
def test_route(scoring, k, normalise, temp):
    x, weight, bias = normal(9, 6), normal(5, 6), normal(5)
    options = {"k": k, "scoring_func": scoring, "temp": temp, "normalise": normalise, "scale": 1.5}
    weights, experts = route(x, weight, bias, **options)
    for t in range(9):
        named = {"normalise": normalise, "route_scale": 1.5, "temperature": temp}
        chosen, expected = oracle.gate(x[t], weight, bias, k, scoring, **named)
        assert np.asarray(experts[t]).tolist() == chosen.tolist()
        np.testing.assert_allclose(weights[t], expected, rtol=2e-6)


def test_equal_scores_choose_the_lowest_expert():
    _, experts = route(np.zeros((1, 3), np.float32), np.ones((6, 3), np.float32), np.zeros(6, np.float32), **GATE)
    assert np.asarray(experts).tolist() == [[0, 1]]


GATE = {"k": 2, "scoring_func": "sqrtsoftplus", "temp": 1.0, "normalise": True, "scale": 1.0}


def test_the_bias_chooses_and_does_not_weigh():
    """B70: a huge bias on expert 5 puts it first; its weight is that of its unbiased score."""
    x, weight = normal(1, 4), normal(6, 4)
    weights, experts = route(x, weight, np.array([0, 0, 0, 0, 0, 1e6], np.float32), **{**GATE, "normalise": False})
    assert int(experts[0, 0]) == 5
    np.testing.assert_allclose(weights[0, 0], oracle.route_scores(weight @ x[0], "sqrtsoftplus")[5], rtol=1e-6)


def test_sqrtsoftplus_is_finite_from_end_to_end():
    """B68: value and gradient from -200 to 200; sqrt(softplus(-20)) = 4.54e-5, sqrt(softplus(100)) = 10."""
    logits = jnp.asarray(np.linspace(-200, 200, 161, dtype=np.float32))
    values = gate_scores(logits, "sqrtsoftplus")
    grads = jax.vmap(jax.grad(lambda v: gate_scores(v, "sqrtsoftplus")))(logits)
    assert np.isfinite(values).all() and np.isfinite(grads).all() and (np.asarray(grads) >= 0).all()
    np.testing.assert_allclose(gate_scores(jnp.array([-20.0, 100.0]), "sqrtsoftplus"), [4.5400e-5, 10.0], rtol=1e-4)


def test_unknown_scoring_is_refused():
    with pytest.raises(ValueError, match="scoring_func='relu'"):
        gate_scores(jnp.zeros(2), "relu")


def test_weights_of_vanishing_scores_are_zero_not_nan():
    """B69: the bias picks experts whose unbiased sigmoid scores underflow to 0; 0 / (0 + 1e-20) is 0."""
    x, weight = np.full((1, 1), 200.0, np.float32), -np.ones((4, 1), np.float32)
    weights, _ = route(x, weight, np.array([1, 0, 0, 2], np.float32), **{**GATE, "scoring_func": "sigmoid"})
    assert np.asarray(weights).tolist() == [[0.0, 0.0]]


def test_the_clamp_is_one_sided_on_the_gate():
    """B71 at limit 10: gate -50 is not clamped (-1e-20, not -4.5e-4), gate 50 gives 10, up -50 gives -10."""
    one = lambda up, gate: float(swiglu(jnp.float32(up), jnp.float32(gate), 10.0))  # noqa: E731
    assert -1e-19 < one(1, -50) < 0
    assert one(1, 50) == pytest.approx(10, rel=1e-4) and one(-50, 10) == pytest.approx(-100, rel=1e-3)
    assert one(3, 4) == pytest.approx(12 / (1 + np.exp(-4)), rel=1e-6)
    assert float(swiglu(jnp.float32(50), jnp.float32(50), 0.0)) == 2500.0
    slope = jax.grad(lambda v: swiglu(v[0], v[1], 10.0))
    assert np.asarray(slope(jnp.array([50.0, 2.0])))[0] == 0 and np.asarray(slope(jnp.array([2.0, 50.0])))[1] == 0
    assert np.asarray(slope(jnp.array([2.0, -50.0])))[0] != 0


@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_routed_and_shared_experts_are_clamped_alike(limit):
    """B71: the limit reaches the routed paths and the shared one."""
    x, (w1, w2, w3) = 3 * normal(4, 6), stacked(2, 6, 5)
    experts, weights = np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    shared = np.stack([oracle.expert(row, w1[0], w2[0], w3[0], limit) for row in x])
    outputs = [run(x, weights, experts, w1, w2, w3, limit) for run in (CHOSEN, ALL)]
    for ours in [expert(x, w1[0], w2[0], w3[0], limit), *outputs]:
        np.testing.assert_allclose(ours, shared, rtol=0, atol=1e-6 * np.abs(shared).max())


def test_the_router_works_in_float32():
    """B72: logits 1.000 and 1.002 are one number in bfloat16; the larger must win, and weights stay float32."""
    x = jnp.ones((1, 1), jnp.bfloat16)
    weights, experts = route(x, np.array([[1.0], [1.002]], np.float32), np.zeros(2, np.float32), **{**GATE, "k": 1})
    assert np.asarray(experts).tolist() == [[1]] and weights.dtype == jnp.float32


def test_the_route_weight_multiplies_before_the_down_projection():
    """In bfloat16 the place shows: hidden * weight is rounded, then projected; the other order gives other bits."""

    def bf16(value):
        return np.asarray(jnp.asarray(value, jnp.bfloat16), np.float64)

    x, (w1, w2, w3) = bf16(normal(50, 8)), (bf16(m) for m in (normal(8, 8), normal(8, 8), normal(8, 8)))
    gain = np.abs(normal(50)).astype(np.float32)
    ours = expert(jnp.asarray(x, jnp.bfloat16), *(jnp.asarray(m, jnp.bfloat16) for m in (w1, w2, w3)), 0.0, gain)
    assert ours.dtype == jnp.bfloat16
    gate, up = bf16(x @ w1.T), bf16(x @ w3.T)
    hidden = gate / (1 + np.exp(-gate)) * up
    weighted = bf16(bf16(hidden * gain[:, None]) @ w2.T)
    after = bf16(bf16(hidden) @ w2.T * gain[:, None])
    assert np.mean(np.asarray(ours, np.float64) != weighted) < 0.02
    assert np.mean(np.asarray(ours, np.float64) != after) > 0.1
