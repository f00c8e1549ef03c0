"""The same model in another library, with our parameters: timed beside ours in one run, and checked to be the same."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dsflash_jax.config import ModelConfig
from dsflash_jax.weights.export import export_checkpoint

# What mlx-lm's `deepseek_v41` computes and no key of its config can change.
_MLX_FIXED = {
    "dtype": "float32",  # its CPU kernel for grouped products takes float32 only
    "score_dtype": "float32",
    "window_format": "mxfp8",
    "main_format": "fp4_e4m3",
    "index_format": "mxfp4",
    "stale_index_keys": False,
    "token_shift": False,
    "engram_layer_ids": (),
    "tie_word_embeddings": False,
    # It reads packed weights, but does not round their inputs.
    "quant_method": "",
    "expert_dtype": "",
}


class Peer(Protocol):
    """Another implementation of the same model."""

    name: str

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """Seconds of one prefill of a prompt into a fresh cache, up to last-position logits."""

    def decode_seconds(self, prompt: Sequence[int], then: Sequence[int]) -> list[float]:
        """Seconds of each decode step that takes one of the tokens `then` after the prefilled prompt."""

    def logits(self, prompt: Sequence[int], then: Sequence[int] = ()) -> np.ndarray:
        """float32[1 + len(then), V]: last-position logits of the prefilled prompt, then of each token decoded alone."""


def load_peer(name: str, cfg: ModelConfig, params: Any) -> Peer:
    """The peer `name` holding `params`.

    Raises ValueError if it is unknown, not installed, or cannot be told a field of `cfg`.
    """
    if name != MlxLm.name:
        raise ValueError(f"peer={name!r} is not known, must be {MlxLm.name}.")
    return MlxLm(cfg, params)


class MlxLm:
    """mlx-lm's `deepseek_v41` on the CPU device, float32 weights.

    KV rows are rounded as the reference rounds them but kept as float32: its caches are larger than packed ones.
    """

    name = "mlx-lm"

    def __init__(self, cfg: ModelConfig, params: Any) -> None:
        for field, fixed in _MLX_FIXED.items():
            if getattr(cfg, field) != fixed:
                raise ValueError(f"{field}={getattr(cfg, field)!r} must be {fixed!r} for peer={self.name!r}.")
        # Here, not above: an optional package that takes seconds to import, and whose older versions lack the model.
        try:
            import mlx.core as mx
            from mlx_lm.models import deepseek_v41  # noqa: F401
            from mlx_lm.utils import load_model
        except ImportError as error:
            hint = "pip install 'dsflash-jax[peers]'"
            raise ValueError(f"peer={self.name!r} is not installed ({error}): {hint}.") from None
        self._mx = mx
        with mx.stream(mx.cpu), tempfile.TemporaryDirectory() as folder:
            exported = export_checkpoint(params, cfg, pathlib.Path(folder) / "model", dtype="float32")
            # Strict: one missing, unexpected or wrongly shaped tensor is an error, so no weight stays at its start.
            # Not lazy: the files are gone afterwards.
            self._model, _ = load_model(exported, lazy=False, strict=True)
            mx.eval(self._model.parameters())

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """Seconds of one prefill of a prompt into a fresh cache, up to last-position logits."""
        return self._timed(prompt, self._model.make_cache())

    def decode_seconds(self, prompt: Sequence[int], then: Sequence[int]) -> list[float]:
        """Seconds of each decode step that takes one of the tokens `then` after the prefilled prompt."""
        cache = self._model.make_cache()
        self._run(prompt, cache)
        return [self._timed([token], cache) for token in then]

    def logits(self, prompt: Sequence[int], then: Sequence[int] = ()) -> np.ndarray:
        """float32[1 + len(then), V]: last-position logits of the prefilled prompt, then of each token decoded alone."""
        cache = self._model.make_cache()
        return np.stack([np.array(self._run(tokens, cache)) for tokens in (prompt, *([t] for t in then))])

    def _timed(self, tokens: Sequence[int], cache: list[Any]) -> float:
        start = time.perf_counter()
        self._run(tokens, cache)
        return time.perf_counter() - start

    def _run(self, tokens: Sequence[int], cache: list[Any]) -> Any:
        """Appends tokens to the cache: last-position logits [V], computed on return (mlx is lazy)."""
        mx = self._mx
        with mx.stream(mx.cpu):
            hidden = self._model.model(mx.array(tokens, mx.int32)[None], cache)
            # The head on the last row only: its __call__ would multiply every row by the vocabulary.
            logits = self._model.lm_head(hidden[0, -1])
            mx.eval(logits, [layer.state for layer in cache])
        return logits
