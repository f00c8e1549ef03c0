"""The draft oracle against the reference's numbers, the acceptance oracle against exact sums, and both against ours."""

import itertools
import json
import pathlib
from fractions import Fraction

import jax
import numpy as np
import pytest

from dsflash_jax.sampling import Sampling
from dsflash_jax.speculative import CostTable, accept_block, accept_drafts, confidence_lengths, settings_of
from tests.oracles import draft, model, speculation

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def golden_drafts(case):
    """(what the oracle drafts from the recorded target states and next tokens, golden trace, config)."""
    with np.load(GOLDEN / f"{case}.f32.npz") as archive:
        trace = {name: archive[name] for name in archive.files}
    with np.load(GOLDEN / json.loads(str(trace["meta_json"]))["weights"]) as archive:
        weights, config, freqs = model.from_golden(archive)
    hidden = np.concatenate([trace["prefill/main_hidden"][0], trace["decode/main_hidden"][:, 0, 0]])
    prompt = trace["prefill/main_hidden"].shape[1]
    anchors = [(prompt + n + 1, int(token)) for n, token in enumerate(trace["decode/output_ids"][:, 0])]
    return draft.run(weights, config, freqs, hidden, anchors), trace, config


@pytest.mark.smoke
@pytest.mark.parametrize("case", ["E", "E_short", "F"])
def test_drafts_equal_the_reference_at_every_step(case):
    """E and F: full windows; E_short: windows of four committed positions and more."""
    found, trace, config = golden_drafts(case)
    for n, block in enumerate(found["blocks"]):
        assert block["tokens"].tolist() == trace["decode/spec_output_ids"][n, 0, 1:].tolist()
        np.testing.assert_allclose(block["logits"], trace["decode/spec_logits"][n, 0], atol=2e-4)
        np.testing.assert_allclose(block["confidence"], trace["decode/spec_confidence"][n, 0], atol=2e-4)
        for j, notes in enumerate(block["layers"]):
            for name, rows in notes.items():
                recorded = trace[f"L{config['n_layers'] + j}/decode/{name}"][n]
                recorded = recorded if name.startswith("gate_") else recorded[0]
                np.testing.assert_allclose(rows, recorded, atol=2e-4, err_msg=f"{n} {j} {name}")


@pytest.mark.parametrize("case", ["E", "E_short"])
def test_window_rows_equal_the_reference(case):
    found, trace, config = golden_drafts(case)
    for j, rows in enumerate(found["window_rows"]):
        ring = trace[f"L{config['n_layers'] + j}/final/window_kv_cache"][0]
        newest = range(max(0, len(rows) - len(ring)), len(rows))
        assert np.array_equal(rows[newest], ring[[position % len(ring) for position in newest]])


def test_target_states_are_means_over_the_streams_that_enter_the_target_layers():
    with np.load(GOLDEN / "E_short.f32.npz") as trace, np.load(GOLDEN / "E.weights.npz") as archive:
        found = model.run(*model.from_golden(archive), trace["input_ids"][0, :6])
        recorded = np.concatenate([trace["prefill/main_hidden"][0], trace["decode/main_hidden"][:3, 0, 0]])
    np.testing.assert_allclose(found["main_hidden"], recorded, atol=2e-5)


def test_every_row_is_corrected_by_the_token_before_and_row_two_of_three_is_used():
    """B81: row i of the base logits has its best at token 10 + i, and the Markov head adds nothing: 10, 11, 12."""
    head, states = np.zeros((32, 4), np.float32), np.eye(3, 4, dtype=np.float32)
    head[[10, 11, 12], [0, 1, 2]] = 1
    layer = {
        "norm.weight": np.ones(4, np.float32), "markov_head.embed.weight": np.ones((32, 2), np.float32),
        "markov_head.head.weight": np.zeros((32, 2), np.float32),
        "confidence_head.proj.weight": np.zeros((1, 6), np.float32),
    }  # fmt: skip
    tokens, _, _ = draft.heads(head, layer, states, 5, 1e-20)
    assert tokens.tolist() == [10, 11, 12]


