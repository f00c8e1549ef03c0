"""Acceptance keeps the target's distribution, and scheduling admits drafts by confidence."""

import jax
import numpy as np
import pytest

from dsflash_jax.sampling import Sampling
from dsflash_jax.speculative import (
    CostTable,
    accept_block,
    accept_drafts,
    confidence_lengths,
    distribution,
    draft_tokens,
    fixed_lengths,
    settings_of,
)

V, K, DRAWS = 4, 2, 20000


def enumerate_first(p, q):
    """Exact distribution of the first emitted token, over every draft and both outcomes of its test."""
    out = np.zeros_like(p)
    rest = np.maximum(p - q, 0)
    for draft, chance in enumerate(q):
        passed = min(1.0, p[draft] / chance) if chance else 0.0
        out[draft] += chance * passed
        if passed < 1:
            out += chance * (1 - passed) * rest / rest.sum()
    return out


def test_verification_follows_the_temperature_exactly():
    """B87: target logits [1, 0] at temperature 0.5 against a uniform draft give [.8808, .1192], by enumeration."""
    settings = settings_of([Sampling(0.5)], [0], 2)
    p = np.asarray(distribution(np.array([[1.0, 0.0]], np.float32), settings))[0]
    q = np.array([0.5, 0.5], np.float32)
    found = np.zeros(2)
    for draft in range(2):
        passed = min(1.0, p[draft] / q[draft])  # where the test turns, looked at from both sides
        for chance, uniform in ((passed, passed - 1e-5), (1 - passed, passed + 1e-5)):
            if chance > 0:
                uniform = np.array([uniform], np.float32)
                accepted, weights = accept_block(np.stack([p, p]), q[None], np.array([draft]), 1, uniform)
                assert bool(accepted) == (uniform[0] < passed)
                found += q[draft] * chance * (np.eye(2)[draft] if accepted else np.asarray(weights / weights.sum()))
    np.testing.assert_allclose(found, [0.8808, 0.1192], atol=1e-4)
    np.testing.assert_allclose(enumerate_first(p, q), [0.8808, 0.1192], atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5), Sampling(1.0, 3), Sampling(1.0, 0, 0.8)])
def test_emitted_pairs_follow_the_targets_distribution(sampling):
    """B87, B88, B89: chi-square of the first two emitted tokens, drafts really drawn, against exact enumeration."""
    draws = np.random.default_rng(1)
    target = draws.normal(size=(1 + V + V * V, V)).astype(np.float32) * 1.5  # by context: none, one token, two tokens
    drafter = draws.normal(size=(1 + V, V)).astype(np.float32)
    settings = settings_of([sampling] * DRAWS, list(range(DRAWS)), V)
    length = np.full(DRAWS, 5, np.int32)

    @jax.jit
    def run(settings):
        first = draft_tokens(jax.numpy.broadcast_to(drafter[0], (DRAWS, V)), settings, length + 1)
        q = jax.numpy.stack([jax.numpy.broadcast_to(drafter[0], (DRAWS, V)), jax.numpy.asarray(drafter)[1 + first]], 1)
        second = draft_tokens(q[:, 1], settings, length + 2)
        drafts = jax.numpy.stack([first, second], 1)
        table = jax.numpy.asarray(target)
        p = jax.numpy.stack(
            [jax.numpy.broadcast_to(target[0], (DRAWS, V)), table[1 + first], table[1 + V + first * V + second]], 1
        )
        count = jax.numpy.full(DRAWS, K)
        return drafts, accept_drafts(p, q, drafts, count, length, settings)

    drafts, found = jax.device_get(run(settings))
    first = np.where(found.count > 0, drafts[:, 0], found.next_token)
    exact = np.asarray(distribution(target[None, 0], settings_of([sampling], [0], V)))[0]
    check_chi_square(np.bincount(first, minlength=V), exact)
    for token in range(V):  # the second token, of those that this block emitted two of
        took = (found.count > 0) & (drafts[:, 0] == token)
        if took.sum() > 500:
            second = np.where(found.count > 1, drafts[:, 1], found.next_token)[took]
            exact = np.asarray(distribution(target[None, 1 + token], settings_of([sampling], [0], V)))[0]
            check_chi_square(np.bincount(second, minlength=V), exact)
    assert 0 < found.count.mean() < K


def check_chi_square(counts, exact):
    assert not counts[exact == 0].any()
    kept = exact > 0
    expected = exact[kept] * counts.sum()
    assert np.sum((counts[kept] - expected) ** 2 / expected) < 21.1  # 3 degrees of freedom, p = 1e-4


