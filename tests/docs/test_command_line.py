"""The command line: spellings it takes, and one sentence with exit status 2 for what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsflash_jax import cli
from dsflash_jax.shipped import config_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "count"), [("1M", 1048576), ("64k", 65536), ("890", 890), ("1,024", 1024), ("1_000", 1000)]
)
def test_counts(text, count):
    assert cli.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5M", "M", "1G", "ten"])
def test_other_counts_are_refused(text):
    with pytest.raises(ValueError, match="context="):
        cli.parse_count(text)


def test_formats():
    assert cli.parse_formats("") is None
    assert cli.parse_formats("main=bf16, window=fp32") == {"main": "bf16", "window": "fp32"}


@pytest.mark.parametrize("text", ["bf16", "main=", "main", "other=bf16", "main=bf16,main=fp32", "main=bf16,"])
def test_other_formats_are_refused(text):
    with pytest.raises(ValueError, match="format="):
        cli.parse_formats(text)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["roles", "no_such_config"], "no_such_config"),
        (["kv", "configs/v41_flash.json", "--context", "many"], "many"),
        (["kv", "configs/v41_flash.json", "--format", "main=nonsense"], "nonsense"),
        (["kv", "README.md"], "README.md"),
        (["run", "compress-ratio", "--quick", "--full"], "--full"),
        (["run", "compress-ratio", "--devices", "0"], "devices=0"),
        (["run", "no-such-study"], "no-such-study"),
        (["parity", "no/such/folder"], "no/such/folder"),
        (["generate", "--checkpoint", "no/such/folder", "--prompt", "x"], "no/such/folder"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, word, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dsflash: ") and word in printed.err
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err


def test_traceback_is_shown_when_asked_for():
    with pytest.raises(FileNotFoundError, match="no_such_config"):
        cli.main(["--traceback", "roles", "no_such_config"])


def test_an_unknown_sub_command_names_the_known_ones(capfd):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["rolls"])
    assert stopped.value.code == 2
    printed = capfd.readouterr().err
    assert [name for name in cli.COMMANDS if name not in printed] == []


def test_shipped_configurations_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_path("v41_flash").name == "v41_flash.json"
    (tmp_path / "v41_flash").write_text("{}")  # a file of that name goes first
    assert config_path("v41_flash") == Path("v41_flash")


def test_a_reader_that_stops_early_is_no_error():
    """`dsflash kv v41_flash | head -1`: status 0 and nothing on stderr, whatever is still buffered."""
    program = "import sys\nfrom dsflash_jax.cli import main\nsys.exit(main(['kv', 'v41_flash', '--context', '1M']))"
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "line", ["list", "roles v41_flash", "kv v41_flash --context 1M --json", "kv tiny --format main=bf16", "--help"]
)
def test_commands_that_compute_nothing_do_not_load_jax(line):
    program = (
        "import sys\nfrom dsflash_jax.cli import main\n"
        "try:\n    status = main(sys.argv[1:])\nexcept SystemExit as stopped:\n    status = stopped.code\n"
        "assert status == 0 and 'jax' not in sys.modules"
    )
    command = [sys.executable, "-c", program, *line.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_without_a_terminal_progress_is_a_line_per_finished_label(capsys):
    with cli._Progress() as progress:
        for done in range(3):
            progress("cell [a]", done, 2, loss=1.23456)
        progress("study", 1, 1, gate="not learned")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["cell [a]: 2/2  loss 1.235", "study: 1/1  gate not learned"]