def distributions(rng, rows, vocab, sharpness=2.0):
    logits = sharpness * rng.normal(size=(rows, vocab))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def test_the_rule_loses_nothing_of_the_targets_distribution():
    """B88: vocabulary of 3, blocks of 2, every draft and every outcome, in fractions: pairs come as the target's do."""
    rng = np.random.default_rng(3)

    def drawn():
        parts = [Fraction(int(n)) for n in rng.integers(0, 9, 3)]
        return [part / sum(parts) for part in parts] if sum(parts) else [Fraction(1, 3)] * 3

    target = {(): drawn()} | {(a,): drawn() for a in range(3)} | {(a, b): drawn() for a in range(3) for b in range(3)}
    drafter = {(): drawn()} | {(a,): drawn() for a in range(3)}
    found = dict.fromkeys(itertools.product(range(3), repeat=2), Fraction(0))
    for drafts in found:
        p, q = [target[drafts[:i]] for i in range(3)], [drafter[drafts[:i]] for i in range(2)]
        chance = q[0][drafts[0]] * q[1][drafts[1]]
        if not chance:
            continue
        passing = [min(Fraction(1), p[i][d] / q[i][d]) for i, d in enumerate(drafts)]
        outcomes = {0: 1 - passing[0], 1: passing[0] * (1 - passing[1]), 2: passing[0] * passing[1]}
        for count, share in outcomes.items():
            if not share:
                continue
            uniform = [Fraction(0) if i < count else passing[i] for i in range(2)]  # just fails where the test turns
            accepted, weights = speculation.accept(p, q, drafts, uniform)
            assert accepted == count and sum(weights) == 1
            emitted = list(drafts[:count])
            for token, weight in enumerate(weights):
                head = (*emitted, token)[:2]
                for second in range(3) if len(head) == 1 else [head[1]]:
                    rest = target[head[:1]][second] if len(head) == 1 else 1
                    found[head[0], second] += chance * share * weight * rest
    assert found == {(a, b): target[()][a] * target[a,][b] for a, b in found}


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_accepted_as_the_loop_does(seed):
    """Blocks of 0 to 6 of which any number was verified, zeros on either side, equal sides, 2 to 8 tokens."""
    rng, block, vocab = np.random.default_rng(seed), 6, 8
    p, q = distributions(rng, block + 1, vocab), distributions(rng, block, vocab, rng.choice([0.0, 2.0]))
    outside = np.arange(vocab) >= rng.integers(2, vocab + 1)
    for side in (p, q):
        side[(rng.random(side.shape) < 0.2) | outside] = 0
        side[np.sum(side, axis=-1) == 0, 0] = 1
        side /= side.sum(-1, keepdims=True)
    if seed % 3 == 0:
        p[: block - seed % 2] = q[: block - seed % 2]
    drafts = np.array([rng.choice(vocab, p=row / row.sum()) for row in q.astype(float)], np.int32)
    uniform, count = rng.random(block).astype(np.float32), seed % (block + 1)
    accepted, weights = speculation.accept(p[: count + 1], q[:count], drafts[:count], uniform[:count])
    ours, our_weights = jax.jit(accept_block)(p, q, drafts, count, uniform)
    assert int(ours) == accepted
    np.testing.assert_allclose(np.asarray(our_weights) / np.sum(our_weights), weights, atol=1e-6)


def test_greedy_blocks_are_accepted_as_the_loop_does():
    rng = np.random.default_rng(0)
    logits, drafted = rng.normal(size=(40, 4, 3)).astype(np.float32), rng.normal(size=(40, 3, 3)).astype(np.float32)
    drafts = drafted.argmax(-1).astype(np.int32)
    count = rng.integers(0, 4, 40).astype(np.int32)
    settings = settings_of([Sampling()] * 40, range(40), 3)
    found = jax.jit(accept_drafts)(logits, drafted, drafts, count, np.full(40, 7, np.int32), settings)
    for s in range(40):
        expected = speculation.matching(logits[s].argmax(-1), drafts[s, : count[s]])
        assert (int(found.count[s]), int(found.next_token[s])) == expected
    assert set(np.asarray(found.count).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(30))
def test_confidences_choose_the_lengths_that_the_loop_does(seed):
    """Costs of random shape or flat, limits below and above the block, repeated confidences for ties, zeros, ones.

    On flat costs a draft without any chance leaves the rate as it is: it does not grow, so the search ends there.
    """
    rng = np.random.default_rng(seed)
    sequences, block = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    confidence = np.round(rng.random((sequences, block)), 1) if seed % 2 else rng.random((sequences, block))
    confidence[rng.random(confidence.shape) < 0.1] = 0
    limits = rng.integers(0, block + 2, sequences).tolist()
    rows = sorted(set(rng.integers(1, 40, 5).tolist()))
    seconds = np.sort(rng.random(len(rows)) ** 2 + 0.5) if seed % 3 else np.ones(len(rows))
    costs = CostTable(tuple(rows), tuple(seconds.tolist()))
    expected = speculation.lengths(confidence, limits, costs.rate)
    assert confidence_lengths(confidence, limits, costs) == expected
