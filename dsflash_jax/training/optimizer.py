"""AdamW with warm-up and cosine; weight decay on matrices only."""

from __future__ import annotations

from typing import Any

import jax
import optax

from dsflash_jax.training.settings import TrainSettings

_BUFFERS = ("freqs",)  # rope tables: read by the model, never trained
_NO_DECAY = ("norm", "bias", "base", "scale", "sink", "shift")


def split_buffers(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters as (trained, buffers); `{**trained, **buffers}` is the whole again."""
    buffers = {name: params[name] for name in _BUFFERS if name in params}
    return {name: value for name, value in params.items() if name not in buffers}, buffers


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Linear warm-up to the peak, then cosine to final_share of it at the last step.

    A run shorter than twice the warm-up warms up over half of its steps. The first step already moves.
    """
    warmup = max(1, min(settings.warmup_steps, settings.steps // 2))
    return optax.warmup_cosine_decay_schedule(
        init_value=settings.learning_rate / warmup, peak_value=settings.learning_rate, warmup_steps=warmup,
        decay_steps=max(settings.steps, warmup + 1), end_value=settings.final_share * settings.learning_rate,
    )


def decay_mask(params: Any) -> Any:
    """True for the leaves that weight decay applies to: matrices that are no norm, bias, scale or sink."""

    def decays(path: tuple, leaf: Any) -> bool:
        names = [str(getattr(key, "key", "")) for key in path]
        return leaf.ndim >= 2 and not any(word in name for name in names for word in _NO_DECAY)

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with decoupled decay."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate(settings), b2=settings.beta2, weight_decay=settings.weight_decay, mask=decay_mask,
        ),
    )
