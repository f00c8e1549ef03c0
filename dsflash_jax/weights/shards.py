"""Reading safetensors shards and their index: headers at once, tensors one at a time, rows straight from the file.

The `safetensors` library would be the natural reader, but its NumPy side (0.8) has no FP8 and no bfloat16; its other
sides need a framework that this package does not use. The format is small: an 8-byte little-endian header length, a
JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
# Bytes of an element, smallest first in the order in which the format's own library sorts tensors.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
# What is read as values; codes and scales stay raw bytes.
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BYTES = ("U8", "I8", "F8_E4M3", "F8_E8M0")
CHUNK_BYTES = 2**24  # of a tensor in memory at once while it is copied
_MOST_HEADER_BYTES = 10**8  # the limit of the format's own library


class TensorInfo(NamedTuple):
    """Where a tensor lies: file, its name for the element type, shape, first byte in the file."""

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def rows(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows first..last of the leading axis, mapped from the file and read-only; raw bytes for FP8, FP4 and scales.

        Raises ValueError for an element type that is none of a released checkpoint.
        """
        dtype = FLOATS.get(self.dtype) or (np.dtype(np.uint8) if self.dtype in BYTES else None)
        if dtype is None:
            known = ", ".join((*FLOATS, *BYTES))
            raise ValueError(f"{self.name} in {self.file.name}: dtype {self.dtype} must be one of {known}.")
        if not self.shape:
            return np.memmap(self.file, dtype, "r", self.start, (1,))[0]
        last = self.shape[0] if last is None else last
        shape = (last - first, *self.shape[1:])
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(self.file, dtype, "r", self.start + first * math.prod(shape[1:]) * dtype.itemsize, shape)

    def chunks(self, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Borders (first, last) of row ranges of about `CHUNK_BYTES`; inner borders are multiples of `multiple`."""
        count = self.shape[0]
        rows = max(CHUNK_BYTES // max(self.nbytes // max(count, 1), 1) // multiple, 1) * multiple
        for first in range(0, count, rows):
            yield first, min(first + rows, count)


def open_checkpoint(folder: pathlib.Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint folder, from the headers alone.

    With an index the index decides: each name must lie in the shard that it names, and each tensor of these shards must
    be in it. Without one all `*.safetensors` files are read. Raises ValueError naming tensor and file otherwise.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds neither {INDEX_NAME} nor a safetensors file.")
    return _merge(read_header(file) for file in files)


def _indexed(folder: pathlib.Path, index: pathlib.Path) -> dict[str, TensorInfo]:
    raw = _json(index.read_bytes(), index.name)
    places = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index.name}: weight_map must give a file name for every tensor.")
    for name, file in places.items():
        if pathlib.PurePath(file).name != file:
            raise ValueError(f"{index.name}: {name} is said to be in {file!r}, which is not a file name.")
        if not (folder / file).is_file():
            raise ValueError(f"{index.name}: {name} is said to be in {file}, which is not in {folder}.")
    tensors = _merge(read_header(folder / file) for file in sorted(set(places.values())))
    for name, file in places.items():
        if name not in tensors:
            raise ValueError(f"{index.name}: {name} is said to be in {file}, which does not hold it.")
        if tensors[name].file.name != file:
            raise ValueError(f"{index.name}: {name} is said to be in {file}, but is in {tensors[name].file.name}.")
    for name, info in tensors.items():
        if name not in places:
            raise ValueError(f"{info.file.name}: {name} is not in {index.name}.")
    return tensors


def _merge(headers: Iterator[dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.items():
            if name in tensors:
                raise ValueError(f"{name} is in {tensors[name].file.name} and again in {info.file.name}.")
            tensors[name] = info
    return tensors


def read_header(file: pathlib.Path) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises ValueError for a damaged header, and for data that is cut off or has holes."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"{file.name}: {size} bytes do not hold the header of {length} bytes that it begins with.")
        header = _json(stream.read(length), file.name)
    if not isinstance(header, dict):
        raise ValueError(f"{file.name}: the header must be a JSON object.")
    header.pop("__metadata__", None)
    tensors, used = {}, 0
    spans = sorted((_span(name, entry, file), name) for name, entry in header.items())
    for (first, last), name in spans:
        info = TensorInfo(name, file, header[name]["dtype"], tuple(header[name]["shape"]), 8 + length + first)
        if last - first != info.nbytes:
            has = f"{last - first} bytes for shape {list(info.shape)} of {info.dtype}"
            raise ValueError(f"{file.name}: {name} has {has}, which needs {info.nbytes}.")
        if first != used:
            raise ValueError(f"{file.name}: {name} begins at byte {first} of the data, where {used} is expected.")
        if info.start + info.nbytes > size:
            lacking = info.start + info.nbytes - size
            raise ValueError(f"{file.name}: {name} is cut off: {lacking} of its bytes are beyond the end of the file.")
        tensors[name], used = info, last
    if 8 + length + used != size:
        raise ValueError(f"{file.name}: {size - 8 - length - used} bytes behind the last tensor belong to none.")
    return tensors


def _span(name: str, entry: Any, file: pathlib.Path) -> tuple[int, int]:
    """The checked data offsets of a header entry."""

    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    if not isinstance(entry, Mapping) or not counts(entry.get("shape")) or not counts(entry.get("data_offsets")):
        raise ValueError(f"{file.name}: {name} needs dtype, shape and data_offsets in the header.")
    if entry.get("dtype") not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ValueError(f"{file.name}: {name} has dtype {entry.get('dtype')!r}, must be one of {known}.")
    if len(entry["data_offsets"]) != 2:
        raise ValueError(f"{file.name}: {name} has data_offsets {entry['data_offsets']}, must be first and last byte.")
    return tuple(entry["data_offsets"])


def _json(data: bytes, name: str) -> Any:
    """Parsed JSON in which no key stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{name}: {key} stands twice in its header.")
            found[key] = value
        return found

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: not readable as JSON ({error}).") from None