def test_a_sequence_draws_the_same_whatever_its_batch():
    logits = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    three = draft_tokens(logits, settings_of([Sampling(1.0)] * 3, [7, 8, 9], V), np.array([4, 5, 6]))
    one = draft_tokens(logits[1:2], settings_of([Sampling(1.0)], [8], V), np.array([5]))
    assert three[1] == one[0]


def test_a_draft_without_weight_never_becomes_infinite():
    """B86: p = 0.1 at 3 and 0.9 at 7, where the draft gave 3 nothing: a rejection leaves only what p exceeds."""
    p = np.zeros((2, 8), np.float32)
    p[:, 3], p[:, 7] = 0.1, 0.9
    q = np.full((1, 8), 0.0, np.float32)
    q[0, 0] = 1
    accepted, weights = accept_block(p, q, np.array([0]), 1, np.array([0.0], np.float32))
    assert accepted == 0 and np.isfinite(weights).all() and np.argmax(weights) == 7


def test_nothing_outside_the_vocabulary_is_emitted_even_from_nan():
    """B85: logits of NaN still give an id of the vocabulary; the loop refuses them by name before that."""
    nan = np.full((1, 3, 10), np.nan, np.float32)
    found = accept_drafts(
        nan, nan[:, :2], np.array([[1, 2]]), np.array([2]), np.array([4]), settings_of([Sampling(1.0)], [0], 10)
    )
    assert 0 <= found.next_token[0] < 10


def test_a_temperature_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"temperature=-1 must be 0 \(greedy\) or positive"):
        Sampling(-1)


def test_confidence_admits_while_expected_tokens_per_second_grow():
    flat, steep = CostTable((1, 64), (1.0, 1.0)), CostTable((1, 2, 3), (1.0, 1.6, 9.0))
    chances = np.array([[0.9, 0.9, 0.1], [0.2, 0.9, 0.9]])
    assert confidence_lengths(chances, [3, 2], flat) == [3, 2]
    assert confidence_lengths(chances[:1], [3], steep) == [1]  # 1.9 / 1.6 grows, 2.71 / 9 does not
    assert confidence_lengths(chances[1:], [3], steep) == [0]  # the search ends although later drafts look good
    assert fixed_lengths([3, 1], 2) == [2, 1]


def scheduled_first_tokens(seeds):
    """First tokens int[N] emitted by the former of N pairs of sequences, and the drafts verified of it.

    Its draft is verified exactly when the latter's first draft, of which that one's next confidence tells, is token 0.
    """
    target, drafted = np.log([0.7, 0.3]), np.log([0.5, 0.5])
    count = len(seeds)
    settings = settings_of([Sampling(temperature=1.0)] * 2 * count, np.reshape(seeds, -1).tolist(), 2)
    length = np.full(2 * count, 5, np.int32)
    logits = np.broadcast_to(drafted, (2 * count, 2, 2)).astype(np.float32)
    drafts = np.stack([np.asarray(draft_tokens(logits[:, i], settings, length + 1 + i)) for i in range(2)], axis=1)
    costs = CostTable((2, 3, 4, 5, 6), (0.9, 1.0, 1.25, 1.3, 5.0))
    chances = [[[0.5, 0.5], [0.9, 0.95 if first == 0 else 0.05]] for first in drafts[1::2, 0]]
    verified = np.array([confidence_lengths(np.array(pair), [2, 2], costs) for pair in chances], np.int32)
    targets = np.broadcast_to(target, (2 * count, 3, 2)).astype(np.float32)
    found = accept_drafts(targets, logits, drafts, verified.reshape(-1), length, settings)
    first = np.where(np.asarray(found.count) > 0, drafts[:, 0], np.asarray(found.next_token))
    return first[::2], verified[:, 0]


@pytest.mark.slow
def test_scheduled_lengths_keep_the_distribution_of_sequences_with_seeds_of_their_own():
    """B92: with one seed for both, a draft decides through the other's confidence whether it is verified itself."""
    first, verified = scheduled_first_tokens([[2 * n, 2 * n + 1] for n in range(2000)])
    assert 0.4 < np.mean(verified > 0) < 0.6
    assert abs(np.mean(first == 0) - 0.7) < 4 * np.sqrt(0.21 / 2000)
    shared, _ = scheduled_first_tokens([[n, n] for n in range(500)])
    assert abs(np.mean(shared == 0) - 0.7) > 0.05, "which is why a Speculator refuses it"
