"""The studies that `dsflash run` knows. Imports no JAX: `dsflash list` is instant, and a run may still set devices."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

MODES = ("quick", "default", "full")


@dataclasses.dataclass(frozen=True)
class Study:
    """A study: its name, the question it answers, and the module whose `run(mode, out, progress)` answers it."""

    name: str
    question: str
    module: str

    def run(self, mode: str, out: Path | None, progress: Callable[..., None]) -> Path:
        """Runs the study and returns its output folder.

        mode: "quick" (a check, not a result), "default" or "full". out: the folder, None for results/STUDY/RUN-ID.
        progress: called as progress(label, done, total, **metrics). Raises ValueError for an unknown mode and for a
        folder that cannot be used, before any work.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}.")
        return importlib.import_module(self.module).run(mode, out, progress)


STUDIES: Mapping[str, Study] = MappingProxyType({
    "compress-ratio": Study(
        "compress-ratio",
        "What does each compress ratio cost in recall, and save in bytes?",
        "experiments.compress_ratio",
    ),
    "decoder-replay": Study(
        "decoder-replay",
        "What does running the decoder on the end of a prompt only change, and how much prefill time does it save?",
        "experiments.decoder_replay",
    ),
    "speculation": Study(
        "speculation",
        "How many drafts does a small trained model accept, do its confidences come true, and when does it pay?",
        "experiments.speculation",
    ),
})


def get_study(name: str) -> Study:
    """The study of that name. Raises ValueError naming the unknown one and the known ones."""
    if name not in STUDIES:
        raise ValueError(f"study={name!r} is unknown: must be one of {', '.join(sorted(STUDIES))}.")
    return STUDIES[name]
