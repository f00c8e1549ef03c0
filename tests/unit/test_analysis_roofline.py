"""What a step needs at least, counted by hand on small shapes, and which bound is named."""

import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.analysis.roofline import Rates, Work, limits, step_work
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.shipped import config_path
from dsflash_jax.weights.names import walk

TINY = ModelConfig.from_json(config_path("tiny"))  # window 4, top-k 4, pool of 3 blocks of 2, ratios 0 0 2 2 1 1
WINDOW_ONLY = TINY.replace(
    num_hidden_layers=1, compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=(),
    candidate_source_layer_id=-1,
)  # fmt: skip


def weights(cfg, kind) -> int:
    """Numbers in the embedding, the head, the routed experts, or all the rest."""
    sizes = {"embed": 0, "head": 0, "experts": 0, "rest": 0}
    for path, leaf in walk(steps.abstract_params(cfg)):
        sizes["experts" if "experts" in path else path[0] if path[0] in sizes else "rest"] += int(np.prod(leaf.shape))
    return sizes[kind]


def test_a_decoded_token_meets_the_chosen_experts_and_its_window():
    cfg, row = WINDOW_ONLY, cache_layout(WINDOW_ONLY).ring[0].row_bytes
    met = weights(cfg, "rest") + weights(cfg, "head") + weights(cfg, "experts") // 2  # 2 of 4 experts
    found = step_work(cfg, 1, start=9)
    assert found.flops == 2 * met + 4 * 4 * 4 * cfg.head_dim  # 4 keys, 4 heads
    assert found.nbytes == 4 * met + 4 * cfg.hidden_size + 4 * row
    assert step_work(cfg, 1, start=1).nbytes == found.nbytes - 2 * row  # two keys there are


def test_a_prefill_meets_every_expert_but_the_head_once():
    cfg = WINDOW_ONLY
    one, many = step_work(cfg, 1), step_work(cfg, 8)
    pairs = [min(n, 4) for n in range(1, 9)]
    per_token = 2 * (weights(cfg, "rest") + weights(cfg, "experts") // 2)
    assert many.flops - one.flops == 7 * per_token + 4 * 4 * cfg.head_dim * (sum(pairs) - 1)
    more_experts = 4 * weights(cfg, "experts") // 2  # all instead of the chosen half
    rows = 7 * (4 * cfg.hidden_size + cache_layout(cfg).ring[0].row_bytes)
    assert many.nbytes - one.nbytes == more_experts + rows


def test_a_longer_context_adds_the_index_keys_that_are_scanned():
    """Top-k picks and the candidate pool are full at both lengths: only the scans of the two sources grow."""
    layout = cache_layout(TINY)
    short, long = step_work(TINY, 1, start=39), step_work(TINY, 1, start=79)
    row = layout.member(2, "index").row_bytes
    assert long.nbytes - short.nbytes == (20 + 40) * row  # ratio 2 and ratio 1; layer 5 reads the pool's keys
    assert long.flops - short.flops == 2 * TINY.index_n_heads * TINY.index_head_dim * (20 + 40)


@pytest.mark.parametrize(
    ("seconds", "name", "times"),
    [(2.0, "matrix products", 1.0), (6.0, "matrix products", 3.0), (6.2, "overhead", 3.1)],
)
def test_the_larger_bound_is_named_until_the_time_is_far_above_it(seconds, name, times):
    found = limits(seconds, Work(flops=200, nbytes=50), Rates(flops=100, nbytes=50))
    assert (found["limited_by"], found["times_bound"]) == (name, times)
    assert (found["flop_bound_ms"], found["byte_bound_ms"]) == (2000, 1000)


def test_reading_is_named_where_it_takes_longer():
    assert limits(2.0, Work(flops=10, nbytes=100), Rates(flops=100, nbytes=50))["limited_by"] == "memory reads"
