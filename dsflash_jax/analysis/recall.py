"""Recall by distance and by alignment, bits per byte and indexer coverage, computed from per-token records."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

BUCKETS = ("near", "mid", "relay", "far")
ALIGNMENTS = ("aligned", "split")


@dataclasses.dataclass(frozen=True)
class LagBuckets:
    """Distance classes of a lag in tokens, from the asking key back to its last occurrence.

    near: the pair lies inside the window of the asking token. mid: up to two windows. relay: farther, yet the answer
    can still travel through stacked windows. far: only the global branch can fetch it.
    Each field is the largest lag of its class.
    """

    near: int
    mid: int
    relay: int

    @classmethod
    def for_model(cls, window: int, layers: int) -> LagBuckets:
        """Buckets of a model. Each layer carries a value window - 1 tokens on, a token shift at the embedding one more.

        The value stands one token after its key, hence the + 2.
        """
        return cls(near=window - 1, mid=2 * window, relay=max(2 * window, layers * (window - 1) + 2))

    def of(self, lag: np.ndarray) -> np.ndarray:
        """Index into BUCKETS for each lag, int; lags are positive."""
        return np.searchsorted([self.near, self.mid, self.relay], lag, side="left")


class Share(NamedTuple):
    """Correct answers out of a count; value is None where nothing was asked, so that no cell invents a zero."""

    correct: int
    asked: int

    @property
    def value(self) -> float | None:
        return self.correct / self.asked if self.asked else None

    def as_json(self) -> dict:
        return {"value": self.value, "correct": self.correct, "asked": self.asked}


class Recall(NamedTuple):
    """Recall of one evaluation: over everything, by distance, by alignment, and by both."""

    overall: Share
    by_bucket: dict[str, Share]
    by_alignment: dict[str, Share]
    by_both: dict[str, dict[str, Share]]  # bucket -> alignment -> share

    def as_json(self) -> dict:
        return {
            "overall": self.overall.as_json(),
            "by_bucket": {name: share.as_json() for name, share in self.by_bucket.items()},
            "by_alignment": {name: share.as_json() for name, share in self.by_alignment.items()},
            "by_both": {
                bucket: {name: share.as_json() for name, share in row.items()} for bucket, row in self.by_both.items()
            },
        }


def recall(correct, asked, lag, aligned, buckets: LagBuckets) -> Recall:
    """Recall by distance bucket and alignment.

    correct, asked, aligned: bool[B, T]; lag: int[B, T], read only where asked.
    "aligned": the pair recalled lies within a group of two tokens; "split": across two groups.
    """
    correct, asked, lag, aligned = (np.asarray(array) for array in (correct, asked, lag, aligned))
    asked = asked.astype(bool)
    bucket = buckets.of(np.where(asked, lag, 1))

    def share(where) -> Share:
        chosen = asked & where
        return Share(int(np.sum(correct & chosen)), int(np.sum(chosen)))

    sides = dict(zip(ALIGNMENTS, (aligned.astype(bool), ~aligned.astype(bool)), strict=True))
    return Recall(
        overall=share(True),
        by_bucket={name: share(bucket == index) for index, name in enumerate(BUCKETS)},
        by_alignment={name: share(side) for name, side in sides.items()},
        by_both={
            name: {side_name: share((bucket == index) & side) for side_name, side in sides.items()}
            for index, name in enumerate(BUCKETS)
        },
    )


def recall_by_lag(correct, asked, lag, edges) -> list[dict]:
    """Recall in bins of lag, for a curve: bin i holds edges[i] <= lag < edges[i + 1]."""
    correct, asked, lag = np.asarray(correct), np.asarray(asked).astype(bool), np.asarray(lag)
    rows = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        chosen = asked & (lag >= low) & (lag < high)
        share = Share(int(np.sum(correct & chosen)), int(np.sum(chosen)))
        rows.append({"lag_from": int(low), "lag_to": int(high), **share.as_json()})
    return rows


def bits_per_byte(nll, text_mask) -> float | None:
    """Mean negative log-likelihood (nats per token) over text positions, in bits; one text token is one byte.

    A character outside ASCII is one token here (see training.vocabulary), so it counts as one byte.
    """
    mask = np.asarray(text_mask).astype(bool)
    if not mask.any():
        return None
    return float(np.asarray(nll, np.float64)[mask].mean() / math.log(2.0))


def coverage_summary(coverage) -> dict:
    """Indexer coverage [.., layers with a global branch]: mean per layer, their mean and their maximum.

    The mean alone misleads: one carrying layer may hold .98 while others show .01 and the task is solved.
    """
    coverage = np.asarray(coverage, np.float64)
    if coverage.shape[-1] == 0:
        return {"per_layer": [], "mean": None, "max": None}
    per_layer = coverage.reshape(-1, coverage.shape[-1]).mean(axis=0)
    return {"per_layer": per_layer.tolist(), "mean": float(per_layer.mean()), "max": float(per_layer.max())}
