"""docs/contract.md gives a source for every fact and names keys and values that the code has."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.config_io import read_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contract.md").read_text()
TINY = json.loads((ROOT / "configs" / "tiny.json").read_text())
FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


def rows_of(text: str) -> list[list[str]]:
    """Cells of all table rows but headings and rules."""
    rows = []
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("|---") and not after.startswith("|---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def unsourced(text: str) -> list[str]:
    """First cells of rows that lack a cell or whose last cell, the source, is empty."""
    return [cells[0] for cells in rows_of(text) if not all(cells)]


def test_every_fact_has_a_source():
    assert len(rows_of(PAGE)) > 80
    assert unsourced(PAGE) == []


def test_a_fact_without_a_source_is_found():
    assert unsourced("| fact | rule | source |\n|---|---|---|\n| a | b | ref |\n| c | d | |\n| e | | ref |") == [
        "c",
        "e",
    ]


BUILT = {
    cells[0].strip("`"): json.loads(cells[1].strip("`")) for cells in rows_of(section("Keys with one built value"))
}


@pytest.mark.parametrize(("key", "value"), BUILT.items())
def test_a_key_with_one_built_value_is_accepted_with_it_only(key, value):
    read_config({**TINY, key: value})
    other = {bool: not value, str: "another"}.get(type(value), 7)
    with pytest.raises(ValueError, match=f"{key}={other!r} must be"):
        read_config({**TINY, key: other})


def test_named_keys_exist():
    sources = " ".join(cells[-1] for cells in rows_of(PAGE))
    named = set(re.findall(r"`([a-z_]+)`", sources))
    elsewhere = {"quantization_config", "expert_dtype", "vision_config", "fp8_ds_mla"}  # of parts that are not built
    assert len(named) > 20 and named - elsewhere - FIELDS == set()
