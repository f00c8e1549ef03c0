"""Speculative decoding on a `Session`: draft, verify in one step, accept, commit. Token ids only."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax
import numpy as np

from dsflash_jax.batch import bucket, check_token_ids
from dsflash_jax.cache.layout import pages_for
from dsflash_jax.config import ModelConfig
from dsflash_jax.draft_step import Anchor, check_draft_params, draft, make_draft_step
from dsflash_jax.sampling import Sampling, check_logits
from dsflash_jax.session import Session
from dsflash_jax.speculative import (
    CostTable,
    accept_drafts,
    confidence_lengths,
    fixed_lengths,
    next_tokens,
    settings_of,
)
from dsflash_jax.steps import Params

_accept, _next = jax.jit(accept_drafts), jax.jit(next_tokens)


@dataclasses.dataclass
class _Sequence:
    pending: int  # emitted, but not yet in the cache: the next token
    left: int  # tokens still to emit
    sampling: Sampling
    seed: int
    floor: int


class Speculator:
    """Sequences of a `Session` that grow by drafted blocks. At temperature 0 they grow as plain decoding makes them.

    drafts: the most drafts to verify per sequence and round. costs: a `CostTable` makes confidences decide how many
    of them are worth verifying; None verifies them all (the control).
    """

    def __init__(self, session: Session, *, drafts: int | None = None, costs: CostTable | None = None) -> None:
        """Raises ValueError for draft layers that are not those of the session's configuration, and drafts below 0."""
        check_draft_params(session.params, session.cfg)
        self.session, self.costs = session, costs
        self.drafts = session.cfg.dspark_block_size if drafts is None else drafts
        fixed_lengths([], self.drafts)
        self._open: dict[Hashable, _Sequence] = {}

    def open(
        self, name: Hashable, prompt: Sequence[int], new: int, sampling: Sampling, seed: int = 0, floor: int = 0
    ) -> int:
        """Prefills a prompt and returns its first new token; `new` tokens are emitted in all.

        floor: lowest position whose rows pass the target layers, where a replay leaves earlier ones out.
        Raises ValueError for a bad seed, ids outside the vocabulary and a generation past the context end.
        """
        cfg = self.session.cfg
        settings = settings_of([sampling], [seed], cfg.vocab_size)
        check_token_ids(prompt, cfg, f"sequence {name!r}")
        if new < 1 or len(prompt) + new > cfg.max_position_embeddings:
            limit = f"max_position_embeddings={cfg.max_position_embeddings}"
            raise ValueError(
                f"sequence {name!r}: {len(prompt)} + new={new} tokens must be at least 1 new within {limit}."
            )
        logits = self.session.append({name: list(prompt)})
        check_logits(logits, [name], [len(prompt) - 1])
        first = int(_next(logits, settings, np.array([len(prompt)], np.int32))[0])
        self._open[name] = _Sequence(first, new - 1, sampling, seed, floor)
        return first

    def round(self) -> dict[Hashable, list[int]]:
        """One draft and one verify step for all sequences with tokens left: the tokens that each emits, at least one.

        Drafts end at the context end and at the tokens left. Raises FloatingPointError for logits that are not finite.
        """
        live = {name: s for name, s in self._open.items() if s.left}
        if not live:
            return {}
        cfg, names, size = self.session.cfg, list(live), bucket(len(live))
        length = np.zeros(size, np.int32)
        length[: len(names)] = [len(self.session.tokens(name)) for name in names]
        settings = settings_of(
            [s.sampling for s in live.values()], [s.seed for s in live.values()], cfg.vocab_size, size
        )
        anchors = [
            Anchor(self.session.slot(name), s.pending, int(n), s.floor)
            for (name, s), n in zip(live.items(), length, strict=False)
        ]
        step = make_draft_step(anchors, cfg, seqs=size)
        drafted = draft(self.session.params, self.session.cache, step, cfg, settings)
        tokens = np.asarray(drafted.tokens)
        counts = np.zeros(size, np.int32)
        counts[: len(names)] = self._lengths(live, length, drafted.confidence)
        work = {n: [live[n].pending, *tokens[i, : counts[i]].tolist()] for i, n in enumerate(names)}
        logits = np.zeros((size, cfg.dspark_block_size + 1, cfg.vocab_size), np.float32)
        for i, (name, rows) in enumerate(self.session.verify(work).items()):
            check_logits(rows, [name] * len(rows), range(length[i], length[i] + len(rows)))
            logits[i, : len(rows)] = rows
        found = jax.device_get(_accept(logits, drafted.logits, tokens, counts, length, settings))
        self.session.commit({name: 1 + int(found.count[i]) for i, name in enumerate(names)})
        out = {}
        for i, name in enumerate(names):
            out[name] = [*work[name][1 : 1 + found.count[i]], int(found.next_token[i])]
            live[name].pending, live[name].left = out[name][-1], live[name].left - len(out[name])
        return out

    def _lengths(self, live: dict[Hashable, _Sequence], length: np.ndarray, confidence: jax.Array) -> list[int]:
        """Drafts to verify per live sequence, capped by the block, the context end and the tokens left."""
        cfg, limits = self.session.cfg, []
        for sequence, n in zip(live.values(), length.tolist(), strict=False):
            room = (cfg.max_position_embeddings - 1 - n, sequence.left - 1)
            limits.append(min(cfg.dspark_block_size, cfg.num_draft_tokens, self.drafts, *room))
        if self.costs is None:
            return fixed_lengths(limits, self.drafts)
        chances = np.asarray(jax.nn.sigmoid(confidence))[: len(limits)]
        return confidence_lengths(chances, limits, self.costs)


def speculate_tokens(
    params: Params,
    cfg: ModelConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    seed: int = 0,
    drafts: int | None = None,
) -> Iterator[int]:
    """As `generate.generate_tokens`, with drafted blocks: greedy gives equal ids, sampling an equal distribution."""
    num_pages = bucket(pages_for(cfg, len(prompt) + max_new_tokens))
    session = Session(params, cfg, num_pages=num_pages, table_pages=num_pages)
    speculator = Speculator(session, drafts=drafts)
    yield speculator.open("prompt", prompt, max_new_tokens, sampling, seed)
    while emitted := speculator.round():
        yield from emitted["prompt"]
