"""Cost measured on real caches: sizes agree with the layout, and refusals."""

import jax.numpy as jnp
import pytest

from dsflash_jax import steps
from dsflash_jax.analysis.cost import decode_seconds, measured_kv_bytes, time_decode
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.session import Session
from dsflash_jax.shipped import config_path
from tests.model import running

TINY = ModelConfig.from_json(config_path("tiny"))
WINDOW_ONLY = TINY.replace(
    compress_ratios=(0,) * 6, kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1
)


def test_measured_bytes_are_those_of_the_layout():
    layout = cache_layout(TINY)
    found = measured_kv_bytes(TINY, 16, 64)
    assert found["per_token"] == layout.page_bytes / TINY.page_size > 0
    assert found["fixed"] == layout.ring_bytes + layout.state_bytes
    pages = {"16": 2, "64": 8}
    assert found["sequence"] == {length: found["fixed"] + n * layout.page_bytes for length, n in pages.items()}


def test_a_model_without_a_global_branch_adds_no_bytes_per_token():
    found = measured_kv_bytes(WINDOW_ONLY, 16, 64)
    assert found["per_token"] == 0 and found["sequence"]["16"] == found["sequence"]["64"] == found["fixed"] > 0


@pytest.mark.parametrize(("short", "long"), [(16, 16), (64, 16), (0, 16), (12, 64), (16, 63)])
def test_lengths_that_would_mismeasure_are_refused(short, long):
    with pytest.raises(ValueError, match="must be ascending multiples of page_size=8"):
        measured_kv_bytes(TINY, short, long)


@pytest.mark.slow
def test_decode_is_timed_behind_the_context_and_the_warm_up():
    params = steps.init_params(TINY, 0)
    found = decode_seconds(params, TINY, range(1, 21), context=10, warmup=4)
    assert found["context"] == 10 and found["steps"] == 6
    assert 0 < found["p10"] <= found["median"] <= found["p90"]
    with pytest.raises(ValueError, match="context=10 of 14 tokens leaves none to time after warmup=4"):
        decode_seconds(params, TINY, range(1, 15), context=10, warmup=4)
    broken = {**params, "head": {"weight": jnp.full_like(params["head"]["weight"], jnp.nan)}}
    with pytest.raises(FloatingPointError, match="logits of position 19 are not finite"):
        decode_seconds(broken, TINY, range(1, 21), context=10, warmup=4)


@pytest.mark.parametrize("with_host", [True, False])
def test_the_timed_steps_are_the_decode_steps_of_the_sequence(with_host):
    """Timing changes nothing: the last logits are those of the whole prompt, and every token is known."""
    shifted = running.single(token_shift=True)
    params = steps.init_params(shifted, 0)
    sizes = {"num_pages": 4, "table_pages": 4, "prefill_rows": 4}
    timed, plain = Session(params, shifted, **sizes), Session(params, shifted, **sizes)
    timed.append({"a": [7, 3, 9]})
    seconds, logits = time_decode(timed, "a", [4, 8, 2], with_host=with_host)
    assert len(seconds) == 3 and min(seconds) > 0
    assert timed.tokens("a") == (7, 3, 9, 4, 8, 2)
    # One code of a cache that rounds the other way moves a logit by up to 1e-3; another token moves it by far more.
    assert jnp.abs(logits - plain.append({"a": [7, 3, 9, 4, 8, 2]})).max() < 1e-3
    plain.close("a")
    assert jnp.abs(logits - plain.append({"a": [7, 3, 9, 4, 8, 5]})).max() > 1e-2
