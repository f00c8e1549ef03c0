"""Where the shipped configurations lie: configs/ of a checkout, or the copy inside an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # a wheel has the first, a checkout the second


def config_path(name: str | Path) -> Path:
    """The file `name` if there is one, else the shipped configuration of that name (`lab`, `lab.json`).

    Raises:
      FileNotFoundError: neither exists; the sentence lists the shipped names.
    """
    given = Path(name)
    if given.is_file():
        return given
    for place in _PLACES:
        for candidate in (place / given, place / f"{given}.json"):
            if candidate.is_file():
                return candidate
    known = sorted({path.stem for place in _PLACES for path in place.glob("*.json")})
    raise FileNotFoundError(f"config {str(name)!r} is neither a file nor a shipped configuration ({', '.join(known)}).")
