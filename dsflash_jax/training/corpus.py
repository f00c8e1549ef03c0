"""Real text that every machine has: the standard library's sources and Python's own reference topics.

The text differs between interpreter versions, so every artefact records the corpus hash: bits per byte are
comparable only between runs with the same hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from dsflash_jax.training.vocabulary import DOCUMENT_BORDER, encode_bytes

# Installed only on some machines (separate packages of Linux distributions), generated tables, or not prose or code
# of the library itself. Leaving them out keeps the corpus the same wherever the interpreter version is the same.
_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "tkinter",
    "turtledemo", "ensurepip", "distutils", "encodings", "pydoc_data", "lib-dynload", "__phello__",
})
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize", "_distutils_hack")
_HELD_OUT_SHARE = 10  # one document in ten


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Text tokens split by document. train, held_out: uint8[N], documents divided by DOCUMENT_BORDER.

    sha256 covers document names, contents and their split; python names the interpreter the text came from.
    """

    train: np.ndarray
    held_out: np.ndarray
    sha256: str
    python: str
    train_documents: int
    held_out_documents: int

    def split(self, name: str) -> np.ndarray:
        """The tokens of "train" or "held_out"."""
        if name not in ("train", "held_out"):
            raise ValueError(f"corpus split={name!r} is unknown: use 'train' or 'held_out'.")
        return self.train if name == "train" else self.held_out

    def summary(self) -> dict:
        """What artefacts record about the corpus: hash, interpreter, sizes in tokens."""
        return {
            "sha256": self.sha256, "python": self.python,
            "train_tokens": int(self.train.size), "held_out_tokens": int(self.held_out.size),
            "train_documents": self.train_documents, "held_out_documents": self.held_out_documents,
        }


def python_corpus() -> Corpus:
    """The corpus of the running interpreter; about 8 M tokens, read in well under a second.

    Raises FileNotFoundError where the interpreter carries no .py files (a frozen or zipped standard library).
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = list(_library_sources(stdlib))
    if not sources:
        raise FileNotFoundError(
            f"stdlib={str(stdlib)!r} holds no .py files: use an interpreter with its library sources."
        )
    return build_corpus([*sources, *_reference_topics()])


def build_corpus(documents: Iterable[tuple[str, bytes]]) -> Corpus:
    """A corpus from (name, UTF-8 bytes) documents; independent of their order.

    A document's split depends on its name alone, so a file keeps its side across interpreter versions. A document
    whose content occurred before (in name order) is dropped, lest held-out text be a copy of training text.
    """
    digest, seen = hashlib.sha256(), set()
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for name, content in sorted(documents):
        fingerprint = hashlib.sha256(content).digest()
        if fingerprint in seen:
            continue
        seen.add(fingerprint)
        held_out = is_held_out(name)
        digest.update(f"{name}\0{int(held_out)}\0".encode() + fingerprint)
        parts[held_out].append(np.append(encode_bytes(content), np.uint8(DOCUMENT_BORDER)))
    if not parts[False] or not parts[True]:
        raise ValueError(
            f"corpus has {len(parts[False])} training and {len(parts[True])} held-out documents: "
            "each split needs at least one; add documents."
        )
    return Corpus(
        train=np.concatenate(parts[False]), held_out=np.concatenate(parts[True]), sha256=digest.hexdigest(),
        python=platform.python_version(), train_documents=len(parts[False]), held_out_documents=len(parts[True]),
    )


def is_held_out(name: str) -> bool:
    """Whether a document of this name is held out: one in ten, by a hash of the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _HELD_OUT_SHARE == 0


def _library_sources(stdlib: Path) -> Iterator[tuple[str, bytes]]:
    for folder, subfolders, files in os.walk(stdlib):
        subfolders[:] = [name for name in subfolders if not _skipped(name)]
        for file in files:
            if file.endswith(".py") and not _skipped(file):
                path = Path(folder, file)
                yield path.relative_to(stdlib).as_posix(), path.read_bytes()


def _reference_topics() -> Iterator[tuple[str, bytes]]:
    from pydoc_data.topics import topics  # half a megabyte of text: loaded only when a corpus is built

    for name, text in topics.items():
        yield f"pydoc_data/topics/{name}", text.encode()


def _skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)
