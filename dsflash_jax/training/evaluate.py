"""Held-out evaluation: per-token records of recall rows and of text; `analysis.recall` turns them into figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dsflash_jax.config import ModelConfig
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import HELD_OUT_STREAM, Batch, make_batch, split_batch, text_batch
from dsflash_jax.training.devices import data_mesh, replicated, split_rows
from dsflash_jax.training.losses import token_nll
from dsflash_jax.training.model import Model, package_model
from dsflash_jax.training.settings import TrainSettings

EVALUATION_SEED = 0  # of the rows, whatever seed a model was trained with: all models answer the same questions


class HeldOut(NamedTuple):
    """Batches of equal shape: recall rows over held-out text, and plain held-out text."""

    recall: list[Batch]
    text: list[Batch]


class Records(NamedTuple):
    """What a model did on some batches, all numpy.

    nll: float32[B, T], nats of the target. correct: bool[B, T], the target is the best token.
    asked, text_mask: bool[B, T]; lag: int32[B, T]; aligned: bool[B, T]: as in Batch (asked is its answer_mask).
    coverage: float32[batches, layers with a global branch]. Only a dense evaluation measures it: under top-k the
    unselected entries get no attention, and every coverage is 1.
    """

    nll: np.ndarray
    correct: np.ndarray
    asked: np.ndarray
    text_mask: np.ndarray
    lag: np.ndarray
    aligned: np.ndarray
    coverage: np.ndarray


def held_out_batches(
    cfg: ModelConfig, settings: TrainSettings, corpus: Corpus, recall_rows: int = 256, text_rows: int = 256,
) -> HeldOut:
    """Evaluation batches of settings.rows rows; they depend on neither the seed of training nor the compress ratios.

    Raises ValueError when settings.rows does not divide a count, or the held-out text is too short.
    """
    mix = settings.replace(rows=recall_rows, recall=1.0, near=0.0, needle=0.0, copy=0.0).mix(cfg)
    recall = make_batch(mix, corpus.held_out, EVALUATION_SEED, 0, HELD_OUT_STREAM)
    text = text_batch(corpus.held_out, text_rows, settings.context)
    return HeldOut(split_batch(recall, settings.rows), split_batch(text, settings.rows))


def make_predictor(
    cfg: ModelConfig, rows: int, devices: int | None = None, model: Model | None = None,
) -> Callable[[Any, Batch, bool, bool], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """predict(params, batch, use_global, dense) -> (nll, correct, coverage), compiled once for both flags.

    The flags are traced: as compile-time switches they would make XLA fold whole masks, for minutes.
    """
    model, mesh = model or package_model(), data_mesh(rows, devices)

    def on_device(params, tokens, targets, use_global, dense):
        out = model.forward(params, tokens, cfg, dense=dense, use_global=use_global)
        correct = jnp.argmax(out.logits, axis=-1) == targets
        return token_nll(out.logits, targets), correct, jax.lax.pmean(out.coverage, "data")

    whole, by_rows = PartitionSpec(), PartitionSpec("data")
    compiled = jax.jit(jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, by_rows, by_rows, whole, whole), out_specs=(by_rows, by_rows, whole),
        check_vma=False,
    ))

    def predict(params, batch: Batch, use_global: bool, dense: bool):
        tokens, targets = jax.device_put((batch.tokens, batch.targets), split_rows(mesh))
        flags = jax.device_put((jnp.bool_(use_global), jnp.bool_(dense)), replicated(mesh))
        return jax.device_get(compiled(jax.device_put(params, replicated(mesh)), tokens, targets, *flags))

    return predict


def evaluate(
    predict: Callable, params: Any, batches: Sequence[Batch], *, use_global: bool = True, dense: bool = False,
) -> Records:
    """Records of a model on batches; use_global=False is the control without the global branch.

    Raises FloatingPointError when a logit is not finite.
    """
    outputs = [predict(params, batch, use_global, dense) for batch in batches]
    nll, correct = (np.concatenate([output[i] for output in outputs]) for i in (0, 1))
    if not np.isfinite(nll).all():
        lost = int((~np.isfinite(nll)).sum())
        raise FloatingPointError(f"{lost} of {nll.size} evaluated tokens have no finite loss.")
    joined = Batch(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))
    return Records(
        nll, correct, joined.answer_mask, joined.text_mask, joined.lag, joined.aligned,
        np.stack([output[2] for output in outputs]),
    )
