"""The Python examples of the documents run as printed, and the two ways to drive the caches agree."""

import json
import re
from pathlib import Path

import numpy as np

from tests.model import running

ROOT = Path(__file__).resolve().parents[2]


def example(document: str) -> str:
    """The one Python block of a document."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    return block


def run(document: str) -> dict:
    names: dict = {}
    exec(compile(example(document), document, "exec"), names)
    return names


def test_the_readme_session_does_what_the_steps_by_hand_do(monkeypatch, capsys, tmp_path):
    """In a folder whose configs/tiny.json has one layer: the words are the documents', the compilation is short."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.json").write_text(json.dumps(running.single().to_dict()))
    monkeypatch.chdir(tmp_path)
    session, by_hand = run("README.md"), run("docs/cache.md")
    printed = capsys.readouterr().out
    known = session["session"].tokens("a")
    assert known == (1, 2, 3, 4, 5, session["a"], *session["drafts"][: session["accepted"]])
    assert printed == f"{known}\n"
    for name in ("a", "b", "drafts", "accepted"):
        assert session[name] == by_hand[name], name
    assert np.array_equal(session["logits"], by_hand["logits"])
    assert session["session"].cache.length.tolist() == by_hand["cache"].length.tolist() == [len(known), 3]


def test_the_readme_example_is_short():
    assert len([line for line in example("README.md").splitlines() if line.strip()]) <= 15
