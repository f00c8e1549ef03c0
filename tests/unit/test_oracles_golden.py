"""The loop-level oracles against the released reference's numbers: every op of units_ops.npz, and whole models.

The whole-model cases check every prompt position and every decode step of A, C (both sequences), C4, D and D_img.
"""

import json
import pathlib

import numpy as np
import pytest

from tests.oracles import attention, compressor, engram, hyper_connections, indexer, model, moe, norms, rope

pytestmark = pytest.mark.smoke
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# One float32 rounding of a sum of terms near one; whatever exceeds it is another formula, not another order of sums.
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def ops():
    with np.load(GOLDEN / "units_ops.npz") as archive:
        return {name: archive[name] for name in archive.files}


def close(actual, expected, atol=ROUNDING):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def yarn_of(args):
    """(dim, length, base, yarn) from a golden `args` row; no YaRN where the original length is 0."""
    dim, length, original_length, base, factor, beta_fast, beta_slow = args.tolist()
    return int(dim), int(length), base, (factor, original_length, beta_fast, beta_slow) if original_length else None


@pytest.mark.parametrize("case", range(5))
def test_rope_tables(ops, case):
    cos, sin = rope.tables(*yarn_of(ops[f"freqs/{case}/args"]))
    close(cos, ops[f"freqs/{case}/cos"], 1.2e-7)
    close(sin, ops[f"freqs/{case}/sin"], 1.2e-7)


def test_rope_tables_far_from_the_start(ops):
    dim, _, base, yarn = yarn_of(ops["freqs/1/args"])
    cos, sin = rope.table_rows(ops["freqs/far/pos"], rope.frequencies(dim, base, yarn))
    close(cos, ops["freqs/far/cos"], 1.2e-7)
    close(sin, ops["freqs/far/sin"], 1.2e-7)


def test_rope_refuses_an_odd_width():
    with pytest.raises(ValueError, match="dim=7"):
        rope.frequencies(7, 10000.0)


@pytest.mark.parametrize("name", ["x3", "x4"])
@pytest.mark.parametrize(("direction", "inverse"), [("fwd", False), ("inv", True)])
def test_rotation(ops, name, direction, inverse):
    x, expected = ops[f"rope/{name}/in"], ops[f"rope/{name}/{direction}_pos10"]
    cos, sin = ops["freqs/2/cos"], ops["freqs/2/sin"]
    for t in range(x.shape[1]):
        close(rope.rotate(x[:, t], cos[10 + t], sin[10 + t], inverse), expected[:, t])


@pytest.mark.parametrize("eps", ["1e-20", "1e-06"])
def test_rms_norm(ops, eps):
    case = f"rmsnorm/f32/eps{eps}/"
    close(norms.rms_norm(ops[case + "x"], ops[case + "w"], float(eps)), ops[case + "y"])


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_hyper_connection_coefficients(ops, iterations):
    for token, mix in enumerate(ops["sinkhorn/mixes"][0]):
        pre, post, comb = hyper_connections.coefficients(
            mix, ops["sinkhorn/scale"], ops["sinkhorn/base"], 4, iterations, 1e-6
        )
        close(pre, ops[f"sinkhorn/iters{iterations}/pre"][0, token])
        close(post, ops[f"sinkhorn/iters{iterations}/post"][0, token])
        close(comb, ops[f"sinkhorn/iters{iterations}/comb"][0, token])


def test_hyper_connection_coefficients_of_two_streams(ops):
    for token, mix in enumerate(ops["sinkhorn/hc2/mixes"][0]):
        parts = hyper_connections.coefficients(mix, ops["sinkhorn/scale"], ops["sinkhorn/base"][:8], 2, 20, 1e-6)
        for name, part in zip(("pre", "post", "comb"), parts, strict=True):
            close(part, ops[f"sinkhorn/hc2/{name}"][0, token])


def test_hyper_connection_collapse_and_expand(ops):
    for t, stream in enumerate(ops["hc/x"][0]):
        close(hyper_connections.collapse(stream, ops["hc/pre_mix"][0, t]), ops["hc/collapsed"][0, t])
        new = hyper_connections.expand(stream, ops["hc/sub_out"][0, t], ops["hc/post"][0, t], ops["hc/comb"][0, t])
        close(new, ops["hc/expanded"][0, t])


