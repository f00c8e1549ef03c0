"""The documents keep their promises that a machine can check."""

import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dsflash_jax import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")])
README = (ROOT / "README.md").read_text()
# Folders that exist on somebody's machine, never in this repository.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:work|opt|tmp|home|root|Users|mnt|var|etc|usr)/\S*")
# Folders of programs that any machine of a kind has; scripts look into them.
STANDARD = tuple("/" + folder for folder in ("usr/bin", "usr/local/bin", "opt/homebrew/bin"))


def fenced_lines(text: str) -> list[str]:
    """Lines inside fenced blocks."""
    return [line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]


def machine_paths(text: str) -> list[str]:
    """Absolute paths that name a folder of one machine."""
    return [path for path in MACHINE_PATH.findall(text) if not path.startswith(STANDARD)]


def broken_links(document: Path) -> list[str]:
    """Relative link and image targets of a document that are not files or folders beside it."""
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    return [target for target in local if not (document.parent / target).exists()]


def test_readme_gives_exactly_the_two_setup_commands():
    setup = [line for line in fenced_lines(README) if line.startswith("pip install")]
    assert setup == ["pip install -e . && dsflash run compress-ratio", "pip install -e '.[test]' && pytest"]


def test_readme_commands_are_sub_commands():
    named = re.findall(r"\bdsflash ([a-z-]+)", README)
    assert set(named) <= set(cli.COMMANDS)
    assert set(cli.COMMANDS) <= {*named}, "a sub-command is not mentioned in the README"


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`dsflash ([^`]+)`", README))))
def test_readme_options_are_accepted(line, capsys):
    command, *words = shlex.split(line)
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    accepted = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in accepted] == []


def test_readme_files_exist():
    named = re.findall(r"`((?:configs|tests|experiments|dsflash_jax|docs)/[\w./-]+)`", README)
    named += re.findall(r"\b((?:configs|tests)/[\w./-]+\w)", README)
    missing = [name for name in named if not (ROOT / name).exists() and not name.startswith("experiments/results")]
    assert named and missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_resolve(document):
    assert broken_links(document) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md) [b](there.md#part) [c](gone.md) [d](https://example.org) ![e](figures/no.png)")
    assert broken_links(page) == ["gone.md", "figures/no.png"]


def is_ignored(name: Path) -> bool:
    """Whether .gitignore leaves out a folder of this relative path: caches and outputs that tools make in a run."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    folders = [line.rstrip("/") for line in lines if line.endswith("/")]
    return any(
        fnmatch(name.parts[0], folder[1:]) if folder.startswith("/") else any(fnmatch(p, folder) for p in name.parts)
        for folder in [".git", *folders]
    )


def tracked_or_exported() -> list[Path]:
    """Tracked files, or in an exported tree without git every file outside the ignored folders."""
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listed.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return [path for path in ROOT.rglob("*") if not is_ignored(path.relative_to(ROOT))]


def committed_text_files() -> list[Path]:
    """Text files of the repository."""
    suffixes = {"", ".md", ".toml", ".txt", ".json", ".jsonl", ".py", ".sh", ".yaml", ".yml", ".cfg", ".svg", ".csv"}
    return [path for path in tracked_or_exported() if path.is_file() and path.suffix in suffixes]


def test_no_committed_text_names_a_path_of_one_machine():
    found = {
        path.relative_to(ROOT).as_posix(): paths
        for path in committed_text_files()
        if (paths := machine_paths(path.read_text(errors="replace")))
    }
    assert found == {}
    names = {path.relative_to(ROOT).as_posix() for path in committed_text_files()}
    assert {"README.md", ".ci/run", "LICENSE", Path(__file__).relative_to(ROOT).as_posix()} <= names


@pytest.mark.parametrize(("before", "folder", "after"), [
    ("see ", "work", "/x"), ("`", "home", "/me/data`"), ("(", "tmp", "/out)"), ("at ", "opt", "/venv/bin/python"),
])
def test_a_machine_path_is_found(before, folder, after):
    """Put together here, so that this file holds none."""
    assert machine_paths(before + "/" + folder + after)


@pytest.mark.parametrize("text", ["and/or", "https://a.org/home/x", "docs/work/x", "tokens/s", "../tmp/x"])
def test_other_slashes_are_not_machine_paths(text):
    assert machine_paths(text) == []
