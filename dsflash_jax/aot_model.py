"""Compiles a whole decode step and a whole prefill chunk for a GPU that is not there, and reports what came out.

    python -m dsflash_jax.aot_model configs/v41_flash.json --arch sm_90 --out aot/model_sm_90.json

Parameters and caches are shapes only. Needs what `python -m pallas_kernels.aot` needs. One process per step: a compiler
that aborts ends that step only. Exits with 1 where a step does not compile or copies an arena.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import decoder_start, layer_roles
from dsflash_jax.shipped import config_path

STEPS = ("decode", "prefill")
COMPILE_SECONDS = 3600  # a step that takes longer counts as broken
ARENAS = ("pages", "ring", "state")
MEANING = {
    "arguments_bytes": "parameters that the step reads, caches and the step's own arrays, as the program takes them",
    "outputs_bytes": "logits and caches", "aliased_bytes": "of the outputs, what lies in the buffer of an argument",
    "temp_bytes": "what the program needs beside arguments and outputs, at its peak",
    "parameters_bytes": "all parameters without n-gram tables, those that no step reads included",
    "aliased": "the compiled program's header names the arena in input_output_alias",
    "copies": "launched instructions that write an array of the arena's bytes anew (none: it is updated in place)",
    "kernels": "places in the program that start work on the device: fusions, products, sorts, Pallas kernels, copies",
    "launches": "the same, each times the rounds of its loops; a loop of unknown length counts as one round, of the "
    "branches of a conditional the one with most launches counts",
    "loops": "while loops; open_loops: those whose length the compiler does not know",
    "roles": "kernels and launches per layer of a role: [least, median, most] of its layers",
    "elsewhere": "kernels outside all layers: embedding, head, step indices, what the compiler names no layer for",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes of the steps. Decode: `batch` sequences of `context` tokens, one new token each. Prefill: `rows` tokens
    of one sequence that end at `context`. Both on one cache of `pages` pages and `slots` slots."""

    context: int = 131_072
    batch: int = 32
    rows: int = 2_048
    pages: int = 65_536
    slots: int = 48


def first_layers(cfg: ModelConfig, count: int) -> ModelConfig:
    """The first `count` layers of `cfg`, without draft layers. Raises ValueError unless 1 <= count <= its layers."""
    if not 1 <= count <= cfg.num_hidden_layers:
        raise ValueError(f"layers={count} must lie in 1..num_hidden_layers={cfg.num_hidden_layers}.")
    if count == cfg.num_hidden_layers:
        return cfg
    kept = [n for n, layer in enumerate(cfg.engram_layer_ids) if layer < count]
    pool = cfg.candidate_source_layer_id < count
    return cfg.without_drafts().replace(
        num_hidden_layers=count,
        compress_ratios=cfg.compress_ratios[:count],
        kv_source_layer_ids=tuple(n for n in cfg.kv_source_layer_ids if n < count),
        index_source_layer_ids=tuple(n for n in cfg.index_source_layer_ids if n < count),
        candidate_source_layer_id=cfg.candidate_source_layer_id if pool else -1,
        candidate_topk_blocks=cfg.candidate_topk_blocks if pool else 0,
        candidate_block_size=cfg.candidate_block_size if pool else 0,
        engram_layer_ids=tuple(cfg.engram_layer_ids[n] for n in kept),
        engram_num_embeddings=tuple(cfg.engram_num_embeddings[n] for n in kept),
    )


def reduced(cfg: ModelConfig, layers: int | None, experts: int | None) -> tuple[ModelConfig, list[str]]:
    """(configuration to compile, what it leaves out, a sentence each). Raises ValueError for impossible cuts."""
    said = []
    if layers is not None and layers != cfg.num_hidden_layers:
        said.append(f"{layers} of {cfg.num_hidden_layers} layers, without draft layers.")
        cfg = first_layers(cfg, layers)
    if experts is not None and experts != cfg.n_routed_experts:
        if not cfg.num_experts_per_tok <= experts <= cfg.n_routed_experts:
            rule = f"must lie in num_experts_per_tok={cfg.num_experts_per_tok}..n_routed_experts={cfg.n_routed_experts}"
            raise ValueError(f"experts={experts} {rule}.")
        said.append(f"{experts} of {cfg.n_routed_experts} routed experts per layer.")
        cfg = cfg.replace(n_routed_experts=experts)
    if cfg.engram_layer_ids:
        said.append("n-gram tables stay on the host: a step brings the rows that it reads.")
    return cfg, said


