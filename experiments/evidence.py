"""Copies the part of a finished run that may be committed, and writes the README's results from it.

`python -m experiments.evidence RUN` fills experiments/results/STUDY, and for the compress-ratio study the README;
`python -m experiments.evidence RUN TARGET` fills another folder and leaves the README alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.artifacts import read_json, replacing
from experiments.gate import NOT_A_RESULT

FILES = ("report.md", "result.json", "config.json", "manifest.json")
MOST_BYTES = 450_000  # of a repository that is cloned more often than it is read: 23 models with their raw rows fit
IN_README = "compress-ratio"  # the study whose results the README shows as a block
ROOT = Path(__file__).resolve().parents[1]


def copy_evidence(run: Path, target: Path | None = None) -> list[Path]:
    """Copies report, result, configuration, manifest and figures of a run, and nothing else. Returns the new files.

    target: experiments/results/STUDY beside this module without it; figures that a run no longer has are removed there.
    Raises ValueError, having written nothing, for a run that is unfinished, no result, made from code that no commit
    holds, or too large to commit.
    """
    missing = [name for name in FILES if not (run / name).is_file()]
    if missing:
        raise ValueError(f"run={str(run)!r} has no {', '.join(missing)}: only a finished run is evidence.")
    result = read_json(run / "result.json")
    if result["status"] == NOT_A_RESULT:
        raise ValueError(f"run={str(run)!r} is marked {NOT_A_RESULT!r}: it cannot be evidence.")
    _refuse_unknown_code(run, read_json(run / "manifest.json")["sessions"])
    sources = [*(run / name for name in FILES), *sorted(run.glob("*.png"))]
    size = sum(source.stat().st_size for source in sources)
    if size > MOST_BYTES:
        raise ValueError(f"run={str(run)!r} has {size:,} bytes of evidence, at most {MOST_BYTES:,} are committed.")
    target = target or _home(result["study"])
    target.mkdir(parents=True, exist_ok=True)
    for old in set(target.glob("*.png")) - {target / source.name for source in sources}:
        old.unlink()
    for source in sources:
        with replacing(target / source.name) as temporary:
            temporary.write_bytes(source.read_bytes())
    return [target / source.name for source in sources]


def _home(study: str) -> Path:
    return ROOT / "experiments" / "results" / study


def _refuse_unknown_code(run: Path, sessions: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless every session worked from a commit: nobody could repeat the others."""
    for number, session in enumerate(sessions, 1):
        if session["git"] is None:
            raise ValueError(f"run={str(run)!r} session {number} was made outside a checkout: its commit is unknown.")
        if session["git"]["modified"]:
            raise ValueError(
                f"run={str(run)!r} session {number} was made from a modified tree (commit "
                f"{session['git']['commit'][:12]} with local changes): commit first, then run."
            )


def main(arguments: Sequence[str]) -> int:
    """The command: prints the files written, or one sentence and status 2."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m experiments.evidence RUN [TARGET]", file=sys.stderr)
        return 2
    try:
        written = copy_evidence(*map(Path, arguments))
        if len(arguments) == 1 and written[0].parent == _home(IN_README):
            from experiments.readme import update_readme  # the study, hence JAX: a copy needs neither

            written.append(update_readme(ROOT / "README.md", written[0].parent))
    except (ValueError, OSError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
