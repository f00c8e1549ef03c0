"""The `dsflash` command: every sub-command calls one public function and draws what it returns.

Whatever loads JAX is imported inside the sub-commands: `list`, `roles`, `kv` and the help stay fast, and `dsflash run`
can set the number of CPU devices before JAX initialises its backend.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dsflash_jax.cache.accounting import POOL_SEQUENCES
from dsflash_jax.config_rules import CACHES
from dsflash_jax.shipped import config_path

USER_ERROR = 2
INTERRUPTED = 130
UNITS = {"": 1, "k": 1024, "m": 1024**2}
Json = Annotated[bool, tyro.conf.arg(name="json")]
Config = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
NAMES_SHOWN = 20  # of missing or unexpected tensors in a table
PIPE_WIDTH = 160  # rich assumes 80 columns where there is no terminal and would cut table cells


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns the exit status: 0, 1 (a comparison failed) or 2 (bad input, one sentence).

    `--traceback`, anywhere on the line, lets an error through with its traceback, for a bug report.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments
    if show_traceback:
        arguments.remove("--traceback")
    try:
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="dsflash",
            description=__doc__.splitlines()[0],
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter's last flush must not fail on what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, FloatingPointError) as error:  # the last: a loss or logits that are not finite
        if show_traceback:
            raise
        print(f"dsflash: {_sentence(error)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("dsflash: interrupted", file=sys.stderr)
        return INTERRUPTED


def roles(config: Config) -> int:
    """Print what every layer owns, reads and computes under CONFIG.

    Args:
        config: a configuration file, or the name of a shipped one (v41_flash, lab, tiny).
    """
    from dsflash_jax.config import ModelConfig
    from dsflash_jax.roles import roles_table

    rows = roles_table(ModelConfig.from_json(config_path(config)))
    first = ("layer", "label")
    shown = [{key: "" if value is False else value for key, value in row.items()} for row in rows]  # few are true
    _print_table(f"Layer roles of {config.stem}", [{**{key: row[key] for key in first}, **row} for row in shown])
    return 0


def kv(
    config: Config,
    context: Annotated[str | None, tyro.conf.arg(metavar="TOKENS")] = None,
    formats: Annotated[str, tyro.conf.arg(name="format", metavar="CACHE=NAME,...")] = "",
    sequences: int = POOL_SEQUENCES,
    as_json: Json = False,
) -> int:
    """Print the bytes of every cache under CONFIG, by layer and format, and the ratio to the alternatives.

    Args:
        config: a configuration file, or the name of a shipped one (v41_flash, lab, tiny).
        context: tokens of one sequence, as 1M; K and M mean 1,024 and 1,048,576. All that CONFIG allows without it.
        formats: formats that replace the configuration's, as `main=fp8_fp32,index=bf16,window=fp32`.
        sequences: sequences of that length that a pool holds.
        as_json: print the report as JSON instead of tables.
    """
    chosen = parse_formats(formats)
    tokens = None if context is None else parse_count(context)
    from dsflash_jax.cache.accounting import kv_report
    from dsflash_jax.config import ModelConfig

    cfg = ModelConfig.from_json(config_path(config))
    tokens = tokens or cfg.max_position_embeddings
    report = kv_report(cfg, tokens, chosen, sequences)
    instead = f" with {formats}" if formats else ""
    _print_report(report, as_json, f"KV cache of {config.stem}{instead} at {tokens:,} tokens")
    return 0


def parity(
    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")],
    case: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    mode: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    as_json: Json = False,
) -> int:
    """Compare every array of a golden folder with this model; exit 1 where one differs or none of the rules fits.

    Args:
        directory: folder with `CASE.MODE.npz` traces and `CASE.weights.npz`.
        case: one case, as `A_calm`; all without it.
        mode: one mode, as `f32`; all without it.
        as_json: print the report as JSON instead of a table.
    """
    from dsflash_jax.parity import run_parity

    report = run_parity(directory, case, mode)
    for row in report["rows"]:
        if "traceback" in row:
            print(f"{row['case']}: {row.pop('traceback')}", file=sys.stderr)
    _print_report(report, as_json, f"Parity with {directory.name}")
    return 0 if report["passed"] else 1


def run(
    study: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="STUDY")],
    quick: bool = False,
    full: bool = False,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    devices: int = 2,
) -> int:
    """Run a study and write its configuration, metrics, result, report and figures.

    Args:
        study: a name that `dsflash list` prints.
        quick: a check of the machinery in about a minute, marked `not a result`.
        full: every schedule with three seeds and the larger configuration; resumable.
        out: output folder; `results/STUDY/RUN-ID` without it.
        devices: CPU devices that share a training batch; ignored where JAX has an accelerator.
    """
    if quick and full:
        raise ValueError("--quick and --full exclude each other: --quick is a check, --full the committed result.")
    from experiments.registry import get_study

    chosen = get_study(study)
    from dsflash_jax.training.devices import use_cpu_devices

    use_cpu_devices(devices)
    with _Progress() as progress:
        folder = chosen.run("quick" if quick else "full" if full else "default", out, progress)
    print(folder)
    return 0


def list_studies() -> int:
    """Print the studies that `dsflash run` knows, each with its question."""
    from experiments.registry import STUDIES

    _print_table("Studies", [{"study": name, "question": study.question} for name, study in sorted(STUDIES.items())])
    return 0


def generate(
    checkpoint: Path,
    prompt: str,
    tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    speculate: Annotated[int, tyro.conf.arg(metavar="DRAFTS")] = 0,
) -> int:
    """Stream text from a checkpoint of `dsflash run`, through prefill and decode.

    Args:
        checkpoint: folder of a run, of its checkpoints, or one of them.
        prompt: the text to continue; `<k7>` and `<v12>` are the lab's key and value tokens.
        tokens: tokens to add at most.
        temperature: 0 takes the best token; above, samples.
        top_k: samples among that many best tokens; 0 takes all.
        top_p: samples among the best tokens that reach this probability; 1 takes all.
        seed: seed of the sampling.
        speculate: drafts to verify per step at most, with a model that has draft layers; 0 decodes token by token.
    """
    from dsflash_jax.lab_text import stream

    settings = {"top_k": top_k, "top_p": top_p, "speculate": speculate}
    for piece in stream(checkpoint, prompt, tokens, temperature, seed, **settings):
        print(piece, end="", flush=True)
    print()
    return 0


def bench(
    what: tyro.conf.Positional[Literal["model", "kernels"]] = "model",
    config: Annotated[Path | None, tyro.conf.arg(metavar="CONFIG")] = None,
    peer: Annotated[Literal["mlx-lm"] | None, tyro.conf.arg(metavar="mlx-lm")] = None,
    device: Annotated[str | None, tyro.conf.arg(metavar="SLUG")] = None,
    op: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    as_json: Json = False,
) -> int:
    """Time the model or its kernels on this machine, compile time apart, with the limit that each meets.

    Args:
        what: `model` times prefill and decode, `kernels` prints the roofline of every kernel and times what runs here.
        config: of `model`: a configuration file; the shape of the reference timings without it.
        peer: of `model`: `mlx-lm` runs the same shape in that library beside it, where installed.
        device: of `kernels`: whose data sheet the roofline is made with: h200 (without it), a100 or b200.
        op: of `kernels`: only this op.
        as_json: print the rows as JSON instead of tables.
    """
    options = {"model": {"config": config, "peer": peer}, "kernels": {"device": device, "op": op}}
    for other, given in options.items():
        for name, value in given.items():
            if other != what and value is not None:
                raise ValueError(f"--{name} is an option of `dsflash bench {other}`, not of `dsflash bench {what}`.")
    if what == "kernels":
        from experiments.artifacts import git_state
        from pallas_kernels.bench import kernel_report
        from pallas_kernels.common.devices import device_for

        report = kernel_report(device_for(device or "h200"), (op,) if op else (), (git_state() or {}).get("commit"))
        if not as_json:  # the same in every row
            for row in report["measured"]:
                del row["versions"], row["git_sha"]
        _print_report(report, as_json, "Kernels")
        return 0
    from dsflash_jax.bench import run_bench

    report = run_bench(config=None if config is None else config_path(config), peer=peer)
    _print_report(report, as_json, "Speed on this machine")
    return 0


def inspect(
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")],
    as_json: Json = False,
) -> int:
    """Print what a checkpoint folder holds and lacks (exit 1 if it is incomplete), or what a configuration asks for.

    Args:
        path: a checkpoint folder, a configuration file, or the name of a shipped one (v41_flash, lab, tiny).
        as_json: print the report, with all names, as JSON instead of tables.
    """
    from dsflash_jax.weights.inspect import inspect as report_on

    report = report_on(path if path.is_dir() else config_path(path))
    complete = report.get("complete", True)
    if not as_json:
        for kind in ("missing", "unexpected", "other_shape"):
            names = report.pop(kind, [])
            more = {"tensor": f"and {len(names) - NAMES_SHOWN:,} more"}
            report |= {kind: [{"tensor": n} for n in names[:NAMES_SHOWN]] + [more] * (len(names) > NAMES_SHOWN)}
        report = {key: value for key, value in report.items() if value != []}
    _print_report(report, as_json, f"Checkpoint {path.name}" if path.is_dir() else f"Parameters of {path.stem}")
    return 0 if complete else 1


COMMANDS: dict[str, Callable[..., int]] = {
    "roles": roles,
    "kv": kv,
    "parity": parity,
    "run": run,
    "list": list_studies,
    "generate": generate,
    "bench": bench,
    "inspect": inspect,
}


def parse_count(text: str) -> int:
    """`1M` -> 1,048,576, `64K` -> 65,536, `890` -> 890 (tokens). Raises ValueError otherwise."""
    match = re.fullmatch(r"([0-9][0-9_,]*)([km]?)", text.strip().lower())
    count = int(re.sub("[_,]", "", match[1])) * UNITS[match[2]] if match else 0
    if count < 1:
        raise ValueError(f"context={text!r} must be a positive number of tokens, with K or M behind it if wanted.")
    return count


def parse_formats(text: str) -> dict[str, str] | None:
    """`main=bf16,index=fp32` -> a dict; None for the empty text. Raises ValueError for another spelling."""
    if not text:
        return None
    formats: dict[str, str] = {}
    for part in text.split(","):
        cache, equals, name = (word.strip() for word in part.partition("="))
        if cache not in CACHES or not equals or not name or cache in formats:
            spelling = ",".join(f"{known}=NAME" for known in CACHES)
            raise ValueError(f"format={text!r} must be like {spelling}, each at most once.")
        formats[cache] = name
    return formats


def _sentence(error: Exception) -> str:
    """The error on one line; an error of the operating system as `file: reason`, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