@pytest.mark.parametrize("case", range(4))
def test_candidate_blocks(ops, case):
    block_size, topk_blocks = ops[f"cand/{case}/blk_k"].tolist()

    def mask(row, visible):
        blocks = indexer.candidate_blocks(row, int(visible), block_size, topk_blocks)
        return indexer.candidate_mask(blocks, len(row), block_size)

    for b in range(2):
        for t, visible in enumerate(ops[f"cand/{case}/lens"]):
            assert np.array_equal(mask(ops[f"cand/{case}/logits"][b, t], visible), ops[f"cand/{case}/mask"][b, t])
        decoded = mask(ops[f"cand/{case}/dec_logits"][b, 0], ops[f"cand/{case}/dec_len"])
        assert np.array_equal(decoded, ops[f"cand/{case}/dec_mask"][b, 0])


def test_candidate_blocks_pin_the_newest_and_drop_the_unscored():
    row = np.array([5, 4, np.nan, -np.inf, 3, 9, -7, 99], np.float32)
    assert indexer.candidate_blocks(row, 7, 2, 3).tolist() == [0, 2, 3]
    assert indexer.candidate_blocks(row, 7, 2, 9).tolist() == [0, 2, 3, -1, -1, -1, -1, -1, -1]
    assert indexer.candidate_blocks(row, 0, 2, 2).tolist() == [-1, -1]
    assert indexer.candidate_blocks(row, 7, 2, 1).tolist() == [3]


def test_top_k_breaks_ties_by_the_lowest_entry():
    assert indexer.top_k([1.0, 2.0, 2.0, 2.0, 1.0], 2).tolist() == [1, 2]
    assert indexer.top_k([-0.0, -0.0, 0.0, -1.0, 0.0], 2).tolist() == [0, 1]


def test_top_k_never_selects_nan_or_masked_entries():
    assert indexer.top_k([np.nan, -np.inf, 1.0, np.inf, -3.0], 4).tolist() == [2, 3, 4, -1]
    assert indexer.top_k([], 2).tolist() == [-1, -1]


def test_visible_counts():
    assert indexer.visible_counts([-1, 0, 1, 2, 3, 4, 5], 2).tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert indexer.visible_counts([-1, 0, 1, 2], 1).tolist() == [0, 1, 2, 3]


def test_index_scores_rectify_each_head_before_the_weights():
    q, key = np.array([[-2.0], [3.0]]), np.array([[1.0]])
    assert indexer.scores(q, key, [1.0, 1.0]).tolist() == [3.0]
    assert indexer.scores(q, key, [1.0, -1.0]).tolist() == [-3.0]


@pytest.mark.parametrize("b", range(2))
def test_sparse_attention(ops, b):
    q, kv, indices = ops["sparse_attn/q"][b], ops["sparse_attn/kv"][b], ops["sparse_attn/idx"][b]
    out = attention.sparse_attention(q, kv, indices, ops["sparse_attn/sink"], ops["sparse_attn/scale"])
    close(out, ops["sparse_attn/f32/o"][b])


def test_sparse_attention_sink_extremes():
    q, kv = np.zeros((1, 4, 2), np.float32), np.array([[3.0, 6.0]] * 3, np.float32)
    out = attention.sparse_attention(q, kv, [[0, 1, 2]], [0.0, 300.0, -np.inf, np.inf], 1.0)
    close(out[0], [[2.25, 4.5], [0.0, 0.0], [3.0, 6.0], [0.0, 0.0]])
    assert not attention.sparse_attention(q, kv, [[-1, -1, -1]], [0.0, 300.0, -np.inf, np.inf], 1.0).any()


@pytest.mark.parametrize("length", [1, 5, 8, 13])
def test_window_positions(ops, length):
    expected = ops[f"window_idx/prefill_T{length}_w8"][0]
    actual = np.stack([attention.window_positions(t, 8) for t in range(length)])[:, : min(length, 8)]
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("position", [1, 3, 7, 8, 9, 15, 16, 23])
def test_ring_slots(ops, position):
    assert attention.ring_slots(position, 8).tolist() == ops[f"window_idx/decode_p{position}_w8"][0, 0].tolist()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("top_k", "normalise"), [(1, True), (3, True), (3, False)])
