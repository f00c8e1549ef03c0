"""Recall by distance and by alignment, its intervals and guessing floors, bits per byte and indexer coverage.

Everything is computed from per-token records.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BUCKETS = ("near", "mid", "relay", "far")
ALIGNMENTS = ("aligned", "split")
_BINS = (2, 2, 3, 4)  # of a recall curve, per class of distance: enough to see a slope, each with answers enough
_Z95 = 1.959964  # of a normal distribution: 95 % lie within so many standard deviations


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

    def edges(self, context: int) -> list[int]:
        """Borders of the bins of a recall curve up to lag `context`: those of the classes are among them.

        Bin i holds edges[i] <= lag < edges[i + 1]; no bin mixes two classes.
        """
        ends = [min(end, context) for end in (0, self.near, self.mid, self.relay, context)]
        cuts = {1, context + 1}
        for (low, high), bins in zip(itertools.pairwise(ends), _BINS, strict=True):
            cuts |= {round(float(cut)) + 1 for cut in np.linspace(low, high, bins + 1)}
        return sorted(cuts)


class Share(NamedTuple):
    """Correct answers out of a count; value is None where nothing was asked, so that no cell invents a zero."""

    correct: int
    asked: int

    @property
    def value(self) -> float | None:
        return self.correct / self.asked if self.asked else None

    def as_json(self) -> dict:
        return {"value": self.value, "correct": self.correct, "asked": self.asked}


class Interval(NamedTuple):
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(correct: int, asked: int) -> Interval | None:
    """A share and its 95 % interval after Wilson, which stays within 0 to 1; None where nothing was asked.

    It takes answers as independent; answers of one row are not quite, so it is a little too narrow.
    """
    if not asked:
        return None
    share, square = correct / asked, _Z95**2 / asked
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return Interval(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def paired_difference(ours: Sequence[float], theirs: Sequence[float], counts: Sequence[float]) -> Interval | None:
    """(sum of ours - sum of theirs) / sum of counts with its 95 % interval; each index is one cluster of questions.

    Both models answered the same questions, so what is hard for both cancels. Clusters, not answers, are what varies
    (linearised variance of a ratio): answers within a row depend on each other. None for fewer than two clusters.
    Raises ValueError when the lengths differ: then the questions did too.
    """
    ours, theirs, counts = (np.asarray(array, np.float64) for array in (ours, theirs, counts))
    if not ours.shape == theirs.shape == counts.shape:
        raise ValueError(f"clusters={ours.size}, {theirs.size}, {counts.size} must be as many: the same questions.")
    total = counts.sum()
    if counts.size < 2 or total <= 0:
        return None
    gains = ours - theirs
    value = gains.sum() / total
    residual = gains - value * counts
    error = math.sqrt(counts.size / (counts.size - 1) * float(residual @ residual)) / total
    return Interval(float(value), float(value - _Z95 * error), float(value + _Z95 * error))


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


def informed_guess(values, asked, lag, buckets: LagBuckets) -> dict[str, float | None]:
    """What a model reaches, per distance class, that guesses evenly among the values its row has shown so far.

    values: int[B, T], the value shown at a position, -1 where none. A model that knows a row's values and no pair is
    right once in as many tries as they are; below a uniform guess among all values lies nothing but a wrong habit.
    None where nothing was asked.
    """
    values, asked, lag = np.asarray(values), np.asarray(asked).astype(bool), np.asarray(lag)
    shown = np.zeros(values.shape, int)
    for value in np.unique(values[values >= 0]):
        shown += np.logical_or.accumulate(values == value, axis=1)
    bucket = buckets.of(np.where(asked, lag, 1))
    chances = 1.0 / np.maximum(shown, 1)
    classes = {name: asked & (bucket == index) for index, name in enumerate(BUCKETS)}
    return {name: float(chances[where].mean()) if where.any() else None for name, where in classes.items()}


def answers_by_row(correct, asked, lag, bucket: str, buckets: LagBuckets) -> dict[str, list[int]]:
    """Answers of one distance class row by row, as columns: rows that were asked, in order.

    Models that answered the same questions have equal `asked`; the differences of `correct` are then paired.
    """
    correct, asked, lag = np.asarray(correct), np.asarray(asked).astype(bool), np.asarray(lag)
    chosen = asked & (buckets.of(np.where(asked, lag, 1)) == BUCKETS.index(bucket))
    count, right = chosen.sum(axis=1), (chosen & correct).sum(axis=1)
    return {"asked": count[count > 0].tolist(), "correct": right[count > 0].tolist()}


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


def bits_by_row(nll, text_mask) -> list[float]:
    """Bits per byte of every row with text, in order, to three decimals: all that a paired difference needs."""
    mask = np.asarray(text_mask).astype(bool)
    rows = mask.any(axis=1)
    sums = np.where(mask, np.asarray(nll, np.float64), 0.0)[rows].sum(axis=1)
    return np.round(sums / mask[rows].sum(axis=1) / math.log(2.0), 3).tolist()


def coverage_summary(coverage) -> dict:
    """Indexer coverage [.., layers with a global branch]: mean per layer, their mean and their maximum.

    The mean alone misleads: one carrying layer may hold .98 while others show .01 and the task is solved.
    """
    coverage = np.asarray(coverage, np.float64)
    if coverage.shape[-1] == 0:
        return {"per_layer": [], "mean": None, "max": None}
    per_layer = coverage.reshape(-1, coverage.shape[-1]).mean(axis=0)
    return {"per_layer": per_layer.tolist(), "mean": float(per_layer.mean()), "max": float(per_layer.max())}
