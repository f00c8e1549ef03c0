"""Compiles every kernel for sm_80, sm_90 and sm_100 without a GPU and checks each against its budget.

One subprocess per case and architecture: a compiler that aborts ends that process only. Writes <out>/<arch>.json;
exits with 1 where a budget is broken or a case does not compile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
from pathlib import Path
from typing import Any

COMPILE_SECONDS = 600  # a case that takes longer counts as broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every case; without it one shape per op and format")
    parser.add_argument("--arch", action="append", help="sm_80, sm_90 or sm_100 (default: all three)")
    parser.add_argument("--op", action="append", help="only this op (may be given more than once)")
    parser.add_argument("--out", type=Path, default=Path("aot"), help="folder of the tables (default: aot)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time (default: the cores)")
    parser.add_argument("--one", metavar="OP/CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_compile_one(options.one, options.arch[0])))
        return 0
    return _compile_all(options)


def _compile_one(key: str, arch: str) -> dict[str, Any]:
    """The report of one case, in this process."""
    from pallas_kernels.aot.compile import report
    from pallas_kernels.cases import find_case
    from pallas_kernels.common.devices import device_for
    from pallas_kernels.common.draw import Draw

    case = find_case(key)

    def call(*args: Any) -> Any:
        return case.call(*args, implementation="pallas_triton")

    return report(device_for(arch), call, case.args(Draw(None), False))


def _compile_all(options: argparse.Namespace) -> int:
    from pallas_kernels.aot.tables import git_sha, write_table
    from pallas_kernels.cases import OPS, all_cases
    from pallas_kernels.common.devices import DEVICES, device_for

    for op in options.op or ():
        if op not in OPS:
            raise SystemExit(f"--op {op}: unknown; known: {', '.join(OPS)}")
    devices = [device_for(arch) for arch in options.arch] if options.arch else list(DEVICES)
    cases = [c for c in all_cases() if (options.all or c.short) and c.op in (options.op or OPS)]
    broken, commit = 0, git_sha()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for device in devices:
            rows = list(pool.map(lambda case, device=device: _row(case, device), cases))
            broken += sum(bool(row["broken"]) for row in rows)
            write_table(options.out / f"{device.arch}.json", device, rows, commit)
    print(f"{len(cases) * len(devices)} compiled, {broken} broken; tables in {options.out}")
    return int(broken > 0)


def _row(case: Any, device: Any) -> dict[str, Any]:
    """One line of the table: what a subprocess reports about the case, and the budget rules that it breaks."""
    from pallas_kernels.aot.process import run_alone
    from pallas_kernels.aot.tables import broken_rules

    row: dict[str, Any] = {"op": case.op, "case": case.name, "shape": dict(case.shape)}
    arguments = ("--one", case.key, "--arch", device.arch)
    row |= run_alone("pallas_kernels.aot", *arguments, seconds=COMPILE_SECONDS)
    if "broken" not in row:
        row["broken"] = broken_rules(row, case.budget, device)
    _print(row, device)
    return row


def _print(row: dict[str, Any], device: Any) -> None:
    kernels = row.get("kernels", [])
    facts = max(kernels, key=lambda k: k["instructions"], default=None)
    text = "" if facts is None else (
        f"{facts['registers']:4d} regs {facts['spill_bytes']:4d} B spilled {facts['shared_bytes'] / 1024:6.1f} KiB "
        f"{facts['blocks_per_core']:2d} blocks/core {facts['instructions']:5d} instr {facts['matrix']}"
    )  # fmt: skip
    mark = "BROKEN " + "; ".join(row["broken"]) if row["broken"] else "ok"
    print(f"{device.arch:7s} {row['op'] + '/' + row['case']:44s} {text} {mark}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
