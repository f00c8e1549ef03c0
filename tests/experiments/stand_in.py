"""A model of a few thousand parameters and a corpus of a few documents: a whole study then takes seconds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsflash_jax.training.corpus import build_corpus
from dsflash_jax.training.model import Model
from dsflash_jax.training.settings import TrainSettings
from experiments.cell import Effort, Tools
from experiments.compress_ratio import Budget

CORPUS = build_corpus((f"file{i}.py", f"def f{i}(x):\n    return x + {i}\n".encode() * 30) for i in range(40))
TRAINING = TrainSettings(steps=6, rows=4, context=64, pairs=4, learning_rate=1e-2)
EFFORT = Effort(recall_rows=8, text_rows=4, probe_rows=4, probe_every=2, decode_steps=2, unrounded=False)
BUDGET = Budget(schedules=(None, (2, 1)), seeds=(0, 1), training=TRAINING, effort=EFFORT)


class Output(NamedTuple):
    logits: jax.Array
    indexer_kl: jax.Array
    coverage: jax.Array


def init(cfg, seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "embed": {"weight": jax.random.normal(keys[0], (cfg.vocab_size, 8))},
        "layers": {0: {"mix": jax.random.normal(keys[1], (2, 8, 8)) / 3}},
        "freqs": {"position": jnp.arange(cfg.max_position_embeddings, dtype=jnp.float32)},
    }


def forward(params, tokens, cfg, *, dense, use_global, indexer_target="served"):
    """Mixes a token with the mean of all before it, if the model has a global branch and it is on."""
    x = params["embed"]["weight"][tokens]
    counts = params["freqs"]["position"][: tokens.shape[1], None] + 1.0
    mean = jnp.where(use_global & bool(cfg.kv_source_layer_ids), jnp.cumsum(x, axis=1) / counts, 0.0)
    hidden = jnp.tanh(x @ params["layers"][0]["mix"][0] + mean @ params["layers"][0]["mix"][1])
    layers = sum(ratio > 0 for ratio in cfg.compress_ratios)
    return Output(hidden @ params["embed"]["weight"].T, jnp.float32(0.0), jnp.full((layers,), 0.5))


def cost(params, cell, corpus):
    timing = {"context": 64, "steps": 2, "median": 1e-3, "p10": 1e-3, "p90": 1e-3}
    size = {"per_token": 52.5 if cell.cfg.kv_source_layer_ids else 0.0, "fixed": 100, "sequence": {"64": 1, "256": 2}}
    return {"kv_bytes": size, "decode_seconds": [timing]}


TOOLS = Tools(Model(init, forward), cost)


class Progress:
    """Remembers what a study reports."""

    def __init__(self, stop_at=None):
        self.calls, self._stop_at = [], stop_at

    def __call__(self, label, done, total, **metrics):
        self.calls.append((label, done, total, metrics))
        if self._stop_at == (label, done):
            raise KeyboardInterrupt
