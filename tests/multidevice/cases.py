"""The models that run on a mesh: the backbone alone, and one with every other part, its weights packed."""

from tests.model.running import remembering, shallow

PLAIN = shallow(n_routed_experts=8)
# Every share of a packed weight holds whole tiles of 32 x 32 on two devices, a table row two scales.
WHOLE = remembering(
    n_routed_experts=8, hidden_size=64, engram_head_dim=64, quant_method="fp8", expert_dtype="fp4",
    num_nextn_predict_layers=1, dspark_block_size=3, dspark_target_layer_ids=(2,), dspark_markov_rank=8,
    dspark_noise_token_id=9, dspark_n_routed_experts=4, dspark_num_experts_per_tok=1,
)  # fmt: skip
CASES = {"plain": PLAIN, "whole": WHOLE}
