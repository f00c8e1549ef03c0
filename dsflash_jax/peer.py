"""The same shape in another library, timed beside ours in one run."""

from __future__ import annotations

from typing import Any, Protocol

from dsflash_jax.config import ModelConfig


class Peer(Protocol):
    """Another implementation of the same model."""

    name: str

    def prefill_seconds(self, length: int) -> float:
        """Seconds of one prefill of `length` tokens into a fresh cache, up to last-position logits."""

    def decode_seconds(self, length: int, steps: int) -> list[float]:
        """Seconds of each of `steps` + 1 decode steps after a context of `length` tokens."""


def load_peer(name: str, cfg: ModelConfig, params: Any) -> Peer:
    """The peer `name` holding `params`. Raises ValueError if it is unknown or not installed."""
    raise ValueError(f"peer={name!r} is not known.")
