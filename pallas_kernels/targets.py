"""What the kernels should reach on an H200, as shares of each shape's own bound from rates measured beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # (op, case) -> the kernel's row of `bench.measure`


class Target(NamedTuple):
    """One figure and its limit.

    figure: "of_bound" (share of the bound, at least), "steady_us" (at most), or "times_faster" than the case `than` (at
    least).
    """

    name: str
    op: str
    case: str
    figure: str
    limit: float
    than: tuple[str, str] | None = None

    def judge(self, rows: Rows) -> dict[str, Any]:
        """The target with its value and whether it is met; both None where a row is missing."""
        row, other = rows.get((self.op, self.case)), rows.get(self.than) if self.than else None
        value = None
        if self.figure == "times_faster" and row and other:
            value = round(other["steady_us"] / row["steady_us"], 2)
        elif self.figure != "times_faster" and row:
            value = row.get(self.figure)
        met = None if value is None else value <= self.limit if self.figure == "steady_us" else value >= self.limit
        return {**self._asdict(), "value": value, "met": met}


_SCORES, _POOL, _ATTENTION = "indexer_scores", "candidate_scores", "sparse_mla"
TARGETS = (
    *(Target("FP4 index scores", _SCORES, f"mxfp4_n131072_t{n}", "of_bound", 0.8) for n in (32, 128)),
    *(Target("sparse decode", _ATTENTION, f"decode_fp4_e4m3_t{n}", "of_bound", 0.6) for n in (32, 128)),
    Target("sparse prefill", _ATTENTION, "prefill_fp4_e4m3_t4096", "of_bound", 0.5),
    *(
        Target(
            "pool scores instead of all", _POOL, f"mxfp4_c2048x8_t{n}", "times_faster", 1.7,
            (_SCORES, f"mxfp4_n131072_t{n}"),
        )
        for n in (32, 128)
    ),
    Target("top-k of 64 rows", "topk_select", "k2048_n131072_t64", "steady_us", 60.0),
)  # fmt: skip
