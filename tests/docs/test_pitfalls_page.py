"""docs/pitfalls.md and the tests name the same numbers, and the tests it names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text()
NUMBER = re.compile(r"\b[BU]\d{1,3}\b")
ROWS = re.findall(r"^\| ([BU]\d+) \| (.+?) \| (.+?) \|$", PAGE, re.M)


def named_in_tests() -> dict[str, set[str]]:
    """Number -> the test files that name it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path != Path(__file__):
            for number in NUMBER.findall(path.read_text()):
                found.setdefault(number, set()).add(path.relative_to(ROOT).as_posix())
    return found


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_number_that_a_test_names_is_explained():
    explained = {number for number, *_ in ROWS}
    assert {number: files for number, files in named_in_tests().items() if number not in explained} == {}


def test_every_number_stands_once_with_a_scenario_and_a_test_or_a_reason():
    assert len(ROWS) == len({number for number, *_ in ROWS}) == len(re.findall(r"^\| [BU]\d", PAGE, re.M))
    for number, scenario, shown in ROWS:
        assert len(scenario) > 20, number
        assert shown.startswith(("`tests/", "not here: ", "decided: ", "see ")), number


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE))))
def test_named_tests_exist(name):
    file, _, function = name.partition("::")
    assert (ROOT / file).is_file()
    assert not function or function in functions(ROOT / file)


def test_a_number_with_a_test_is_named_by_that_test_file():
    """A row cannot claim a file that knows nothing of the number."""
    claimed = {number: set(re.findall(r"`(tests/[\w/]+\.py)::", shown)) for number, _, shown in ROWS}
    named = named_in_tests()
    lost = {number: files for number, files in claimed.items() if files and not files & named.get(number, set())}
    lost.pop("U1", None)  # a decision that the main property rests on, not a defect that one test is named after
    assert lost == {}


def test_references_to_other_rows_have_a_target():
    explained = {number for number, *_ in ROWS}
    assert {number for _, _, shown in ROWS for number in NUMBER.findall(shown)} <= explained
