"""Copies the part of a finished run that may be committed: `python -m experiments.evidence RUN [TARGET]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.artifacts import read_json, replacing
from experiments.gate import NOT_A_RESULT

FILES = ("report.md", "result.json", "config.json", "manifest.json")
MOST_BYTES = 300_000


def copy_evidence(run: Path, target: Path | None = None) -> list[Path]:
    """Copies report, result, configuration, manifest and figures of a run, and nothing else. Returns the new files.

    target: experiments/results/STUDY beside this module without it; figures that a run no longer has are removed there.
    Raises ValueError, having written nothing, for a run that is unfinished, no result, or too large to commit.
    """
    missing = [name for name in FILES if not (run / name).is_file()]
    if missing:
        raise ValueError(f"run={str(run)!r} has no {', '.join(missing)}: only a finished run is evidence.")
    result = read_json(run / "result.json")
    if result["status"] == NOT_A_RESULT:
        raise ValueError(f"run={str(run)!r} is marked {NOT_A_RESULT!r}: it cannot be evidence.")
    sources = [*(run / name for name in FILES), *sorted(run.glob("*.png"))]
    size = sum(source.stat().st_size for source in sources)
    if size > MOST_BYTES:
        raise ValueError(f"run={str(run)!r} has {size:,} bytes of evidence, at most {MOST_BYTES:,} are committed.")
    target = target or Path(__file__).parent / "results" / result["study"]
    target.mkdir(parents=True, exist_ok=True)
    for old in set(target.glob("*.png")) - {target / source.name for source in sources}:
        old.unlink()
    for source in sources:
        with replacing(target / source.name) as temporary:
            temporary.write_bytes(source.read_bytes())
    return [target / source.name for source in sources]


def main(arguments: Sequence[str]) -> int:
    """The command: prints the files copied, or one sentence and status 2."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m experiments.evidence RUN [TARGET]", file=sys.stderr)
        return 2
    try:
        copied = copy_evidence(*map(Path, arguments))
    except (ValueError, OSError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, copied)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