def abstract_inputs(cfg: ModelConfig, plan: Plan, step: str) -> tuple[Any, Any, Any]:
    """(parameters, cache, step) of `steps.lower_step` as shapes; n-gram tables stay on the host."""
    import jax

    from dsflash_jax import steps
    from dsflash_jax.cache.model_cache import ModelCache
    from dsflash_jax.config_rules import QUANT_BLOCK
    from dsflash_jax.types import NgramRows

    params = steps.abstract_params(cfg)
    for layer in cfg.engram_layer_ids:
        del params["layers"][layer]["engram"]["embed"]
    info = _step_of(cfg, plan, step)
    if info.ngrams is not None:
        index = info.ngrams.index
        row_bytes = cfg.engram_head_dim + cfg.engram_head_dim // QUANT_BLOCK
        fetched = (index.shape[1], index.shape[0] * index.shape[2], row_bytes)
        info = dataclasses.replace(info, ngrams=NgramRows(index, jax.ShapeDtypeStruct(fetched, "uint8")))
    cache = ModelCache.abstract(cfg, plan.pages, plan.slots)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, cache, info))


def _step_of(cfg: ModelConfig, plan: Plan, step: str) -> Any:
    from dsflash_jax.batch import Chunk, make_step
    from dsflash_jax.cache.layout import pages_for
    from dsflash_jax.ops.ngram_hash import stand_in_hash

    rows, sequences = (1, plan.batch) if step == "decode" else (plan.rows, 1)
    each, start = pages_for(cfg, plan.context), plan.context - rows
    chunks = [
        Chunk(
            s, [0] * rows, start, range(s * each, (s + 1) * each), previous_token=0,
            context=[0] * (cfg.engram_max_ngram_size - 1),
        )
        for s in range(sequences)
    ]  # fmt: skip
    ngram_hash = stand_in_hash(cfg) if cfg.engram_layer_ids else None
    return make_step(chunks, cfg, rows=rows * sequences, seqs=sequences, pages=each, ngram_hash=ngram_hash)


def compile_step(cfg: ModelConfig, plan: Plan, step: str, arch: str, keep: Path | None = None) -> dict[str, Any]:
    """The report of one step, compiled for `arch`, see `MEANING`. keep: where to write the compiled program's text."""
    import jax

    from dsflash_jax import steps
    from dsflash_jax.weights.names import walk
    from pallas_kernels.aot.compile import compiling_for
    from pallas_kernels.common.devices import device_for

    params, cache, info = abstract_inputs(cfg, plan, step)
    began = time.perf_counter()
    with compiling_for(device_for(arch)) as sharding:
        place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
        lowered = steps.lower_step(
            *jax.tree.map(place, (params, cache, info)), cfg, decoding=step == "decode", platform="cuda"
        )
        traced = time.perf_counter()
        compiled = lowered.compile()
    seconds = {"trace": round(traced - began, 1), "compile": round(time.perf_counter() - traced, 1)}
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if keep:
        keep.write_text(text)
    sizes = {name: getattr(cache, name).size * getattr(cache, name).dtype.itemsize for name in ARENAS}
    return {
        "rows": info.num_rows,
        "sequences": info.num_seqs,
        "context_tokens": plan.context,
        "seconds": seconds,
        "bytes": {
            "parameters_bytes": sum(leaf.size * leaf.dtype.itemsize for _, leaf in walk(params)),
            "arguments_bytes": memory.argument_size_in_bytes,
            "outputs_bytes": memory.output_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
        },
    } | program_report(text, cfg, sizes)


def program_report(text: str, cfg: ModelConfig, arenas: dict[str, int]) -> dict[str, Any]:
    """What the text of a compiled step says of its arenas (name -> bytes) and kernels, see `MEANING`."""
    from pallas_kernels.aot import hlo

    program = hlo.parse(text)
    aliased, launches, loops = hlo.aliased_parameters(program), hlo.launches(program), hlo.loops(program)
    by_layer, looped = collections.defaultdict(list), collections.Counter(_layer_of(scope) for _, scope in loops)
    for launch in launches:
        by_layer[_layer_of(launch.scope)].append(launch)
    layers = []
    for role in layer_roles(cfg):
        own = by_layer[role.layer]
        parts = {f"{part}_kernels": sum(f"/{part}/" in x.scope for x in own) for part in ("attn", "ffn")}
        row = {"layer": role.layer, "role": role.label} | _counts(own) | parts | {"loops": looped[role.layer]}
        layers.append(row)
    return {
        "arenas": {
            name: {"bytes": size, "aliased": f"cache.{name}" in aliased, "copies": hlo.copies_of(program, size)}
            for name, size in arenas.items()
        },
        "program": _counts(launches)
        | {"loops": len(loops), "open_loops": sum(hlo.trip_count(loop) is None for loop, _ in loops)},
        "elsewhere": _counts([x for key, found in by_layer.items() if key is None for x in found]),
        "roles": _roles(layers),
        "layers": layers,
    }


def _layer_of(scope: str) -> int | None:
    found = re.search(r"/layers\.(\d+)/", scope)
    return int(found[1]) if found else None


