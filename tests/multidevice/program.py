"""Runs a case's sharded steps on 8 virtual CPU devices and prints what was seen as JSON: a process of its own.

Usage: python -m tests.multidevice.program CASE FOLDER. Compiled programs go through FOLDER, so that reading the HLO of
a step and running it compile it once.
"""

import collections
import json
import re
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

from dsflash_jax import sharding, steps  # noqa: E402
from dsflash_jax.batch import Chunk, make_step  # noqa: E402
from dsflash_jax.cache.model_cache import ModelCache  # noqa: E402
from dsflash_jax.draft_step import Anchor, draft, make_draft_step  # noqa: E402
from dsflash_jax.sampling import Sampling  # noqa: E402
from dsflash_jax.speculative import settings_of  # noqa: E402
from tests.model.running import hash_of, parameters, prompt  # noqa: E402
from tests.multidevice.cases import CASES  # noqa: E402

PAGES, SLOTS, TABLE = 16, 2, [3, 1, 5]
LENGTHS = (13, 9)  # of the two groups' prompts


def step_of(cfg, tokens, start, rows):
    before = tokens[start - 1] if start else -1
    chunk = Chunk(0, tokens[start : start + rows], start, TABLE, previous_token=before, context=tokens[:start])
    return make_step([chunk], cfg, rows=16 if start == 0 else rows, seqs=1, pages=4, ngram_hash=hash_of(cfg))


def both(cfg, mesh, decoder):
    """Logits of prompt, one decoded token, a drafted block and a verified one, on one device and on eight.

    Where all of the prompt passes the decoder, also the collectives of each of these steps.
    """
    params = parameters(cfg)
    placed = sharding.shard_params(params, cfg, mesh)
    cache = sharding.empty_cache(cfg, mesh, PAGES, SLOTS, decoder=decoder)
    alone = [ModelCache.empty(cfg, PAGES, SLOTS, decoder=decoder) for _ in LENGTHS]
    tokens = [prompt(length + 6, seed) for seed, length in enumerate(LENGTHS)]
    gaps, moved = {}, {}

    def read(name, step, *arguments):
        if decoder == "all":
            moved[name] = collectives(sharding.lower(step, placed, cache, *arguments[:1], cfg, mesh, *arguments[1:]))

    def compare(name, ours, theirs):
        gaps[name] = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(ours, theirs, strict=True))

    first = [step_of(cfg, t, 0, n) for t, n in zip(tokens, LENGTHS, strict=True)]
    read("prefill", "prefill", first)
    logits, cache = sharding.prefill(placed, cache, first, cfg, mesh, decoder=decoder)
    results = [steps.prefill(params, c, s, cfg, decoder=decoder) for c, s in zip(alone, first, strict=True)]
    compare("prefill", logits, [r[0] for r in results])
    alone = [r[1] for r in results]
    after = [step_of(cfg, t, n, 1) for t, n in zip(tokens, LENGTHS, strict=True)]
    read("decode", "prefill", after)
    logits, cache = sharding.prefill(placed, cache, after, cfg, mesh)
    results = [steps.decode(params, c, s, cfg) for c, s in zip(alone, after, strict=True)]
    compare("decode", logits, [r[0] for r in results])
    alone = [r[1] for r in results]
    if cfg.num_nextn_predict_layers:
        anchors = [make_draft_step([Anchor(0, t[n + 1], n + 1)], cfg) for t, n in zip(tokens, LENGTHS, strict=True)]
        settings = [settings_of([Sampling(1.0)], [seed], cfg.vocab_size) for seed, _ in enumerate(LENGTHS)]
        read("draft", "draft", anchors, settings)
        ours = sharding.draft(placed, cache, anchors, cfg, mesh, settings)
        theirs = [draft(params, c, a, cfg, s) for c, a, s in zip(alone, anchors, settings, strict=True)]
        for field in ours._fields:
            compare(f"draft {field}", getattr(ours, field), [getattr(one, field) for one in theirs])
    drafted = [step_of(cfg, t, n + 1, 4) for t, n in zip(tokens, LENGTHS, strict=True)]
    read("verify", "verify", drafted)
    logits, cache = sharding.verify(placed, cache, drafted, cfg, mesh)
    results = [steps.verify(params, c, s, cfg) for c, s in zip(alone, drafted, strict=True)]
    compare("verify", logits, [r[0] for r in results])
    cache = sharding.commit(cache, drafted, [[1], [3]])
    lengths = np.asarray(cache.length)[:, 0].tolist()
    bytes_differ = sum(
        int((np.asarray(getattr(cache, pool))[g] != np.asarray(getattr(r[1], pool))).sum())
        for g, r in enumerate(results)
        for pool in ("pages", "ring")
    )
    return gaps, lengths, bytes_differ, moved, shards(placed, cache)


def collectives(lowered):
    """(operation, shape of a result of it) -> count, in the compiled step."""
    text = lowered.compile().as_text()
    # One that moves several arrays has a tuple of them as its result.
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    found = re.findall(rf" = (\([^)]*\)|\S+) ({kinds})(?:-start)?\(", text)
    each = [(shape, kind) for result, kind in found for shape in re.findall(r"\w+\[[\d,]*\]", result)]
    return {f"{kind} {shape}": n for (shape, kind), n in collections.Counter(each).items()}


def shards(placed, cache):
    """Dotted name -> shapes of the whole array and of the first device's share, for parameters and pools."""
    leaves = jax.tree_util.tree_leaves_with_path({**placed, "cache": vars(cache)})
    names = [".".join(str(getattr(key, "key", key)) for key in path) for path, _ in leaves]
    return {
        name: [list(leaf.shape), list(leaf.addressable_shards[0].data.shape)]
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def main(case, folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    cfg, mesh = CASES[case], sharding.make_mesh(data=2, tensor=2, expert=2)
    gaps, lengths, bytes_differ, moved, shares = both(cfg, mesh, "all")
    replay_gaps = both(cfg, mesh, "replay")[0] if case == "plain" else {}
    print(json.dumps({
        "devices": len(jax.devices()), "gaps": gaps, "replay_gaps": replay_gaps, "lengths": lengths,
        "bytes_differ": bytes_differ, "collectives": moved, "shards": shares,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