def test_gate(ops, scoring, top_k, normalise):
    """The unit file does not record its temperature and scale; 0.7 and 1.5 are the only pair that fits all nine."""
    case = f"gate/{scoring}_k{top_k}_norm{int(normalise)}/"
    for t, x in enumerate(ops["gate/x"]):
        indices, weights = moe.gate(
            x,
            ops["gate/weight"],
            ops["gate/bias"],
            top_k,
            scoring,
            normalise=normalise,
            route_scale=1.5,
            temperature=0.7,
        )
        assert indices.tolist() == ops[case + "indices"][t].tolist()
        # Relative to the weight: softmax and softplus turn the rounding of a logit near 20 into that of a factor.
        np.testing.assert_allclose(weights, ops[case + "weights"][t], rtol=5e-6, atol=1e-12)


def test_expert(ops):
    w1, w2, w3 = (ops[f"expert/w{i}"] for i in (1, 2, 3))
    limit = float(ops["expert/limit"])
    for t, x in enumerate(ops["expert/x"]):
        close(moe.expert(x, w1, w2, w3, limit), ops["expert/y"][t])
        close(moe.expert(x, w1, w2, w3, limit, ops["expert/route_w"][t, 0]), ops["expert/y_weighted"][t])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("b", range(2))
def test_compressor_prefill_then_decode(ops, ratio, b):
    case = f"compressor/r{ratio}/"
    x, wkv, norm = ops[case + "x"][b], ops[case + "w/wkv.weight"], ops[case + "w/norm.weight"]
    wgate = ops.get(case + "w/wgate.weight")

    def compress(start, stop, kept):
        return compressor.compress(x[start:stop], start, kept, wkv, wgate, norm, ratio, 1e-6)

    latents, kept = compress(0, 11, [])
    assert [entry for entry, _ in latents] == list(range(11 // ratio))
    assert [position for position, _, _ in kept] == list(range(11 - 11 % ratio, 11))
    close(np.stack([latent for _, latent in latents]), ops[case + "prefill_T11"][b])

    decoded = {}
    for position in range(11, 17):
        latents, kept = compress(position, position + 1, kept)
        for _, latent in latents:
            decoded[position] = latent
    assert list(decoded) == ops[case + "decode_pos"].tolist()
    close(np.stack(list(decoded.values())), ops[case + "decode"][b])


def test_compressor_gate_is_per_channel():
    pooled = compressor.pool_group(np.array([[1, 10], [3, 20]]), np.array([[0, 2], [0, -2]]))
    close(pooled, [2.0, 10.179862])


def test_compressor_refuses_foreign_rows():
    with pytest.raises(ValueError, match="open group before 3 is"):
        compressor.compress(np.zeros((1, 2)), 3, [], np.eye(2), np.eye(2), np.ones(2), 2, 1e-6)


def golden_model(case, b):
    """(result of the oracle, golden trace, config) of sequence b of a case."""
    with np.load(GOLDEN / f"{case}.f32.npz") as archive:
        trace = {name: archive[name] for name in archive.files}
    with np.load(GOLDEN / json.loads(str(trace["meta_json"]))["weights"]) as archive:
        weights, config, freqs = model.from_golden(archive)
        rows = memory_rows(archive, trace, b)
    return model.run(weights, config, freqs, trace["input_ids"][b], ngram_rows=rows), trace, config


def memory_rows(weights, trace, b):
    """The recorded row numbers of all positions, which the oracle's own must equal; [] where none are read."""
    if "prefill/engram_hashes" not in trace:
        return None
    types = trace["token_types"][b] if "token_types" in trace else np.array([], int)
    dead = set(np.flatnonzero(types >= 0).tolist())
    constants = {name: weights[f"engram/{name}"] for name in ("token_map", "multipliers", "primes", "pad_id")}
    rows = engram.row_numbers(trace["input_ids"][b].tolist(), dead, *constants.values())
    recorded = np.concatenate([trace["prefill/engram_hashes"][b], trace["decode/engram_hashes"][:, b, 0]])
    assert np.array_equal(rows, recorded)
    return [[[]] * len(of_token) if t in dead else of_token for t, of_token in enumerate(rows)]


def expected_rows(trace, layer, name, b):
    """Golden values of all positions: prompt rows, then a row per decode step, padded to equal widths."""
    prompt = trace[f"L{layer}/prefill/{name}"]
    if name.startswith("gate_"):
        prompt = prompt.reshape(len(trace["input_ids"]), -1, prompt.shape[-1])
        return np.concatenate([prompt[b], trace[f"L{layer}/decode/{name}"][:, b]])
    decoded = trace[f"L{layer}/decode/{name}"][:, b, 0]
    prompt = prompt[b]
    if name in ("index_score", "candidates"):
        fill = False if name == "candidates" else -np.inf
        widths = [(0, 0), (0, decoded.shape[-1] - prompt.shape[-1])]
        prompt = np.pad(prompt, widths, constant_values=fill)
    return np.concatenate([prompt, decoded])


CASES = [("A", 0), ("C", 0), ("C", 1), ("C4", 0), ("D", 1), ("D_img", 0)]


@pytest.mark.parametrize(("case", "b"), CASES)
def test_model_equals_the_reference_at_every_position(case, b):
    result, trace, config = golden_model(case, b)
    close(result["logits"], np.concatenate([trace["prefill/logits_all"][b], trace["decode/logits"][:, b]]), 2e-4)
    for i, layer in enumerate(result["layers"]):
        for name in ("attn_in", "attn_out", "ffn_in", "ffn_out", "h_out", "pre_mix_out", "gate_weights"):
            close(layer[name], expected_rows(trace, i, name, b), 2e-4)
        assert np.array_equal(layer["gate_indices"], expected_rows(trace, i, "gate_indices", b))
        if f"L{i}/prefill/engram_out" in trace:
            close(layer["engram_out"], expected_rows(trace, i, "engram_out", b), 2e-4)
        if f"L{i}/prefill/compress_idxs" in trace:
            assert np.array_equal(layer["selections"], expected_rows(trace, i, "compress_idxs", b))
            check_index_scores(layer["index_scores"], expected_rows(trace, i, "index_score", b))
        if f"L{i}/prefill/candidates" in trace:
            masks = expected_rows(trace, i, "candidates", b)
            check_candidates(layer["candidates"], masks, config["candidate_block_size"])
        check_caches(layer, trace, i, b)


def check_index_scores(actual, expected):
    """At most one query's scores may carry an fp4 step of that query (of order 5e-3); A has one.

    That query component lies 6e-7 from a rounding boundary, so the order of a sum decides its code.
    """
    expected = np.where(np.isnan(expected), -np.inf, expected)  # right padding of the earlier decode steps
    assert np.array_equal(np.isneginf(actual), np.isneginf(expected))
    seen = np.isfinite(expected)
    worst = np.max(np.abs(np.where(seen, actual, 0) - np.where(seen, expected, 0)), axis=-1)
    stepped = worst > 1e-5
    assert stepped.sum() <= 1 and worst.max() < 2e-2


def check_candidates(blocks, expected, block_size):
    """Compared over each query's visible entries (ratio 1); what lies beyond them in a kept block means nothing."""
    for position, row in enumerate(blocks):
        mask = indexer.candidate_mask(row, position + 1, block_size)
        assert np.array_equal(mask, expected[position, : position + 1])


def check_caches(layer, trace, i, b):
    """Rows equal to the last bit, but for at most one value of a window one e4m3 step off: C layer 3 has such a tie."""
    ring = trace[f"L{i}/final/window_kv_cache"][b]
    length = len(layer["window_rows"])
    newest = range(max(0, length - len(ring)), length)
    actual, expected = layer["window_rows"][newest], ring[[position % len(ring) for position in newest]]
    assert np.count_nonzero(actual != expected) <= 1
    assert np.all(np.abs(actual - expected) <= np.maximum(np.abs(actual), np.abs(expected)) / 8)

    if f"L{i}/final/compress_kv_cache" not in trace:
        return
    np.testing.assert_array_equal(layer["main_rows"], trace[f"L{i}/final/compress_kv_cache"][b])
    np.testing.assert_array_equal(layer["index_rows"], trace[f"L{i}/final/index_k_cache"][b])
    for position, kv, gate in layer["open_group"]:
        slot = position % trace[f"L{i}/final/comp_kv_state"].shape[1]
        close(kv, trace[f"L{i}/final/comp_kv_state"][b, slot], 2e-5)
        close(gate, trace[f"L{i}/final/comp_score_state"][b, slot], 2e-5)
