"""The compressed token map of n-gram memory: tokens that read alike share an id. Host only, standard library."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

UNDECODABLE = "\ufffd"
# Unicode White_Space. Not `str.strip()`, which also takes the separators U+001C to U+001F.
_NARROW = (*range(0x09, 0x0E), 0x20, 0x85, 0xA0)
_WIDE = (0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
WHITE_SPACE = "".join(map(chr, _NARROW + _WIDE))


def normalised(text: str) -> str:
    """Compatibility form without accents, lower case, runs of blanks as one space, ends stripped; a lone space stays.

    Letters are lowered one by one: a capital sigma is never a final one.
    """
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c.lower() for c in decomposed if not unicodedata.category(c).startswith("M"))
    spaced = re.sub("[ \t\r\n]+", " ", bare)
    return spaced if spaced == " " else spaced.strip(WHITE_SPACE)


def build_token_map(decoded: Sequence[str], raw: Sequence[str] | None = None) -> np.ndarray:
    """int64[vocab] compressed ids, numbered as they first appear, from each token's decoded text.

    raw: the tokenizer's own name of each token, which stands for a token that is no whole text (its decoded text holds
    U+FFFD); without names every such token is its own. Text that normalises to nothing stands for itself.
    Raises ValueError if there is not one name per text. Source: tests/golden/units_engram.npz, which pins the result
    for awkward strings; the choice of marks and of white space beyond them follows Unicode.
    """
    if raw is not None and len(raw) != len(decoded):
        raise ValueError(f"raw has {len(raw)} names, must have one for each of {len(decoded)} decoded texts.")
    ids: dict[tuple[str, object], int] = {}
    out = np.empty(len(decoded), np.int64)
    for token, text in enumerate(decoded):
        if UNDECODABLE in text:
            # A name may equal another token's text: released code looks both up in one table.
            key = ("text", raw[token]) if raw is not None else ("token", token)
        else:
            key = ("text", normalised(text) or text)
        out[token] = ids.setdefault(key, len(ids))
    return out
