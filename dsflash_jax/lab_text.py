"""Text from a checkpoint of lab training: the lab's spelling of prompts and tokens around `generate.py`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsflash_jax.config import ModelConfig
from dsflash_jax.generate import check_request, generate_tokens
from dsflash_jax.ops.rope import model_tables
from dsflash_jax.sampling import Sampling
from dsflash_jax.session import PREFILL_ROWS
from dsflash_jax.speculate import speculate_tokens
from dsflash_jax.steps import Params, abstract_params
from dsflash_jax.training import checkpoints
from dsflash_jax.training.vocabulary import (
    DOCUMENT_BORDER,
    FIRST_KEY,
    FIRST_VALUE,
    KEY_TOKENS,
    VALUE_TOKENS,
    decode_tokens,
    encode_text,
)
from dsflash_jax.weights.names import walk

_LAB_TOKEN = re.compile(r"<([kv])([0-9]+)>")
_CONTROL_PICTURES = 0x2400  # U+2400 + c shows control character c


def stream(
    checkpoint: str | Path,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    speculate: int = 0,
    prefill_rows: int = PREFILL_ROWS,
) -> Iterator[str]:
    """Continues a text, piece by piece, until `max_new_tokens` or the border of a document.

    Equal arguments give equal text. `checkpoint` is a folder that training wrote: of a run, of its checkpoints, or one
    of them. The prompt may hold the lab's key and value tokens as `<k7>` and `<v12>`, as they are printed.
    speculate: drafts to verify per step at most, where the model has draft layers; 0 decodes token by token.

    Raises, before the first piece: ValueError for an empty prompt, tokens outside the vocabulary, a prompt and
    generation past the model's capacity, bad sampling settings, a seed outside 32 bits, drafts below 0 or of a model
    without draft layers, and a checkpoint that cannot be read; FileNotFoundError where there is none. While iterating: FloatingPointError naming the position whose logits
    are not finite.
    """
    sampling = Sampling(temperature, top_k, top_p)
    tokens = encode_prompt(prompt)
    check_request(tokens, max_new_tokens, seed, prefill_rows)
    if speculate < 0:
        raise ValueError(f"speculate={speculate} must be 0 (token by token) or the most drafts to verify per step.")
    params, cfg = load_model(Path(checkpoint))
    request = params, cfg, tokens, max_new_tokens, sampling, seed, prefill_rows
    new = speculate_tokens(*request, drafts=speculate) if speculate else generate_tokens(*request)
    return (show_token(token) for token in itertools.takewhile(lambda token: token != DOCUMENT_BORDER, new))


def encode_prompt(text: str) -> list[int]:
    """Token ids of a text in the lab vocabulary; `<k7>` and `<v12>` are the lab's keys and values.

    Raises ValueError for a key or value that the vocabulary does not have.
    """
    tokens: list[int] = []
    end = 0
    for match in _LAB_TOKEN.finditer(text):
        first, count = (FIRST_KEY, KEY_TOKENS) if match[1] == "k" else (FIRST_VALUE, VALUE_TOKENS)
        if int(match[2]) >= count:
            kind = match[1]
            raise ValueError(f"prompt holds {match[0]}, the vocabulary has <{kind}0> to <{kind}{count - 1}>.")
        tokens += [*encode_text(text[end : match.start()]).tolist(), first + int(match[2])]
        end = match.end()
    return tokens + encode_text(text[end:]).tolist()


def show_token(token: int) -> str:
    """A token as text that is safe to print: control characters other than tab and line feed as their pictures."""
    text = decode_tokens([token])
    if len(text) == 1 and (ord(text) < 0x20 and text not in "\t\n"):
        return chr(_CONTROL_PICTURES + ord(text))
    return "\N{SYMBOL FOR DELETE}" if text == "\x7f" else text


def load_model(checkpoint: Path, cfg: ModelConfig | None = None) -> tuple[Params, ModelConfig]:
    """Parameters (on the device, with RoPE tables) and configuration of a training checkpoint.

    Raises FileNotFoundError where there is no checkpoint; ValueError for one that cannot be read, whose arrays do not
    fit its configuration, or (with `cfg`) that belongs to another configuration: the differing fields are named.
    """
    folder = checkpoint / "checkpoints" if (checkpoint / "checkpoints").is_dir() else checkpoint
    inside = (folder / "facts").is_dir()  # one checkpoint, not a folder of them
    if not inside and not checkpoints.saved_steps(folder):
        raise FileNotFoundError(f"checkpoint folder {str(checkpoint)!r} holds no complete checkpoint (step_NNNNNNNN).")
    try:
        loaded = checkpoints.load_plain(folder)
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged folder
        raise _unreadable(checkpoint, error) from error
    stored = loaded.facts.get("config")
    if not isinstance(stored, dict) or not isinstance(loaded.tree, dict) or "params" not in loaded.tree:
        raise ValueError(f"checkpoint {str(checkpoint)!r} holds no configuration or no parameters: not training's.")
    if cfg is not None:
        checkpoints.refuse_other_facts(checkpoint, {"config": stored}, {"config": cfg.to_dict()})
    cfg = ModelConfig.from_json(stored)
    params = loaded.tree["params"]
    _check_arrays(params, cfg, checkpoint)
    return jax.device_put({**params, "freqs": model_tables(cfg)}), cfg


def _unreadable(checkpoint: Path, error: Exception) -> ValueError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return ValueError(f"checkpoint {str(checkpoint)!r} cannot be read: {reason}")


def _check_arrays(params: dict[str, Any], cfg: ModelConfig, checkpoint: Path) -> None:
    """Raises ValueError naming the arrays that are missing, too many or of another shape than `cfg` says."""
    there = {path: np.shape(leaf) for path, leaf in walk(params)}
    need = {path: leaf.shape for path, leaf in walk(abstract_params(cfg))}
    wrong = sorted(".".join(map(str, path)) for path in {*there, *need} if there.get(path) != need.get(path))
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"checkpoint {str(checkpoint)!r} does not fit its own configuration: {', '.join(wrong[:3])}{more} "
            "are missing, unknown or of another shape."
        )
