"""The benchmark's rows: decoding follows a real prefill, a peer gets the same tokens, and what limits is computed."""

import numpy as np
import pytest

from dsflash_jax import bench, steps
from dsflash_jax.analysis.roofline import Rates
from dsflash_jax.config import ModelConfig
from dsflash_jax.shipped import config_path
from tests.model import running

CFG = running.single(token_shift=True)  # as the shipped lab configurations: every chunk needs the token before it
RATES = Rates(flops=1e11, nbytes=1e10)
PLAN = bench.Plan(context=64, prefill=(16,), decode=(16, 40), peer_decode=(16,), decode_steps=3)
ROW = {"phase", "tokens", "first_call_s", "best_ms", "median_ms", "tokens_per_s"}
BOUNDS = {"gflops", "gbytes_per_s", "flop_bound_ms", "byte_bound_ms", "times_bound", "limited_by"}


@pytest.fixture
def machine(monkeypatch):
    """The parts that take long and say nothing about rows, replaced; prompts of 40 tokens need several chunks."""
    monkeypatch.setattr(bench, "machine_rates", lambda: RATES)
    monkeypatch.setattr(bench, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(bench, "compile_topology", dict)
    monkeypatch.setattr(bench, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(ModelConfig, "from_json", lambda source: CFG)


class StandIn:
    """A peer that notes what it was given."""

    name = "stand-in"

    def __init__(self):
        self.prefilled, self.decoded = [], []

    def prefill_seconds(self, prompt):
        self.prefilled.append(list(prompt))
        return 0.5

    def decode_seconds(self, prompt, then):
        self.decoded.append((list(prompt), list(then)))
        return [9.0, 0.25, 0.5, 0.25]


@pytest.mark.slow
def test_every_row_has_its_bounds_and_the_report_its_context(machine):
    report = bench.run_bench(plan=PLAN)
    assert [(row["phase"], row["tokens"]) for row in report["rows"]] == [
        ("prefill", 16), ("decode", 16), ("decode", 40),
    ]  # fmt: skip
    assert all(set(row) == ROW | BOUNDS and row["best_ms"] > 0 for row in report["rows"])
    assert {row["limited_by"] for row in report["rows"]} <= {"matrix products", "memory reads", "overhead"}
    assert (report["context_tokens"], report["context_of_the_config_file"]) == (64, CFG.max_position_embeddings)


def test_decoding_follows_a_real_prefill_of_random_tokens(machine, monkeypatch):
    seen = {}

    def watched(session, sequence, following, with_host):
        seen["before"], seen["following"] = session.tokens(sequence), list(following)
        pages = session.pool.pages(sequence)
        seen["written"] = [bool(np.asarray(session.cache.pages)[page].any()) for page in pages]
        seen["with_host"] = with_host
        return time_decode(session, sequence, following, with_host=with_host)

    time_decode = bench.time_decode
    monkeypatch.setattr(bench, "time_decode", watched)
    tokens = bench.random_tokens(CFG, 64)
    cfg = CFG.replace(max_position_embeddings=64)
    bench._decode_row(steps.init_params(cfg), cfg, tokens[:40], tokens[40:44], RATES)
    assert seen["with_host"], "a user's loop builds its steps"
    assert seen["before"] == tuple(tokens[:40]) and seen["following"] == tokens[40:44]
    assert seen["written"] == [True] * 5, "the pages of the prompt are still empty"
    assert len(set(tokens)) > 20, "one token over and over would read the same experts"


def test_a_peer_is_given_the_same_tokens(machine, monkeypatch):
    peer = StandIn()
    monkeypatch.setattr(bench, "load_peer", lambda *_: peer)
    report = bench.run_bench(peer="stand-in", plan=PLAN)
    tokens = bench.random_tokens(CFG, 64)
    assert peer.prefilled == [tokens[:16]] * 3
    assert peer.decoded == [(tokens[:16], tokens[16:20])]
    rows = {row["phase"]: row for row in report["rows"]}
    assert rows["prefill (stand-in)"]["best_ms"] == 500
    assert (rows["decode (stand-in)"]["first_call_s"], rows["decode (stand-in)"]["best_ms"]) == (9.0, 250)


def test_the_benchmarks_shape_is_the_reference_timings():
    cfg = ModelConfig.from_json(config_path("bench_base"))
    sizes = [int(np.prod(leaf.shape)) for _, leaf in bench.walk(steps.abstract_params(cfg))]
    assert round(sum(sizes) / 1e6, 1) == 26.9
    assert (cfg.sliding_window, cfg.index_topk, cfg.dtype) == (128, 128, "float32")


def test_the_topology_is_the_released_one():
    cfg = bench.released_topology()
    assert cfg.num_hidden_layers == 40 and cfg.kv_source_layer_ids == (2, 8, 14, 20)
