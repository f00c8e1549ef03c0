"""Calibration of the confidence head: how far predicted survival is from what happened, and temperatures against it.

The chance that a block survives up to its k-th draft is the product of k confidences, and it is this product that the
verification length is chosen by. So temperatures are fitted one position after the other, each on the product with
those before it (DSpark, sequential temperature scaling). They keep the order of blocks at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BINS = 15
TEMPERATURES = tuple(np.geomspace(0.1, 10.0, 81).tolist())  # 1 is among them


class Bin(NamedTuple):
    """Predictions between two borders: how many, their mean, and the share of them that came true."""

    count: int
    predicted: float
    observed: float


class Rounds(NamedTuple):
    """N verified blocks: logits float[N, K] of the confidence head, drafts verified int[N], drafts accepted int[N]."""

    logits: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray

    def labelled(self, position: int) -> np.ndarray:
        """bool[N]: blocks that were verified up to the draft at `position` (0-based); of others nothing is known."""
        return self.verified > position

    def survived(self, position: int) -> np.ndarray:
        """bool[N]: blocks whose drafts were accepted up to and with the one at `position`."""
        return self.accepted > position


def survival(logits: np.ndarray, temperatures: Sequence[float]) -> np.ndarray:
    """float64[N, K]: the predicted chance that all drafts up to each are accepted, logits [N, K] / temperatures [K]."""
    scaled = np.asarray(logits, np.float64) / np.asarray(temperatures, np.float64)
    # The logistic function by tanh, which does not overflow.
    return np.cumprod(0.5 * (1.0 + np.tanh(0.5 * scaled)), axis=1)


def reliability(predicted: np.ndarray, observed: np.ndarray, bins: int = BINS) -> list[Bin]:
    """The non-empty ones of `bins` equal ranges of 0..1 of predicted float[N], with what was observed, bool[N]."""
    place = np.minimum((np.asarray(predicted) * bins).astype(int), bins - 1)
    found = [(predicted[place == b], observed[place == b]) for b in range(bins)]
    return [Bin(p.size, float(p.mean()), float(o.mean())) for p, o in found if p.size]


def calibration_error(predicted: np.ndarray, observed: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: |mean prediction - share that came true| over bins, weighted by their counts.

    Raises ValueError where nothing was predicted.
    """
    if not len(predicted):
        raise ValueError("predicted is empty: there is nothing to calibrate.")
    found = reliability(predicted, observed, bins)
    return sum(b.count * abs(b.predicted - b.observed) for b in found) / len(predicted)


def error_floor(predicted: np.ndarray, bins: int = BINS, draws: int = 50) -> float:
    """Mean calibration error of outcomes drawn from the predictions float[N] themselves: what chance alone leaves."""
    uniform = np.random.default_rng(0).random((draws, len(predicted)))
    return float(np.mean([calibration_error(predicted, row < predicted, bins) for row in uniform]))


def position_errors(rounds: Rounds, temperatures: Sequence[float]) -> list[float | None]:
    """Calibration error of the survival up to each position; None where no block was verified so far."""
    chances = survival(rounds.logits, temperatures)
    errors: list[float | None] = []
    for position in range(chances.shape[1]):
        known = rounds.labelled(position)
        found = (chances[known, position], rounds.survived(position)[known])
        errors.append(calibration_error(*found) if known.any() else None)
    return errors


def fit_temperatures(rounds: Rounds, grid: Sequence[float] = TEMPERATURES) -> tuple[float, ...]:
    """One temperature per position, fitted from left to right; 1 at positions that no block was verified up to.

    Each is the one of `grid` with the least calibration error of the survival; of equal ones that nearest to 1.
    """
    temperatures = [1.0] * rounds.logits.shape[1]
    order = sorted(grid, key=lambda t: abs(np.log(t)))
    for position in range(len(temperatures)):
        known = rounds.labelled(position)
        if not known.any():
            continue
        logits, observed = rounds.logits[known, : position + 1], rounds.survived(position)[known]

        def error(temperature: float, logits=logits, observed=observed, position=position) -> float:
            chances = survival(logits, [*temperatures[:position], temperature])
            return calibration_error(chances[:, position], observed)

        temperatures[position] = min(order, key=error)
    return tuple(temperatures)