def _counts(launches: Sequence[Any]) -> dict[str, Any]:
    """Kernels, launches, and kernels by kind (`pallas_kernels.aot.hlo.Launch`)."""
    kinds = collections.Counter(launch.kind for launch in launches)
    return {
        "kernels": len(launches),
        "launches": sum(launch.times for launch in launches),
        "by_kind": dict(sorted(kinds.items())),
    }


def _roles(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    roles: dict[str, list] = {}
    for row in layers:
        roles.setdefault(row["role"], []).append(row)
    return {
        role: {"layers": len(rows)}
        | {
            name: _spread([row[name] for row in rows])
            for name in ("kernels", "launches", "attn_kernels", "ffn_kernels")
        }
        for role, rows in roles.items()
    }


def _spread(values: list[int]) -> list[int]:
    """[least, median, most]."""
    ordered = sorted(values)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def main(argv: Sequence[str] | None = None) -> int:
    from pallas_kernels.common.devices import device_for

    options = _parser().parse_args(argv)
    try:
        given = ModelConfig.from_json(config_path(options.config))
        cfg, said = reduced(given, options.layers, options.experts)
        device_for(options.arch)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"aot_model: {error}") from None
    if options.one:
        print(json.dumps(compile_step(cfg, Plan(), options.one, options.arch, options.keep)))
        return 0
    report = _header(options, given, cfg, said)
    for step in options.step or STEPS:
        report["steps"][step] = found = _alone(options, step)
        found["broken"] = found.get("broken") or broken_rules(found)
        _print(step, found)
    _write(options.out, report)
    return int(any(found["broken"] for found in report["steps"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsflash_jax.aot_model", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="a configuration file, or the name of a shipped one")
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_90 or sm_100 (default: sm_90)")
    parser.add_argument("--out", type=Path, default=Path("aot/model.json"), help="the report (default: aot/model.json)")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this step (default: both)")
    parser.add_argument("--layers", type=int, help="only the first layers")
    parser.add_argument("--experts", type=int, help="fewer routed experts per layer")
    parser.add_argument("--keep", type=Path, help="write the compiled programs' text here, the step's name appended")
    parser.add_argument("--one", choices=STEPS, help=argparse.SUPPRESS)
    return parser


def _alone(options: argparse.Namespace, step: str) -> dict[str, Any]:
    from pallas_kernels.aot.process import run_alone

    arguments = [options.config, "--arch", options.arch, "--one", step]
    for name in ("layers", "experts"):
        value = getattr(options, name)
        arguments += [f"--{name}", str(value)] if value is not None else []
    arguments += ["--keep", f"{options.keep}.{step}"] if options.keep else []
    return run_alone("dsflash_jax.aot_model", *arguments, seconds=COMPILE_SECONDS)


def broken_rules(found: dict[str, Any]) -> list[str]:
    """What a compiled step breaks, a sentence part each: every arena is an argument's buffer and is never copied."""
    broken = []
    for name, arena in found["arenas"].items():
        if not arena["aliased"]:
            broken.append(f"{name} is not updated in the buffer that was given")
        if arena["copies"]:
            broken.append(f"{name} is copied {len(arena['copies'])} times")
    largest = found["arenas"]["pages"]["bytes"]
    if found["bytes"]["temp_bytes"] >= largest:
        broken.append(f"temporaries of {found['bytes']['temp_bytes']:,} B could hold the pages of {largest:,} B")
    return broken


def _header(options: argparse.Namespace, given: ModelConfig, cfg: ModelConfig, said: list[str]) -> dict[str, Any]:
    from pallas_kernels.aot.tables import git_sha, versions
    from pallas_kernels.common.devices import device_for

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_sha": git_sha(),
        "versions": versions(),
        "arch": options.arch,
        "device": device_for(options.arch).kind,
        "config": {"name": Path(options.config).stem, "sha256": given.sha256(), "compiled_sha256": cfg.sha256()},
        "left_out": said,
        "layers": cfg.num_hidden_layers,
        "decoder_starts_at": decoder_start(cfg),
        "cache": {"pages": Plan().pages, "slots": Plan().slots},
        "meaning": MEANING,
        "steps": {},
    }


def _print(step: str, found: dict[str, Any]) -> None:
    if "bytes" not in found:
        print(f"{step}: BROKEN {'; '.join(found['broken'])}", flush=True)
        return
    program, reuse = found["program"], found["roles"].get("Reuse", {"kernels": ["none"]})
    print(
        f"{step}: {found['bytes']['temp_bytes'] / 1e6:,.1f} MB temporaries, {program['kernels']} kernels "
        f"({program['launches']:,} launches), per Reuse layer {reuse['kernels']}, "
        f"{'BROKEN ' + '; '.join(found['broken']) if found['broken'] else 'no arena copied'}",
        flush=True,
    )


def _write(path: Path, report: dict[str, Any]) -> None:
    """The report appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)


if __name__ == "__main__":
    sys.exit(main())
