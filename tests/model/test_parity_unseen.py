"""The judge and the model on goldens that nobody recorded: other widths, lengths and seeds, from the loop oracles."""

import numpy as np
import pytest

from dsflash_jax.parity import run_parity
from dsflash_jax.parity.rules import CACHES, EXACT, FLOATS, SELECTING, STATES
from tests.model import oracle_golden

pytestmark = pytest.mark.slow  # every configuration compiles its own steps

# Nothing of it is tied to the recorded files: widths, streams, window, ratios, top-k, batch and lengths differ.
BACKBONE = dict(
    vocab_size=61, dim=48, n_layers=5, n_heads=3, head_dim=96, q_lora_rank=40, rope_head_dim=12, o_groups=3,
    o_lora_rank=16, moe_inter_dim=24, n_routed_experts=5, n_activated_experts=3, n_shared_experts=1,
    score_func="sqrtsoftplus", gate_temp=0.8, norm_topk_prob=True, route_scale=2.0, swiglu_limit=3.0,
    window_size=5, compress_ratios=[0, 8, 8, 1, 1], kv_source_layers=[1, 3], index_source_layers=[1, 2, 3, 4],
    candidate_source_layer=3, candidate_topk_blocks=2, candidate_block_size=3, index_n_heads=5, index_head_dim=64,
    index_topk=3, max_seq_len=48, rope_theta=5000.0, compress_rope_theta=90000.0, original_seq_len=0,
    rope_factor=4, beta_fast=32, beta_slow=1, norm_eps=1e-12, hc_mult=2, hc_sinkhorn_iters=7, hc_eps=1e-5,
)  # fmt: skip
# N-grams of up to four tokens, two scales per row, in a layer that selects and in a target layer of the drafts.
MEMORY = dict(
    engram_layer_ids=[0, 2], engram_num_embeddings=[204, 358], engram_max_ngram_size=4, engram_vocab_size=20,
    engram_n_heads=2, engram_head_dim=64, engram_pad_id=3, engram_compressed_vocab_size=20,
)  # fmt: skip
# Three draft layers, blocks of four behind windows of five, targets that are no neighbours.
DRAFTS = dict(
    n_mtp_layers=3, dspark_block_size=4, dspark_target_layer_ids=[0, 2, 4], dspark_markov_rank=6,
    dspark_noise_token_id=11, dspark_n_routed_experts=3, dspark_n_activated_experts=2,
)  # fmt: skip
OTHER = BACKBONE | MEMORY | DRAFTS
# As for the recorded files, a seed is good if no cached value lies so near a rounding boundary that the order of a sum
# decides: of 0 to 7, four are at every length tried. With seed 0 one value of layer 2's window falls the other way.
CLEAR_SEED = 3
# The released pattern with everything between its layers cut out: four owners, three of equal ratio in one page, layers
# that reuse a selection on both sides, two that read the pool of the last owner, and one draft layer.
PATTERN = BACKBONE | dict(
    dim=32, n_layers=10, head_dim=32, q_lora_rank=32, rope_head_dim=8, index_n_heads=4, index_head_dim=32,
    window_size=4, compress_ratios=[0, 2, 2, 2, 2, 1, 1, 1, 1, 1], kv_source_layers=[1, 3, 4, 5],
    index_source_layers=[1, 3, 4, 5, 6, 8], candidate_source_layer=5, candidate_topk_blocks=3, candidate_block_size=4,
    index_topk=6, rope_theta=10000.0, compress_rope_theta=160000.0, original_seq_len=16, max_seq_len=64,
    norm_eps=1e-20, hc_mult=4, n_mtp_layers=1, dspark_block_size=2, dspark_target_layer_ids=[8],
    dspark_markov_rank=5, dspark_noise_token_id=0, dspark_n_routed_experts=4, dspark_n_activated_experts=3,
)  # fmt: skip
# Packed weights of other widths than recorded: 5 experts, 3 heads, matrices of 2 to 6 blocks each way.
PACKED = PATTERN | dict(
    dim=96, n_layers=3, n_heads=3, head_dim=64, q_lora_rank=64, moe_inter_dim=64, o_lora_rank=32,
    compress_ratios=[0, 2, 1], kv_source_layers=[1, 2], index_source_layers=[1, 2], candidate_source_layer=2,
    dspark_target_layer_ids=[0, 2], dtype="fp8", expert_dtype="fp4",
)  # fmt: skip


def check_oracle_golden(folder, config, prompt, decoded, batch, seed=0):
    """(the row of a golden written by the loop oracles, its arrays); fails with the arrays that differ."""
    oracle_golden.write(folder, "other", config, prompt=prompt, decoded=decoded, batch=batch, seed=seed)
    report = run_parity(folder)
    (row,) = report["rows"]
    assert row["status"] == "pass" and report["passed"], row["detail"]
    return row, dict(np.load(folder / "other.f32.npz"))


def test_models_of_other_sizes_and_lengths_are_judged(tmp_path):
    """Entries are left out in every layer, also at ratio 8; the file holds every kind of array that has a rule."""
    row, files = check_oracle_golden(tmp_path, OTHER, prompt=31, decoded=4, batch=2, seed=CLEAR_SEED)
    assert row["arrays"] > 200
    kinds = {key.split("/")[-1] for key in files}
    assert kinds >= FLOATS | SELECTING | EXACT | set(CACHES) | STATES | {"topk_idxs"}
    assert {"L0/decode/engram_out", "L2/prefill/engram_out"} <= set(files)
    assert files["L7/decode/attn_out"].shape == (4, 2, 4, 48) and files["prefill/main_hidden"].shape == (2, 31, 144)


def test_short_prompts_record_scores_only_from_the_step_that_has_an_entry(tmp_path):
    """Prompt 3 at ratio 8: no entry before the fifth decode step, and drafts behind a window that still fills.

    Runs the compiled steps of the test above.
    """
    _, files = check_oracle_golden(tmp_path, OTHER, prompt=3, decoded=7, batch=2, seed=CLEAR_SEED)
    assert files["L1/decode/index_score@steps"].tolist() == [4, 5, 6]
    assert np.sum(files["L5/decode/topk_idxs"][:, 0, 0] >= 0, axis=-1).tolist() == [8, 9, 9, 9, 9, 9, 9]


def test_the_released_pattern_of_owners_and_readers_is_judged(tmp_path):
    row, _ = check_oracle_golden(tmp_path, PATTERN, prompt=43, decoded=5, batch=2)
    assert row["arrays"] > 400


def test_packed_weights_of_other_widths_are_judged(tmp_path):
    check_oracle_golden(tmp_path, PACKED, prompt=13, decoded=3, batch=1)
    weights = np.load(tmp_path / "other.weights.npz")
    assert weights["w/layers.0.attn.wkv.weight"].dtype == np.uint8
    assert weights["w/layers.0.attn.wkv.scale"].shape == (2, 3)
