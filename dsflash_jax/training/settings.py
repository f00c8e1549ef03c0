"""Everything of a training run that is not the model: schedule, rows, loss weights, seed."""

from __future__ import annotations

import dataclasses
import math

from dsflash_jax.config import ModelConfig
from dsflash_jax.training.data import TaskMix
from dsflash_jax.training.vocabulary import VOCAB_SIZE


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Settings of one run; the defaults are the ones found to make a lab model learn on two CPU cores.

    Attributes:
      steps: optimiser steps; the learning-rate schedule spans them.
      rows, context: rows per batch and tokens per row.
      seed: of the initial parameters and of the rows.
      learning_rate: peak; linear warm-up over warmup_steps, then cosine to final_share of the peak.
      beta2, weight_decay, clip_norm: AdamW and the global gradient norm.
      text_weight, indexer_weight: of text cross-entropy and indexer KL beside the answer cross-entropy (weight 1).
      indexer_target: whose attention the indexer imitates: "served", the mean over the layers that read the selection,
        or "own", the layer it stands in.
      dense_until: the selection stays dense until the moving average of the answer loss (nats) falls below this.
      average_decay: of that moving average, per step.
      recall, near, needle, copy, pairs, text_slots, patience: see TaskMix.
    """

    steps: int = 600
    rows: int = 8
    context: int = 128
    seed: int = 0
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    final_share: float = 0.05
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    text_weight: float = 0.3
    indexer_weight: float = 1.0
    indexer_target: str = "served"
    dense_until: float = 0.4
    average_decay: float = 0.95
    recall: float = 0.5
    near: float = 0.25
    needle: float = TaskMix.needle
    copy: float = TaskMix.copy
    pairs: int = TaskMix.pairs
    text_slots: float = TaskMix.text_slots
    patience: float = TaskMix.patience

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        for name in ("steps", "rows", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("seed", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        for name in ("learning_rate", "clip_norm"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite.")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share={self.final_share} must lie between 0 and 1.")
        for name in ("beta2", "average_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1.")
        for name in ("weight_decay", "text_weight", "indexer_weight", "dense_until"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative.")
        if self.indexer_target not in ("served", "own"):
            raise ValueError(f"indexer_target={self.indexer_target!r} must be 'served' or 'own'.")

    def replace(self, **changes) -> TrainSettings:
        """A copy with fields changed (validated again)."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """Plain JSON types, every field present."""
        return dataclasses.asdict(self)

    def mix(self, cfg: ModelConfig) -> TaskMix:
        """The rows of a batch for a model. Raises ValueError where the model cannot hold them."""
        if cfg.vocab_size < VOCAB_SIZE:
            raise ValueError(f"vocab_size={cfg.vocab_size} is below the lab vocabulary of {VOCAB_SIZE} tokens.")
        if self.context > cfg.max_position_embeddings:
            raise ValueError(
                f"context={self.context} exceeds max_position_embeddings={cfg.max_position_embeddings} of the model."
            )
        return TaskMix(
            rows=self.rows, context=self.context, window=cfg.sliding_window, recall=self.recall, near=self.near,
            needle=self.needle, copy=self.copy, pairs=self.pairs, text_slots=self.text_slots, patience=self.patience,
        )


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """How draft layers are trained behind a frozen backbone; the weights are DSpark's.

    Attributes:
      run: steps, rows, optimiser and seed, as for a backbone; what concerns its loss and its selection has no effect.
      pool: rows that the batches are drawn from; made once, before the first step.
      continued: tokens at the end of every row that the backbone generates itself, as it will when it is served.
      anchors: blocks per row, at positions drawn anew for every row.
      decay: position i of a block counts exp(-i / decay) in all three parts of the loss.
      cross_entropy, distance, confidence: weights of the three parts.
    """

    run: TrainSettings = TrainSettings()
    pool: int = 512
    continued: int = 64
    anchors: int = 32
    decay: float = 4.0
    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        for name in ("pool", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.continued < self.run.context:
            raise ValueError(f"continued={self.continued} must lie in 0..{self.run.context - 1}: a row needs a prompt.")
        if not (math.isfinite(self.decay) and self.decay > 0):
            raise ValueError(f"decay={self.decay} must be positive and finite.")
        for name in ("cross_entropy", "distance", "confidence"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative.")

    def to_dict(self) -> dict:
        """Plain JSON types, every field present."""
        return dataclasses.asdict(self)
