"""docs/verification.md names files and tests that exist, and says `slow` where a part of them is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "verification.md").read_text()
SLOW = ".".join(("pytest", "mark", "slow"))
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| claim")]


def named(line: str) -> list[str]:
    """Paths in backticks, with ::test where one is named."""
    return re.findall(r"`((?:tests|experiments|configs|docs)/[\w./-]*(?:::\w+)?)`", line)


def test_every_line_has_a_claim_evidence_and_a_limit():
    assert len(LINES) > 15
    for line in LINES:
        assert len([cell for cell in line.strip("| ").split(" | ") if cell.strip()]) == 3, line


@pytest.mark.parametrize("name", sorted({name for line in LINES for name in named(line)}))
def test_named_files_and_tests_exist(name):
    file, _, function = name.partition("::")
    assert (ROOT / file).exists()
    if function:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[2:40])
def test_lines_say_slow_where_their_files_have_slow_tests(line):
    # Single tests that a line names are judged by nobody here: they may be the ones that are not slow.
    paths = [ROOT / name for name in named(line) if name.startswith("tests/") and "::" not in name]
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    slow = [file.name for file in files if SLOW in file.read_text()]
    assert not slow or "slow" in line, slow
