"""Checkpoints of a run: an Orbax tree and the facts that decide who may load it, in folders that appear whole.

A checkpoint is the folder `step_00000400` holding `state/` (arrays, exact) and `facts/` (JSON: model configuration and
its hash, run settings, corpus, devices). Orbax writes under a temporary name and renames, so a folder of that name is
complete; leftovers of an interrupted save carry another name and are never read.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from dsflash_jax.config import with_later_fields

_NAME = re.compile(r"step_(\d{8})")


class Checkpoint(NamedTuple):
    """One loaded checkpoint: its step, the tree of numpy arrays and the facts stored with it."""

    step: int
    tree: Any
    facts: dict[str, Any]


def check_writable(folder: Path) -> Path:
    """Creates the folder and proves that a file can be written there, before any work is spent.

    Raises ValueError naming the folder and the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out={str(folder)!r} cannot be written ({error.strerror}): choose another folder.") from None
    return folder


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def save(folder: Path, step: int, tree: Any, facts: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes one checkpoint and drops all but the newest `keep`. Returns its path; an existing one is left as it is."""
    path = _path(folder, step)
    if not path.exists():
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
            writer.save(path, args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(jax.tree.map(np.asarray, jax.device_get(tree))),
                facts=ocp.args.JsonSave(dict(facts)),
            ))
    for old in saved_steps(folder)[:-keep]:
        shutil.rmtree(_path(folder, old))
    return path


def load(folder: Path, like: Any, facts: Mapping[str, Any], step: int | None = None) -> Checkpoint:
    """The newest checkpoint (or that of `step`) in the structure of `like` (arrays or ShapeDtypeStructs).

    Raises FileNotFoundError when there is none, ValueError when it belongs to other facts: each differing field is
    named with both values.
    """
    path, step = _find(folder, step)
    stored = load_facts(path)
    refuse_other_facts(path, stored, facts)
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    return Checkpoint(step, _restore(path, target), stored)


def load_plain(folder: Path, step: int | None = None) -> Checkpoint:
    """The newest checkpoint (or that of `step`) as nested dicts and lists, without knowing its structure.

    `folder` may be the folder of checkpoints or one checkpoint. Raises FileNotFoundError when there is none.
    """
    if _NAME.fullmatch(folder.name) and step is None and (folder / "facts").is_dir():
        folder, step = folder.parent, int(_NAME.fullmatch(folder.name)[1])
    path, step = _find(folder, step)
    return Checkpoint(step, _integer_keys(_restore(path, None)), load_facts(path))


def load_facts(path: Path) -> dict[str, Any]:
    """The facts stored in one checkpoint."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(path.absolute(), args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]


def refuse_other_facts(path: Path, stored: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError naming every field in which the stored facts differ from those here.

    Fields of the configuration that came after the checkpoint count as stored at their defaults.
    """
    there, mine = (_flat(_with_all_fields(facts)) for facts in (stored, here))
    missing = object()
    fields = [name for name in sorted({*there, *mine}) if there.get(name, missing) != mine.get(name, missing)]
    if not fields:
        return
    # The hash differs whenever a field does: it is worth a mention only where nothing explains it.
    named = [name for name in fields if not name.endswith("sha256")] or fields
    listed = "; ".join(f"{name} is {there.get(name, '-')} there, {mine.get(name, '-')} here" for name in named)
    raise ValueError(
        f"checkpoint {str(path)!r} belongs to another run: {listed}. Use the same settings or another folder."
    )


def _path(folder: Path, step: int) -> Path:
    return folder.absolute() / f"step_{step:08d}"


def _find(folder: Path, step: int | None) -> tuple[Path, int]:
    steps = saved_steps(folder)
    if not steps:
        raise FileNotFoundError(f"checkpoint folder {str(folder)!r} holds no complete checkpoint (step_NNNNNNNN).")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"checkpoint step={step} is not in {str(folder)!r}, which holds {steps}.")
    chosen = steps[-1] if step is None else step
    return _path(folder, chosen), chosen


def _restore(path: Path, target: Any) -> Any:
    """Arrays as numpy, whatever devices wrote them: placing them is the caller's business."""
    handler = ocp.PyTreeCheckpointHandler()
    shape = handler.metadata(path / "state").tree if target is None else target
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shape)
    with ocp.Checkpointer(handler) as reader:
        restored = reader.restore(path / "state", args=ocp.args.PyTreeRestore(item=target, restore_args=as_numpy))
    return jax.tree.map(np.asarray, restored)


def _integer_keys(tree: Any) -> Any:
    """Layer numbers, which Orbax stores as text, as the integers they were."""
    if isinstance(tree, Mapping):
        numbered = bool(tree) and all(isinstance(key, str) and key.isdecimal() for key in tree)
        return {int(key) if numbered else key: _integer_keys(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_integer_keys(value) for value in tree]
    return tree


def _with_all_fields(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: with_later_fields(value) if name == "config" else value for name, value in facts.items()}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; sequences as lists, since JSON has no tuples."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
