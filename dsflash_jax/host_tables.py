"""N-gram tables that stay on the host: a step brings the packed rows that it reads, each of them once. No JAX.

A table may be a memory map: only the rows that are asked for are read. `prefetch` reads ahead on a thread, while the
device is busy with the chunk before; `fetch` is right with it and without it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsflash_jax.config import ModelConfig
from dsflash_jax.config_rules import QUANT_BLOCK
from dsflash_jax.types import NgramRows, StepInfo

_Read = list[tuple[np.ndarray, np.ndarray]]  # per layer: distinct row numbers, ascending, and their packed bytes


class HostTables:
    """The tables of all Engram layers of a model. Not for threads, but for the one it reads ahead on."""

    def __init__(self, cfg: ModelConfig, tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """tables: per Engram layer (codes uint8[rows, width], scales uint8[rows, width / 32]); kept, not copied.

        Raises ValueError for tables of another number or shape than those of `cfg`, naming the tensor.
        """
        if len(tables) != len(cfg.engram_layer_ids):
            rule = f"must be one for each of engram_layer_ids={list(cfg.engram_layer_ids)}"
            raise ValueError(f"tables: {len(tables)} given, {rule}.")
        width = cfg.engram_head_dim
        for layer, rows, table in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, tables, strict=True):
            for part, have, columns in zip(("weight", "scale"), table, (width, width // QUANT_BLOCK), strict=True):
                if have.shape != (rows, columns) or have.dtype != np.uint8:
                    name = f"layers.{layer}.engram.embed.{part}"
                    raise ValueError(f"{name} of type {have.dtype}{list(have.shape)} must be uint8[{rows}, {columns}].")
        self._tables = tuple(tables)
        self._row_bytes = width + width // QUANT_BLOCK
        self._ahead: concurrent.futures.Future[_Read] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ngram-tables")

    @classmethod
    def take(cls, params: Mapping[str, Any], cfg: ModelConfig) -> tuple[dict[str, Any], HostTables]:
        """(parameters without the tables, the tables as host arrays)."""
        layers, tables = dict(params["layers"]), []
        for layer in cfg.engram_layer_ids:
            engram = dict(layers[layer]["engram"])
            table = engram.pop("embed")
            tables.append((np.asarray(table["weight"]), np.asarray(table["scale"])))
            layers[layer] = {**layers[layer], "engram": engram}
        return {**params, "layers": layers}, cls(cfg, tables)

    def prefetch(self, rows: np.ndarray) -> None:
        """Starts to read the rows int[T, L, C] (-1 = none) that the next `fetch` will probably ask for."""
        self._ahead = self._thread.submit(self._read, _distinct(rows))

    def fetch(self, step: StepInfo) -> StepInfo:
        """The step with its rows fetched: `ngrams.index` then counts in uint8[L, U, row bytes] of distinct rows.

        U is T times C however few rows are distinct, so that steps of T rows compile once: what is saved is reading.
        Raises what reading a table raises, also what the reading ahead met.
        """
        index = np.asarray(step.ngrams.index)
        distinct, ahead = _distinct(index), self._take_ahead()
        fetched = np.zeros((index.shape[1], index.shape[0] * index.shape[2], self._row_bytes), np.uint8)
        for layer, (numbers, (known, packed)) in enumerate(zip(distinct, ahead, strict=True)):
            there = np.isin(numbers, known, assume_unique=True)
            out = fetched[layer, : len(numbers)]
            out[there] = packed[np.searchsorted(known, numbers[there])]
            out[~there] = self._packed(layer, numbers[~there])
        return dataclasses.replace(step, ngrams=NgramRows(_renumbered(index, distinct), fetched))

    def close(self) -> None:
        """Ends the thread; tables that are no longer used by anyone need not be closed."""
        self._thread.shutdown(cancel_futures=True)

    def _take_ahead(self) -> _Read:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._read([np.zeros(0, np.int64)] * len(self._tables))
        return ahead.result()

    def _read(self, distinct: list[np.ndarray]) -> _Read:
        return [(numbers, self._packed(layer, numbers)) for layer, numbers in enumerate(distinct)]

    def _packed(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        """uint8[len(numbers), row bytes]; ascending numbers, so that a memory map is read in order."""
        return np.concatenate([part[numbers] for part in self._tables[layer]], axis=1)


def _distinct(rows: np.ndarray) -> list[np.ndarray]:
    """Per layer the row numbers of int[T, L, C], each once, ascending, without -1."""
    each = [np.unique(rows[:, layer]) for layer in range(rows.shape[1])]
    return [numbers[numbers >= 0] for numbers in each]


def _renumbered(index: np.ndarray, distinct: list[np.ndarray]) -> np.ndarray:
    """int32[T, L, C]: places among the distinct rows; -1 stays."""
    places = [np.searchsorted(numbers, index[:, layer]) for layer, numbers in enumerate(distinct)]
    return np.where(index >= 0, np.stack(places, axis=1), -1).astype(np.int32)
