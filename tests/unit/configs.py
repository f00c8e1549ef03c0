"""Configurations, and parts to add to one, that the tests of configurations share."""

from pathlib import Path

from dsflash_jax.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelConfig.from_json(ROOT / "configs" / "tiny.json")
RELEASED = ModelConfig.from_json(ROOT / "configs" / "v41_flash.json")
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
DRAFTS = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_target_layer_ids": (3, 5), "dspark_markov_rank": 8,
    "dspark_noise_token_id": 9, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1,
}  # fmt: skip
ENGRAM = {
    "engram_layer_ids": (0, 2), "engram_num_embeddings": (420, 508), "engram_max_ngram_size": 3,
    "engram_vocab_size": 100, "engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": 64,
}  # fmt: skip
