"""The committed tables of compiled kernels (`aot/`) and what docs/kernels.md says of them, against the code of today.

Nothing is compiled here: a tile or kernel that changed since is not noticed, which is why the tables name their commit.
"""

import copy
import json
import re
from pathlib import Path

import pytest

from pallas_kernels.aot.tables import TOOLS, broken_rules
from pallas_kernels.cases import all_cases
from pallas_kernels.common.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
TABLES = {device.arch: json.loads((ROOT / "aot" / f"{device.arch}.json").read_text()) for device in DEVICES}
DEVICE = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)


def disagreements(table, device):
    """What the code has and the table lacks or says otherwise, and rules of today's budgets that its rows break."""
    rows = {f"{row['op']}/{row['case']}": row for row in table["rows"]}
    cases = {case.key: case for case in all_cases()}
    found = [f"{key} is in one of the two only" for key in sorted(rows.keys() ^ cases.keys())]
    for key in rows.keys() & cases.keys():
        row, case = rows[key], cases[key]
        if row["shape"] != dict(case.shape):
            found.append(f"{key} has another shape: {row['shape']}")
        elif row["broken"]:
            found += row["broken"]
        else:
            found += [f"{key}: {rule}" for rule in broken_rules(row, case.budget, device)]
    return found


@DEVICE
def test_every_case_has_a_row_that_keeps_its_budget(device):
    table = TABLES[device.arch]
    assert (table["arch"], table["device"]) == (device.arch, device.kind)
    assert disagreements(table, device) == [], "run `python -m pallas_kernels.aot --all --out aot`"


@DEVICE
def test_a_table_says_what_made_it(device):
    table = TABLES[device.arch]
    assert set(table["versions"]) == set(TOOLS)
    assert re.fullmatch(r"[0-9a-f]{40}", table["git_sha"]), "made from a modified tree"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", table["date"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table["rows"].pop(0), "in one of the two only"),
        (lambda table: table["rows"][0].update(case="another"), "in one of the two only"),
        (lambda table: table["rows"][0]["shape"].update(rows=7), "has another shape"),
        (lambda table: table["rows"][0].update(broken=["compiler ended with status 1"]), "status 1"),
        (lambda table: table["rows"][0]["kernels"][0].update(spill_bytes=4), "spills 4 B, allowed 0"),
        (lambda table: table["rows"][-1].update(sort=True), "the program sorts"),
    ],
)
def test_a_table_that_disagrees_is_found(change, words):
    table = copy.deepcopy(TABLES["sm_90"])
    change(table)
    assert any(words in line for line in disagreements(table, DEVICES[1]))


def test_the_document_has_the_figures_of_the_tables():
    text = (ROOT / "docs" / "kernels.md").read_text()
    stated = re.findall(r"^\| `(\w+/\w+)` \| (.+) \|$", text, re.M)
    assert {key.split("/")[0] for key, _ in stated} == {case.op for case in all_cases()}
    for key, figures in stated:
        kernels = [_largest(TABLES[device.arch], key) for device in DEVICES]
        columns = (
            [str(k["registers"]) for k in kernels],
            [f"{k['shared_bytes'] / 1024:.0f}" for k in kernels],
            [str(k["blocks_per_core"]) for k in kernels],
        )
        assert figures == " | ".join(" / ".join(column) for column in columns), key


def _largest(table, key):
    """The op's kernel with the most instructions."""
    (row,) = (row for row in table["rows"] if f"{row['op']}/{row['case']}" == key)
    return max((k for k in row["kernels"] if k["name"].startswith(row["op"])), key=lambda k: k["instructions"])
