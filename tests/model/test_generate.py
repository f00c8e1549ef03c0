"""Generation: the tokens are the model's own, whatever the chunks; bad input is one sentence."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsflash_jax import generate, steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.generate import generate_tokens
from dsflash_jax.sampling import Sampling

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Two layers compile fast; window, pages and top-k are small enough that 24 tokens overflow all three.
CFG = ModelConfig.from_json(CONFIGS / "lab.json").replace(
    num_hidden_layers=2, compress_ratios=(2, 1), kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1),
    sliding_window=4, page_size=8, index_topk=4, max_position_embeddings=32, hc_sinkhorn_iters=1,
)  # fmt: skip
PROMPT = [ord(c) for c in "def f(x):\n ab"]  # 13 tokens
NEW = 11
ROWS = 4  # per prefill step: three whole chunks and one of a single token; every test uses this one compiled shape
WARM = Sampling(temperature=1.0, top_k=50, top_p=0.95)


@pytest.fixture(scope="module")
def params():
    made = steps.init_params(CFG, 1)
    return {**made, "token_shift": made["token_shift"] + 0.5}  # zero at the start of training, it would hide a mistake


def tokens(params, **options):
    return list(generate_tokens(params, CFG, PROMPT, NEW, **{"prefill_rows": ROWS, **options}))


@jax.jit  # with the flags traced: as constants they would make XLA fold whole masks
def whole_sequence(params, rows, dense, use_global):
    return steps.forward(params, rows, CFG.replace(qat=True), dense=dense, use_global=use_global).logits[0]


def test_greedy_tokens_are_the_best_of_the_whole_sequence(params):
    new = tokens(params)
    assert len(new) == NEW
    # The whole-sequence form has neither chunks, pages nor caches; qat makes it read rounded rows as the caches do.
    whole = whole_sequence(params, jnp.array([PROMPT + new]), False, True)
    assert jnp.argmax(whole[len(PROMPT) - 1 : -1], axis=-1).tolist() == new
    assert len(set(new)) > 3


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_chunks_of_the_prompt_never_change_a_token(params, sampling):
    assert tokens(params, sampling=sampling, prefill_rows=1) == tokens(params, sampling=sampling)


def test_the_seed_decides_what_is_drawn(params):
    first, again, other = (tokens(params, sampling=WARM, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert tokens(params, seed=0) == tokens(params, seed=1)  # greedy draws nothing


def test_a_second_text_compiles_nothing(params):
    tokens(params)
    compiled = steps._step._cache_size(), generate._draw._cache_size()
    list(generate_tokens(params, CFG, PROMPT[::-1] + [5, 6], 14, WARM, 3, ROWS))
    assert (steps._step._cache_size(), generate._draw._cache_size()) == compiled


def test_generation_may_fill_the_capacity_exactly(params):
    new = generate_tokens(params, CFG, PROMPT, CFG.max_position_embeddings - len(PROMPT), prefill_rows=ROWS)
    assert len(list(new)) == 19


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty, generation needs at least one token"),
        ([1, 192], {}, r"prompt: token id 192 is outside 0\.\.191"),
        ([-1], {}, r"prompt: token id -1 is outside 0\.\.191"),
        (PROMPT, {"max_new_tokens": 20}, "13 tokens and max_new_tokens=20 need 33 positions, max_position_emb"),
        ([1] * 32, {"max_new_tokens": 1}, "prompt of 32 tokens and max_new_tokens=1 need 33 positions"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        (PROMPT, {"prefill_rows": 0}, "prefill_rows=0 must be at least 1"),
        (PROMPT, {"seed": 2**64}, "seed=18446744073709551616 must be a whole number in 0"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(params, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate_tokens(params, CFG, prompt, **{"max_new_tokens": 4, **options})


def test_logits_that_are_not_finite_name_the_position(params):
    head = {"weight": params["head"]["weight"].at[3].set(jnp.nan)}
    with pytest.raises(FloatingPointError, match="logits of sequence 'prompt' at position 12 hold NaN"):
        tokens({**params, "head": head})


def test_a_top_k_beyond_the_vocabulary_keeps_every_token(params):
    every, huge = (Sampling(temperature=1.0, top_k=top_k) for top_k in (0, 3_000_000_000))
    assert tokens(params, sampling=huge) == tokens(params, sampling=every)


def test_generation_does_not_load_training():
    program = "import sys, dsflash_jax.generate\n"
    program += "assert not [m for m in sys.modules if m.startswith('dsflash_jax.training')]"
    subprocess.run([sys.executable, "-c", program], cwd=CONFIGS.parent, check=True, timeout=120)