class _Progress:
    """Draws `progress(label, done, total, **metrics)` of a study: a bar per label under way, a line per finished one.

    Without a terminal there are only the lines.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, label: str, done: int, total: int, **metrics: float | str) -> None:
        text = "  ".join(f"{name} {_cell(value)}" for name, value in metrics.items())
        if done >= total:
            if label in self._tasks:
                self._bar.remove_task(self._tasks.pop(label))
            self._console.print(f"{label}: {done}/{total}  {text}", markup=False, highlight=False, soft_wrap=True)
        elif self._console.is_terminal:
            if label not in self._tasks:
                self._tasks[label] = self._bar.add_task(label, total=total, metrics="")
            self._bar.update(self._tasks[label], completed=done, total=total, metrics=text)


class _Output(Console):
    """Leaves a closed pipe to `main`: rich itself would end the process with status 1, a failed comparison's."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console() -> Console:
    console = _Output()
    return console if console.is_terminal else _Output(width=PIPE_WIDTH)


def _cell(value: object) -> str:
    """A number with separators and at most four significant decimals; None as a dash; a list joined."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value)


def _print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """One table; the columns are the keys of the rows in order of appearance."""
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        values = [row.get(column) for row in rows]
        numbers = all(value is None or type(value) in (int, float) for value in values)
        table.add_column(column.replace("_", " "), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    _console().print(table)


def _print_report(report: Mapping[str, Any], as_json: bool, title: str) -> None:
    """JSON, or one table per list of rows and one for the plain values, nested groups below their own titles."""
    if as_json:
        print(json.dumps(report, indent=1))
        return
    plain = {key: value for key, value in report.items() if not _is_table(value) and not isinstance(value, Mapping)}
    if plain:
        _print_table(title, [{"fact": key.replace("_", " "), "value": _cell(value)} for key, value in plain.items()])
    for key, value in report.items():
        heading = key.replace("_", " ")
        if _is_table(value):
            _print_table(heading, value)
        elif isinstance(value, Mapping):
            _print_report(value, False, heading)


def _is_table(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


if __name__ == "__main__":
    sys.exit(main())
