"""Generation: the prompt is prefilled in chunks, then tokens come one by one from the caches. Token ids only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from dsflash_jax.batch import bucket, check_hash, check_token_ids
from dsflash_jax.cache.layout import pages_for
from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.ngram_hash import NgramHash
from dsflash_jax.sampling import Sampling, check_logits, check_seed, sample
from dsflash_jax.session import PREFILL_ROWS, Session
from dsflash_jax.steps import Params

SEQUENCE = "prompt"  # the one sequence's name in messages


def generate_tokens(
    params: Params,
    cfg: ModelConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    seed: int = 0,
    prefill_rows: int = PREFILL_ROWS,
    *,
    ngram_hash: NgramHash | None = None,
) -> Iterator[int]:
    """`max_new_tokens` ids after a prompt of ids; none of them ends it earlier. Equal arguments give equal ids.

    Nothing runs before the first is asked for. A call compiles at most one prefill and one decode step; shapes are
    powers of two, so later calls reuse them. ngram_hash: as `Session` asks for it.
    Raises, before the first id: ValueError for an empty prompt, ids outside the vocabulary, a prompt and generation
    past the model's capacity, sizes below 1, a seed outside 32 bits, and Engram layers without `ngram_hash`. While
    iterating: FloatingPointError naming the position whose logits are not finite.
    """
    check_request(prompt, max_new_tokens, seed, prefill_rows)
    check_fit(prompt, max_new_tokens, cfg)
    check_hash(ngram_hash, cfg)
    return _run(params, cfg, [int(token) for token in prompt], max_new_tokens, sampling, seed, prefill_rows, ngram_hash)


def check_request(
    prompt: Sequence[int], max_new_tokens: int, seed: int, prefill_rows: int = PREFILL_ROWS, where: str = SEQUENCE
) -> None:
    """Raises ValueError, its sentence naming the prompt by `where`, for what is wrong whatever the model."""
    if len(prompt) == 0:
        raise ValueError(f"{where} is empty, generation needs at least one token to follow.")
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_rows", prefill_rows)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    check_seed(seed)


def check_fit(prompt: Sequence[int], max_new_tokens: int, cfg: ModelConfig, where: str = SEQUENCE) -> None:
    """Raises ValueError for ids outside the vocabulary and for a prompt and generation past the model's capacity."""
    check_token_ids(prompt, cfg, where)
    need = len(prompt) + max_new_tokens
    if need > cfg.max_position_embeddings:
        raise ValueError(
            f"{where} of {len(prompt)} tokens and max_new_tokens={max_new_tokens} need {need} positions, "
            f"max_position_embeddings={cfg.max_position_embeddings} is the capacity."
        )


def request_session(
    params: Params, cfg: ModelConfig, tokens: int, prefill_rows: int, ngram_hash: NgramHash | None
) -> Session:
    """An empty session for one sequence of up to `tokens` tokens, whose steps have one width of block tables."""
    pages = bucket(pages_for(cfg, tokens))
    sizes = {"num_pages": pages, "table_pages": pages, "prefill_rows": prefill_rows}
    return Session(params, cfg, **sizes, ngram_hash=ngram_hash)


def _run(params, cfg, prompt: list[int], new: int, sampling: Sampling, seed: int, prefill_rows: int, ngram_hash):
    session = request_session(params, cfg, len(prompt) + new, prefill_rows, ngram_hash)
    key, top_k = jax.random.key(seed), min(sampling.top_k, cfg.vocab_size)
    tokens = prompt
    for position in range(len(prompt), len(prompt) + new):
        logits = session.append({SEQUENCE: tokens})
        check_logits(logits, [SEQUENCE], [position - 1])
        tokens = [int(_draw(logits, key, position, sampling.temperature, top_k, sampling.top_p)[0])]
        yield tokens[0]


@jax.jit
def _draw(logits, key, position, temperature, top_k, top_p) -> jax.Array:
    """The token of a position depends on the seed and the position alone, not on how many steps led there."""
    return sample(logits, jax.random.fold_in(key, position), temperature, top_k, top_p)
