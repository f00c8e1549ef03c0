"""Rooflines, errors, timing loops and targets: what the tables of kernels are made of."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.cli import main
from pallas_kernels.bench import CALLS, Rates, bound, calls_in_a_loop, relative_error, roofline_rows, time_call
from pallas_kernels.cases import OPS, all_cases, find_case
from pallas_kernels.common.cases import Cost, Update
from pallas_kernels.common.draw import Draw
from pallas_kernels.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]


def test_the_bound_is_the_slower_of_memory_and_matrix_units():
    rates = Rates(nbytes=100.0, flops=1000.0)
    assert bound(Cost(nbytes=200, flops=1000), rates) == (2.0, "memory")
    assert bound(Cost(nbytes=100, flops=3000), rates) == (3.0, "matrix")


def test_every_case_has_a_row_of_the_roofline():
    rows = roofline_rows(all_cases(), Rates(4.8e12, 989e12))
    assert len(rows) == len(all_cases()) and all(row["bound_us"] > 0 for row in rows)
    assert {row["op"] for row in rows} == set(OPS)


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1, 2, 3], [1, 2, 4], 1.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([-np.inf, 1.0], [-np.inf, 1.0], 0.0),
        ([0.0, 1.0], [-np.inf, 1.0], np.inf),
        ([np.nan, 1.0], [0.5, 1.0], np.inf),
    ],
)
def test_errors_are_shares_of_the_largest_value_and_never_hide(got, want, error):
    assert relative_error(np.array(got), np.array(want)) == error


def test_a_timed_call_runs_as_often_as_it_says():
    compile_s, steady_s = time_call(lambda x: x @ x, (jnp.ones((256, 256)),))
    assert compile_s > 0 and 1e-6 < steady_s < 1  # a hoisted product would take nanoseconds


def copied(compiled, arrays):
    """Copies in a compiled program that are of the shape of one of these arrays."""
    shapes = {f"[{','.join(map(str, array.shape))}]" for array in jax.tree.leaves(arrays)}
    results = re.findall(r"= (.*?)\bcopy(?:-start)?\(", compiled.as_text())
    return [result for result in results if any(shape in result for shape in shapes)]


def test_an_updated_argument_goes_from_call_to_call():
    loop = calls_in_a_loop(lambda step, x: (x * 2, x + step), Update(argument=1, result=1))
    updated, total = loop(jnp.zeros(3), (jnp.ones(3),))
    assert updated.tolist() == [CALLS] * 3
    assert total == sum(3 * call + 1 for call in range(CALLS))  # 2 x and x + 1 before call 0, 1, 2, ...


@pytest.mark.parametrize("key", ["kv_insert/released_32", "compress_pool/ratio2_32"])
def test_timing_an_op_that_works_in_place_copies_no_arena(key):
    case = find_case(key)
    args = case.args(Draw(None), True)
    updated, others = case.update.split(args)
    loop = lambda update: calls_in_a_loop(functools.partial(case.call, implementation="xla"), update)  # noqa: E731
    assert copied(loop(case.update).lower(updated, others).compile(), updated) == []
    assert copied(loop(None).lower(None, args).compile(), updated), "copies are there and are not seen"


def test_cases_that_work_in_place_name_the_argument_and_its_new_value():
    for case in (case for case in all_cases() if case.op in ("kv_insert", "compress_pool")):
        args = case.args(Draw(None), True)
        updated, others = case.update.split(args)
        assert case.update.join(updated, others) == args
        new = case.update.of(jax.eval_shape(functools.partial(case.call, implementation="xla"), *args))
        before, after = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arrays)] for arrays in (updated, new))
        assert before == after, case.key


def test_targets_name_cases_that_exist():
    for target in TARGETS:
        find_case(f"{target.op}/{target.case}")
        if target.than:
            find_case("/".join(target.than))


def test_a_target_is_judged_by_its_figure():
    rows = {("a", "x"): {"steady_us": 50.0, "of_bound": 0.7}, ("b", "y"): {"steady_us": 100.0}}
    judge = lambda *fields: Target("t", *fields).judge(rows)["met"]  # noqa: E731
    assert judge("a", "x", "steady_us", 60.0) and not judge("a", "x", "steady_us", 40.0)
    assert judge("a", "x", "of_bound", 0.7) and not judge("a", "x", "of_bound", 0.71)
    assert judge("a", "x", "times_faster", 1.9, ("b", "y")) and not judge("a", "x", "times_faster", 2.1, ("b", "y"))
    assert judge("c", "z", "of_bound", 0.1) is None


def test_the_command_prints_the_roofline_and_refuses_what_it_does_not_know(capsys):
    assert main(["bench", "kernels", "--op", "topk_select", "--device", "a100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"]["kind"].startswith("NVIDIA A100") and report["measured_rates"] is None
    row = report["measured"][0]
    assert {"op", "implementation", "shape", "dtype", "device", "compile_s", "steady_us", "error"} <= set(row)
    assert row["error"] == 0 and "of_bound" not in row and {"versions", "git_sha"} <= set(row)
    assert main(["bench", "kernels", "--op", "attention"]) == 2
    assert "known: packed_linear" in capsys.readouterr().err
    assert main(["bench", "--op", "topk_select"]) == 2
    assert "`dsflash bench kernels`" in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpu_check_rehearses_on_a_cpu(tmp_path):
    """Every short case interpreted and right, timed, swept and judged; nothing is written into the package."""
    out = tmp_path / "check.json"
    command = [sys.executable, "tools/gpu_check.py", "--cpu", "--minutes", "30", "--out", out]
    before = sorted((ROOT / "pallas_kernels" / "tuned").iterdir())
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["rehearsal"] and all(row["right"] for row in result["correctness"])
    assert {row["op"] for row in result["correctness"]} == set(OPS)
    assert not [row for row in result["timings"] + result["sweep"] if "problem" in row]
    assert all(target["met"] is None for target in result["targets"] if target["figure"] == "of_bound")
    assert sorted((ROOT / "pallas_kernels" / "tuned").iterdir()) == before
