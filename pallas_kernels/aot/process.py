"""One compilation in a process of its own: a compiler that aborts ends that process only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Compilation needs no GPU and must not wait for one; without the second, JAX refuses the plugin that has no driver. The
# third: after an abort a look-up of symbols takes longer than the compilation.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "LLVM_DISABLE_SYMBOLIZATION": "1"}


def run_alone(module: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """The JSON object that `python -m module arguments` prints last, or {"broken": [why there is none]}."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        run = subprocess.run(
            command, env=os.environ | _ENVIRONMENT, capture_output=True, text=True, timeout=seconds
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"broken": [f"no result after {seconds:g} s"]}
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [""])[-1][:300]
        return {"broken": [f"compiler ended with status {run.returncode}: {last}"]}
    return json.loads(run.stdout.splitlines()[-1])
