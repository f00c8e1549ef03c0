"""Which tokens an asymmetric prefill runs again, and how much it must keep for that (report §2.2 and §3.2.2).

The decoder starts at the last KV source, and global entries depend on encoder states alone. A prompt therefore needs
the decoder only for its last tokens: `sliding_window` of them in "replay", whose first rows see a shorter window than
in a full pass, or in "exact" as many more below each layer as its windows reach back. A window of w over d layers
reaches back w + (d - 1) (w - 1) rows at the first of them. Free of JAX.
"""

from __future__ import annotations

from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import decoder_start

DECODER_MODES = ("all", "replay", "exact")
ENCODER_MODES = ("bounded", "exact")


def check_mode(name: str, mode: str, modes: tuple[str, ...]) -> None:
    """Raises ValueError for a mode that is not one of `modes`."""
    if mode not in modes:
        raise ValueError(f"{name}={mode!r} must be one of {', '.join(modes)}.")


def halo(cfg: ModelConfig, depth: int) -> int:
    """Rows at the first of `depth` layers on which the last `sliding_window` rows after them depend."""
    return cfg.sliding_window + (depth - 1) * (cfg.sliding_window - 1)


def decoder_rows(cfg: ModelConfig, decoder: str) -> tuple[int, ...]:
    """Rows of a prompt's end that each decoder layer runs, first layer first; () for "all" and without a decoder.

    Raises ValueError for an unknown mode.
    """
    check_mode("decoder", decoder, DECODER_MODES)
    depth = cfg.num_hidden_layers - decoder_start(cfg)
    if decoder == "all":
        return ()
    return tuple(cfg.sliding_window if decoder == "replay" else halo(cfg, left) for left in range(depth, 0, -1))


def tail_rows(cfg: ModelConfig, decoder: str) -> int:
    """Encoder states that a sequence slot keeps for `decoder`, with room for rejected drafts; 0 where none are."""
    rows = decoder_rows(cfg, decoder)
    return rows[0] + cfg.num_draft_tokens + 1 if rows else 0


def encoder_restart(
    cfg: ModelConfig, hit: int, length: int, *, encoder: str = "bounded", decoder: str = "replay"
) -> int:
    """First token to run again after a prefix hit: the pages of tokens 0..hit - 1 are there, their window rows not.

    encoder: "bounded" runs the last `sliding_window` tokens before the hit again, "exact" as many as all states behind
    the hit depend on. length: tokens of the whole prompt. decoder: how its decoder will run; "exact" needs exact
    encoder states further back than the hit where the prompt ends soon after it.
    The chunk that starts here has `replay_start` here and `write_floor=hit`, so it writes window state only before it.

    Raises ValueError for an unknown mode and a hit outside 0..length - 1.
    """
    check_mode("encoder", encoder, ENCODER_MODES)
    rows = decoder_rows(cfg, decoder)
    if not 0 <= hit < length:
        raise ValueError(f"hit={hit} must lie in 0..length - 1 = {length - 1}: the last token has to be run.")
    if encoder == "bounded":
        return max(0, hit - cfg.sliding_window)
    first = min(hit, length - rows[0]) if decoder == "exact" and rows else hit
    depth = cfg.num_hidden_layers if decoder == "all" else decoder_start(cfg)
    return max(0, first - halo(cfg, depth)) if depth else hit


def draft_floor(cfg: ModelConfig, restart: int, length: int, decoder: str) -> int:
    """Lowest position that passed all layers, after a prompt of `length` tokens was run from `restart` on.

    Draft layers have window rows from there on: what stands below was left to a prefix hit or to the encoder alone.
    Raises ValueError for an unknown mode.
    """
    rows = decoder_rows(cfg, decoder)
    return max(restart, length - rows[-1]) if rows else restart


def token_layers(cfg: ModelConfig, tokens: int, decoder: str) -> int:
    """Layers times tokens that a cold prefill of `tokens` runs; the decoder's entries beside them are not counted."""
    first = decoder_start(cfg)
    if decoder == "all" or first == cfg.num_hidden_layers:
        return tokens * cfg.num_hidden_layers
    return tokens * first + sum(min(rows, tokens) for rows in decoder_rows(cfg, decoder))
