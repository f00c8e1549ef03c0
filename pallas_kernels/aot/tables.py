"""The tables of compiled kernels: budgets they must keep, and the files they are written to."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pallas_kernels.common.cases import Budget
from pallas_kernels.common.devices import Device

TOOLS = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")


def broken_rules(report: dict[str, Any], budget: Budget, device: Device) -> list[str]:
    """The rules of `budget` that a compiled case breaks, one sentence part each.

    Rules on instructions are about the case's own kernels (those with the op in their name): XLA's fusions around them
    are small by nature. Spills and shared memory are about every kernel.
    """
    kernels = report["kernels"]
    own = [k for k in kernels if k["name"].startswith(report["op"])]
    broken = []
    if not own:
        broken.append(f"no kernel named {report['op']}: {', '.join(k['name'] for k in kernels) or 'no kernel at all'}")
    for kernel in kernels:
        if kernel["spill_bytes"] > budget.spill_bytes:
            broken.append(f"{kernel['name']} spills {kernel['spill_bytes']} B, allowed {budget.spill_bytes}")
        if kernel["shared_bytes"] > device.block_shared_bytes:
            broken.append(f"{kernel['name']} asks for {kernel['shared_bytes']:,} B of {device.block_shared_bytes:,}")
    if own and max(k["instructions"] for k in own) < budget.instructions:
        most = max(k["instructions"] for k in own)
        broken.append(f"{most} instructions, fewer than the floor of {budget.instructions}")
    if budget.matrix and not any(k["matrix"] for k in own):
        broken.append("no matrix instruction")
    if report["sort"] and not budget.sort:
        broken.append("the program sorts")
    return broken


def write_table(path: Path, device: Device, rows: list[dict[str, Any]], commit: str | None) -> None:
    """Writes one architecture's table with date, commit and compilers; it appears whole or not at all.

    commit: `git_sha` from before the first table was written, which may itself be a tracked file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"arch": device.arch, "device": device.kind, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    table = facts | {"git_sha": commit, "versions": versions(), "rows": rows}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(table, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)


def versions() -> dict[str, str]:
    """Versions of what compiles the kernels, of what is installed."""
    found = {}
    for name in TOOLS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_sha() -> str | None:
    """Commit of this checkout, "-modified" behind it where tracked files differ; None where it is none."""
    here = Path(__file__)

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=20)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie inside somebody else's checkout
        return git("rev-parse", "HEAD") + ("-modified" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
