"""Compiles a function for a GPU that is not there and reads what the compiler made of it."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.common.devices import Device

MATRIX = ("HMMA", "HGMMA", "QGMMA", "QMMA", "IMMA", "UTCHMMA", "UTCQMMA")  # opcodes of matrix instructions
_CORE_REGISTERS, _CORE_THREADS, _CORE_BLOCKS, _RESERVED_SHARED = 65_536, 2_048, 32, 1_024


def target_config(device: Device) -> str:
    """XLA's description of the device, as a text proto."""
    features = "" if device.capability < 90 else "feature_extension: ACCELERATED_FEATURES"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {device.core_shared_bytes} threads_per_core_limit: {_CORE_THREADS}
  core_count: {device.cores} fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {int(device.bandwidth)} l2_cache_size: {device.l2_bytes}
  clock_rate_ghz: {device.clock_ghz} device_memory_size: {device.memory_bytes}
  shared_memory_per_block_optin: {device.block_shared_bytes}
  cuda_compute_capability {{ major: {device.capability // 10} minor: {device.capability % 10} {features} }}
  registers_per_core_limit: {_CORE_REGISTERS} registers_per_block_limit: {_CORE_REGISTERS} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{device.kind}\""""


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[NamedSharding]:
    """Makes `device` the target of what is traced inside; yields the sharding that abstract arguments need."""
    topology = topologies.get_topology_desc("t", "cuda", target_config=target_config(device), topology="1x1x1")
    mesh = Mesh(np.array(topology.devices[:1]), ("_",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
        # Pallas-Triton announces its removal at every lowering; docs/kernels.md says what follows it.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield NamedSharding(mesh, PartitionSpec())


def compile_for(
    device: Device, function: Callable[..., Any], args: Any, options: dict[str, Any] | None = None, **jit: Any
) -> Any:
    """The compiled executable of `function` at the shapes of `args` (jit: `donate_argnums` and the like)."""
    with compiling_for(device) as sharding:
        place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
        lowered = jax.jit(function, **jit).trace(*jax.tree.map(place, args)).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options)


def report(device: Device, function: Callable[..., Any], args: Any, **jit: Any) -> dict[str, Any]:
    """Facts of the compiled program: temp bytes, whether it sorts, and one row per kernel (see `_kernels`)."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_emitter_re": ".*"}
        compiled = compile_for(device, function, args, options, **jit)
        kernels = _kernels(Path(folder), device)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "sort": bool(re.search(r"= .*\bsort\(", text)) or "cub_sort" in text.lower() or "DeviceRadixSort" in text,
        "kernels": kernels,
    }


def _kernels(folder: Path, device: Device) -> list[dict[str, Any]]:
    """Registers, spilled bytes, shared memory, occupancy and instructions of each kernel in XLA's dump."""
    launches = {}
    for file in folder.glob("*thunk_sequence.txt"):
        pattern = r"\] (\S+) grid: \[(.*?)\] threads: \[(\d+).*shared_memory: (\d+)"
        for name, grid, threads, shared in re.findall(pattern, file.read_text()):
            launches[name] = {"grid": grid, "threads": int(threads), "shared_bytes": int(shared)}
    rows = []
    for file in sorted(folder.glob("*.ptx")):
        if ".entry" not in file.read_text():
            continue
        code = file.with_suffix(".cubin")
        for name, facts in _assemble(file, code, device).items():
            launch = launches.get(name, {"grid": "", "threads": 0, "shared_bytes": 0})
            row = {"name": name} | launch | facts | _instructions(code, name)
            rows.append(row | {"blocks_per_core": occupancy(device, row)})
    return rows


def _assemble(ptx: Path, code: Path, device: Device) -> dict[str, dict[str, int]]:
    arch = device.arch + ("a" if device.capability >= 90 else "")
    run = subprocess.run([tool("ptxas"), "-v", f"-arch={arch}", ptx, "-o", code], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"ptxas failed on {ptx.name}: {run.stderr[:500]}")
    spills = r"Function properties for (\S+).*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(spills + r".*?Used (\d+) registers", run.stderr, re.S)
    return {n: {"registers": int(r), "spill_bytes": int(s) + int(ld)} for n, s, ld, r in found}


def _instructions(code: Path, name: str) -> dict[str, Any]:
    """Instruction count and matrix instructions of one kernel of a cubin."""
    text = subprocess.run([tool("nvdisasm"), "-c", code], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"\n\.section\s+\.text\.", text)
    body = next((s for s in sections if s.startswith(name)), text)
    pattern = r"\n\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)"
    counts = collections.Counter(re.findall(pattern, body))
    return {"instructions": sum(counts.values()), "matrix": {op: counts[op] for op in MATRIX if counts[op]}}


def occupancy(device: Device, row: dict[str, Any]) -> int:
    """Blocks of the kernel that one core holds at once, by registers, shared memory and threads."""
    threads = row["threads"]
    if not threads:
        return 0
    registers = -(-row["registers"] // 8) * 8 * threads
    by_shared = device.core_shared_bytes // (row["shared_bytes"] + _RESERVED_SHARED)
    return min(_CORE_REGISTERS // max(registers, 1), by_shared, _CORE_THREADS // threads, _CORE_BLOCKS)


def tool(name: str) -> str:
    """Path of a CUDA compiler tool: the one of the installed wheels."""
    path = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / name
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(f"{name} is missing: install the extra `aot` (Python 3.12: pip install -e '.[aot]').")
    return str(path)
