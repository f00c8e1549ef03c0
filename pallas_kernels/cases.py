"""All cases of all ops, in the order of a decode step."""

from __future__ import annotations

import importlib

from pallas_kernels.common.cases import Case

OPS = (
    "packed_linear", "kv_insert", "compress_pool", "indexer_scores", "candidate_select", "candidate_scores",
    "topk_select", "sparse_mla",
)  # fmt: skip


def all_cases() -> tuple[Case, ...]:
    """Every case; `Case.key` is unique."""
    modules = [importlib.import_module(f"pallas_kernels.{op}.cases") for op in OPS]
    return tuple(case for module in modules for case in module.CASES)


def find_case(key: str) -> Case:
    """The case of that key; KeyError otherwise."""
    return {case.key: case for case in all_cases()}[key]
