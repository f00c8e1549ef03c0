"""Runs the sharded steps on 8 virtual CPU devices and prints what was seen as JSON: a process of its own."""

import collections
import json
import re

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

from dsflash_jax import sharding, steps  # noqa: E402
from dsflash_jax.batch import Chunk, make_step  # noqa: E402
from dsflash_jax.cache.model_cache import ModelCache  # noqa: E402
from tests.model.running import parameters, prompt, shallow  # noqa: E402

CFG = shallow(n_routed_experts=8)
PAGES, SLOTS, TABLE = 16, 2, [3, 1, 5]
LENGTHS = (13, 9)  # of the two groups' prompts


def step_of(tokens, start, rows):
    before = tokens[start - 1] if start else -1
    chunk = Chunk(0, tokens[start : start + rows], start, TABLE, previous_token=before)
    return make_step([chunk], CFG, rows=16 if start == 0 else rows, seqs=1, pages=4)


def both(mesh, decoder):
    """Logits of prompt, one decoded token and a verified block with one accepted, on one device and on eight."""
    params = parameters(CFG)
    placed = sharding.shard_params(params, CFG, mesh)
    cache = sharding.empty_cache(CFG, mesh, PAGES, SLOTS, decoder=decoder)
    alone = [ModelCache.empty(CFG, PAGES, SLOTS, decoder=decoder) for _ in LENGTHS]
    tokens = [prompt(length + 6, seed) for seed, length in enumerate(LENGTHS)]
    gaps = {}

    def compare(name, ours, theirs):
        gaps[name] = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(ours, theirs, strict=True))

    first = [step_of(t, 0, n) for t, n in zip(tokens, LENGTHS, strict=True)]
    logits, cache = sharding.prefill(placed, cache, first, CFG, mesh, decoder=decoder)
    results = [steps.prefill(params, c, s, CFG, decoder=decoder) for c, s in zip(alone, first, strict=True)]
    compare("prefill", logits, [r[0] for r in results])
    alone = [r[1] for r in results]
    after = [step_of(t, n, 1) for t, n in zip(tokens, LENGTHS, strict=True)]
    logits, cache = sharding.prefill(placed, cache, after, CFG, mesh)
    results = [steps.decode(params, c, s, CFG) for c, s in zip(alone, after, strict=True)]
    compare("decode", logits, [r[0] for r in results])
    alone = [r[1] for r in results]
    drafted = [step_of(t, n + 1, 4) for t, n in zip(tokens, LENGTHS, strict=True)]
    logits, cache = sharding.verify(placed, cache, drafted, CFG, mesh)
    results = [steps.verify(params, c, s, CFG) for c, s in zip(alone, drafted, strict=True)]
    compare("verify", logits, [r[0] for r in results])
    cache = sharding.commit(cache, drafted, [[1], [3]])
    lengths = np.asarray(cache.length)[:, 0].tolist()
    bytes_differ = sum(
        int((np.asarray(cache.pages)[g] != np.asarray(r[1].pages)).sum()) for g, r in enumerate(results)
    )  # fmt: skip
    return gaps, lengths, bytes_differ, placed, cache


def collectives(mesh):
    """(operation, shape of its result) -> count, in the compiled prefill."""
    cache = sharding.empty_cache(CFG, mesh, PAGES, SLOTS)
    placed = sharding.shard_params(parameters(CFG), CFG, mesh)
    parts = [step_of(prompt(n), 0, n) for n in LENGTHS]
    text = sharding.lower(placed, cache, parts, CFG, mesh).compile().as_text()
    found = re.findall(r" = (\w+\[[\d,]*\])\S* (all-gather|all-to-all|collective-permute|all-reduce)\(", text)
    return {f"{operation} {shape}": n for (shape, operation), n in collections.Counter(found).items()}


def main():
    mesh = sharding.make_mesh(data=2, tensor=2, expert=2)
    gaps, lengths, bytes_differ, placed, cache = both(mesh, "all")
    replay_gaps, *_ = both(mesh, "replay")

    def shards(leaf):
        return [list(leaf.shape), list(leaf.addressable_shards[0].data.shape)]

    layer = placed["layers"][1]
    print(json.dumps({
        "devices": len(jax.devices()), "gaps": gaps, "replay_gaps": replay_gaps, "lengths": lengths,
        "bytes_differ": bytes_differ, "collectives": collectives(mesh),
        "shards": {
            "experts.w1": shards(layer["ffn"]["experts"]["w1"]["weight"]),
            "wq_b": shards(layer["attn"]["wq_b"]["weight"]),
            "wo_b": shards(layer["attn"]["wo_b"]["weight"]), "attn_sink": shards(layer["attn"]["attn_sink"]),
            "embed": shards(placed["embed"]["weight"]), "head": shards(placed["head"]["weight"]),
            "pages": shards(cache.pages), "ring": shards(cache.ring), "state": shards(cache.state),
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
