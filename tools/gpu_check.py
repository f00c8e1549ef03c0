"""Checks and times every kernel on the GPU at hand, in minutes: python tools/gpu_check.py [--cpu] [--minutes 6]

1. Every op and format on fresh random inputs against float64 NumPy; any difference beyond the case's tolerance fails.
2. Every case at full size: kernel and plain XLA (and torch, where importable, for top-k), against rates measured here.
3. The tile sweep of the short cases, best first in time, into pallas_kernels/tuned/<device>.json.
4. The targets of docs/kernels.md, each as met or not.

--cpu does all of it without a GPU, interpreted and at small sizes: a rehearsal, whose times and tiles mean nothing and
are written nowhere but into the result. Writes gpu_check.json; exits with 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "pallas_triton"


class Clock:
    """Seconds left of the time that was allowed."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds until the end, negative behind it."""
        return self._end - time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU: interpreted, small")
    parser.add_argument("--minutes", type=float, default=6.0, help="stop starting new work after so many (default 6)")
    parser.add_argument("--op", action="append", help="only this op")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args()
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
    sys.path.insert(0, str(ROOT))
    clock = Clock(options.minutes)
    import jax

    from pallas_kernels.aot.tables import git_sha
    from pallas_kernels.bench import device_rates
    from pallas_kernels.cases import all_cases
    from pallas_kernels.common.devices import current_target

    if not options.cpu and jax.devices()[0].platform != "gpu":
        print("no GPU is visible to JAX; --cpu rehearses without one", file=sys.stderr)
        return 2
    cases = [case for case in all_cases() if not options.op or case.op in options.op]
    result: dict[str, Any] = {"started": _now(), "device": current_target().kind, "interpreted": options.cpu}
    result |= {"git_sha": git_sha(), "rehearsal": options.cpu}
    result["correctness"] = list(_correctness(cases, options.cpu, clock))
    rates = device_rates(2**24, 512) if options.cpu else device_rates()
    result["rates"] = rates._asdict()
    result["timings"] = list(_timings(cases, options.cpu, rates, clock))
    result["sweep"] = list(_sweep(cases, options.cpu, rates, clock))
    result["targets"] = _targets(result["timings"])
    result["finished"] = _now()
    _write(options.out, result)
    if not options.cpu:
        _write_tuned(result["sweep"])
    wrong = [row for row in result["correctness"] if not row["right"]]
    print(f"{len(result['correctness'])} checked, {len(wrong)} wrong; {options.out}")
    return int(bool(wrong))


def _correctness(cases: list, cpu: bool, clock: Clock) -> Iterator[dict[str, Any]]:
    from pallas_kernels.bench import error_of
    from pallas_kernels.common.draw import Draw

    for case in cases:
        if not case.short:
            continue
        row = {"op": case.op, "case": case.name, "tolerance": case.tolerance}
        try:
            args = case.args(Draw(int.from_bytes(os.urandom(3), "little")), True)
            error = error_of(lambda *a, c=case: c.call(*a, implementation=KERNEL, interpret=cpu), case, args)
            row |= {"error": error, "right": error <= case.tolerance}
        except Exception as problem:  # one broken kernel must not hide the others
            row |= {"error": None, "right": False, "problem": _short(problem)}
        verdict = "right" if row["right"] else "WRONG"
        print(f"{verdict} {case.key}: {row['error']} (allowed {case.tolerance})", flush=True)
        yield row


def _timings(cases: list, cpu: bool, rates: Any, clock: Clock) -> Iterator[dict[str, Any]]:
    for case in cases:
        for way in (KERNEL, "xla"):
            if cpu and not case.short:
                continue
            if clock.left() < 0:
                yield {"op": case.op, "case": case.name, "implementation": way, "problem": "no time left"}
                continue
            yield _timed(case, way, cpu, rates)
        if case.op == "topk_select" and not cpu and clock.left() > 0:
            yield from _torch_topk(case)


def _timed(case: Any, way: str, cpu: bool, rates: Any, config: Any = None) -> dict[str, Any]:
    from pallas_kernels.bench import measure

    try:
        interpret = cpu and way == KERNEL
        row = measure(case, way, small=cpu, interpret=interpret, config=config, rates=rates)
        of_bound = f", {row['of_bound']:.0%} of bound" if "of_bound" in row else ""
        print(f"{case.key} {row['implementation']} {config or ''}: {row['steady_us']} us{of_bound}", flush=True)
    except Exception as problem:
        row = {"op": case.op, "case": case.name, "implementation": way, "problem": _short(problem)}
        print(f"{case.key} {way} {config or ''}: {row['problem']}", flush=True)
    return row


def _torch_topk(case: Any) -> Iterator[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return
    scores = torch.randn(case.shape["rows"], case.shape["entries"], device="cuda")
    torch.topk(scores, case.shape["k"])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        torch.topk(scores, case.shape["k"])
    torch.cuda.synchronize()
    steady = 1e6 * (time.perf_counter() - start) / 20
    yield {"op": case.op, "case": case.name, "implementation": f"torch {torch.__version__}", "steady_us": steady}


def _sweep(cases: list, cpu: bool, rates: Any, clock: Clock) -> Iterator[dict[str, Any]]:
    """Every config of the short cases while time is left; in a rehearsal the first config of each."""
    for case in cases:
        if not case.short:
            continue
        for config in case.configs[:1] if cpu else case.configs:
            if clock.left() < 0:
                return
            row = _timed(case, KERNEL, cpu, rates, config)
            yield row | {"bucket": case.bucket, "fields": dataclasses.asdict(config)}


def _write_tuned(sweep: list[dict[str, Any]]) -> None:
    """The fastest config of every swept bucket, into the table of this device; other buckets keep what they have."""
    from pallas_kernels.aot.tables import git_sha
    from pallas_kernels.common.devices import current_target
    from pallas_kernels.common.tiles import tuned_table

    device = current_target().device
    if device is None:
        return
    table = json.loads(json.dumps(tuned_table(device.slug)))  # a copy
    for row in sorted((r for r in sweep if "steady_us" in r), key=lambda r: -r["steady_us"]):
        table.setdefault("ops", {}).setdefault(row["op"], {})[row["bucket"]] = row["fields"]
    table["source"] = f"tools/gpu_check.py on {current_target().kind}, {_now()}, {git_sha()}"
    _write(ROOT / "pallas_kernels" / "tuned" / f"{device.slug}.json", table)


def _targets(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets of docs/kernels.md against the kernel's timings; `met` is None where nothing was timed."""
    from pallas_kernels.targets import TARGETS

    kernel = {(r["op"], r["case"]): r for r in timings if r["implementation"].startswith(KERNEL) and "steady_us" in r}
    return [target.judge(kernel) for target in TARGETS]


def _short(problem: Exception) -> str:
    text = "".join(traceback.format_exception_only(problem)).strip()
    return text.splitlines()[-1][:300]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
