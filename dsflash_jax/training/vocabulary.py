"""The lab vocabulary: 128 text bytes, then the keys and the values of the recall task."""

from __future__ import annotations

import numpy as np

TEXT_TOKENS = 128
KEY_TOKENS = 32
VALUE_TOKENS = 32
FIRST_KEY = TEXT_TOKENS
FIRST_VALUE = FIRST_KEY + KEY_TOKENS
VOCAB_SIZE = FIRST_VALUE + VALUE_TOKENS

DOCUMENT_BORDER = 0x00  # NUL, does not occur in source text
DRAFT_NOISE = 0x01  # stands for the tokens of a draft block that are still to be drafted; not in source text either
NON_ASCII = 0x1A        # ASCII "substitute": one token per character outside ASCII


def encode_bytes(utf8: bytes) -> np.ndarray:
    """UTF-8 bytes to text tokens, uint8[N]: ASCII maps to itself, any other character to one NON_ASCII token."""
    raw = np.frombuffer(utf8, np.uint8)
    first_of_character = (raw & 0xC0) != 0x80
    return np.where(raw < TEXT_TOKENS, raw, NON_ASCII).astype(np.uint8)[first_of_character]


def encode_text(text: str) -> np.ndarray:
    """Text to tokens, uint8[N]; see encode_bytes."""
    return encode_bytes(text.encode("utf-8", "replace"))


def decode_tokens(tokens) -> str:
    """Tokens to readable text: keys print as <k7>, values as <v12>, substituted characters as U+FFFD."""
    return "".join(_spell(int(token)) for token in np.asarray(tokens).reshape(-1))


def _spell(token: int) -> str:
    if token == NON_ASCII:
        return "\N{REPLACEMENT CHARACTER}"
    if 0 <= token < TEXT_TOKENS:
        return chr(token)
    if token < FIRST_VALUE:
        return f"<k{token - FIRST_KEY}>"
    if token < VOCAB_SIZE:
        return f"<v{token - FIRST_VALUE}>"
    return f"<{token}>"
