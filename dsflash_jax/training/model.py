"""What training needs from a model, so that loop and evaluation know nothing else about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dsflash_jax import steps


class Model(NamedTuple):
    """Two functions.

    init(cfg, seed) -> params, a nested dict; params["freqs"], where present, holds buffers that are not trained.
    forward(params, tokens int32[B, T], cfg, *, dense, use_global, indexer_target) -> an object with logits [B, T, V]
    float32, indexer_kl (scalar) and coverage [layers with a global branch]; dense and use_global are traced booleans.
    """

    init: Callable[..., dict[str, Any]]
    forward: Callable[..., Any]


def package_model() -> Model:
    """The model of this package."""
    return Model(steps.init_params, steps.forward)
