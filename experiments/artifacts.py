"""Files of a run: its folder, what it records about its surroundings, and writing that never leaves half a file."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsflash_jax.training.checkpoints import check_writable

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "matplotlib")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; becomes `path` when the block ends well, and disappears when it does not."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp's 0600 would survive the rename
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Writes a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> Path:
    """Writes a JSON file whole or not at all. Raises ValueError for NaN and infinity, which JSON has not."""
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_rows(path: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes {**head, "rows": rows} as JSON with a line per row: small, and a change of one row is one line."""
    frame = json.dumps({**head, "rows": []}, indent=1, allow_nan=False)
    lines = [json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows]
    body = ",\n".join(f"  {line}" for line in lines)
    return write_text(path, frame.removesuffix("[]\n}") + f"[\n{body}\n ]\n}}\n")


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises ValueError naming the file where it holds no JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error}).") from None


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def open_folder(out: Path | None, root: Path, plan: Mapping[str, Any], *, resume: bool) -> Path:
    """The folder of a run, writable, with `plan` as its config.json. Nothing is written where it refuses.

    out: the folder wanted; None for a new one under `root`, named by date, time and plan, or with `resume` the newest
    unfinished one of the same plan. A folder that holds the same plan is continued.

    Raises ValueError for a folder that cannot be written, or that holds anything else.
    """
    found = _unfinished(root, plan) if out is None and resume else None
    folder = out or found or root / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{fingerprint(plan)[:8]}"
    _refuse_other_contents(folder, plan)
    check_writable(folder)
    write_json(folder / "config.json", plan)
    return folder


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds the folder for this process: two runs in one folder would write the same files.

    The claim ends with the process, also with a killed one. Raises ValueError where another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out={str(folder)!r} is being worked on by another run: choose another folder.") from None
        except OSError:  # a file system that cannot lock a folder: nothing is promised there
            pass
        yield
    finally:
        os.close(handle)


def _unfinished(root: Path, plan: Mapping[str, Any]) -> Path | None:
    """The newest folder under `root` that holds an unfinished run of `plan` on which no other process works."""
    if not root.is_dir():
        return None
    for folder in sorted(root.iterdir(), reverse=True):
        if (folder / "result.json").exists():
            continue
        with contextlib.suppress(ValueError, OSError):  # no run, a damaged one, or claimed: not ours to continue
            if fingerprint(read_json(folder / "config.json")) == fingerprint(plan):
                with claimed(folder):
                    return folder
    return None


def _refuse_other_contents(folder: Path, plan: Mapping[str, Any]) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / "config.json").is_file():
        raise ValueError(f"out={str(folder)!r} is not empty and holds no run of a study: choose another folder.")
    there = read_json(folder / "config.json")
    if not isinstance(there, dict):
        raise ValueError(f"out={str(folder)!r} holds a config.json that is no run's: choose another folder.")
    if fingerprint(there) != fingerprint(plan):
        names = [name for name in {**there, **plan} if there.get(name) != plan.get(name)]
        raise ValueError(
            f"out={str(folder)!r} holds another run, which differs in {', '.join(names)}: choose another folder."
        )


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """manifest.json: `facts`, versions and machine, and one entry per session that worked on the run. Returns it.

    A session notes when it started and at which commit; `note_time` adds how long it worked and when it finished.
    """
    path = folder / "manifest.json"
    before = read_json(path)["sessions"] if path.exists() else []
    session = {"started": _now(), "git": git_state(), "elapsed_seconds": None, "finished": None}
    manifest = {**facts, "versions": versions(), "machine": machine(), "sessions": [*before, session]}
    write_json(path, manifest)
    return manifest


def note_time(folder: Path, seconds: float, *, finished: bool = False) -> dict[str, Any]:
    """Notes in the last session of manifest.json how long it has worked, so that a killed one leaves a lower bound.

    finished: the run ends here. Returns the manifest.
    """
    manifest = read_json(folder / "manifest.json")
    manifest["sessions"][-1] |= {"elapsed_seconds": round(seconds, 1), "finished": _now() if finished else None}
    write_json(folder / "manifest.json", manifest)
    return manifest


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that numbers may depend on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """What timings depend on; no names and no paths."""
    import jax

    return {
        "system": platform.system(), "architecture": platform.machine(), "processor": _processor(),
        "cores": os.cpu_count(), "jax_backend": jax.default_backend(), "jax_devices": len(jax.devices()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):  # only Linux has the file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout and whether tracked files differ from it; None outside a checkout of this project."""
    here = Path(__file__)

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie inside somebody else's checkout
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
