"""Speculative decoding on a `Session`: draft, verify in one step, accept, commit. Token ids only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dsflash_jax.batch import bucket, check_hash
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.draft_step import Anchor, check_draft_params, draft, make_draft_step
from dsflash_jax.generate import SEQUENCE, check_fit, check_request, request_session
from dsflash_jax.modules.dspark import DraftOutput
from dsflash_jax.ops.ngram_hash import NgramHash
from dsflash_jax.sampling import Sampling, check_logits
from dsflash_jax.session import PREFILL_ROWS, Session
from dsflash_jax.speculative import (
    CostTable,
    Settings,
    accept_drafts,
    check_drafts,
    confidence_lengths,
    fixed_lengths,
    next_tokens,
    settings_of,
)
from dsflash_jax.steps import Params
from dsflash_jax.types import DraftStep

# As `draft_step.draft`, the only one that serving uses: tests drive the loop with one that knows the answer.
Drafter = Callable[[Params, ModelCache, DraftStep, ModelConfig, Settings], DraftOutput]
_accept, _next = jax.jit(accept_drafts), jax.jit(next_tokens)


@dataclasses.dataclass
class _Sequence:
    pending: int  # emitted, but not yet in the cache: the next token
    left: int  # tokens still to emit
    sampling: Sampling
    seed: int


class Block(NamedTuple):
    """What became of a sequence's drafted block: drafts verified, drafts accepted, confidence logits [block]."""

    verified: int
    accepted: int
    confidence: np.ndarray


class Speculator:
    """Sequences of a `Session` that grow by drafted blocks. At temperature 0 they grow as plain decoding makes them.

    What a sequence emits depends on its prompt, its settings and its seed, not on the others, up to what steps of
    other sizes round otherwise. With `costs` this holds for its distribution only: how many drafts are verified then
    depends on all of them. `blocks` holds the `Block` of each sequence of the last round.
    """

    def __init__(
        self,
        session: Session,
        *,
        drafts: int | None = None,
        costs: CostTable | None = None,
        temperatures: Sequence[float] | None = None,
        drafter: Drafter = draft,
    ) -> None:
        """drafts: the most drafts to verify per sequence and round; None = a whole block.

        costs: makes confidences decide how many of them are worth verifying; None verifies them all (the control).
        temperatures: what divides the confidence logits at each position before they decide (`training.calibration`).
        Raises ValueError for draft layers that are not those of the session's configuration, drafts below 0, and
        temperatures that are not one positive number per position of a block.
        """
        cfg = session.cfg
        check_draft_params(session.params, cfg)
        self.session, self.costs, self._drafter = session, costs, drafter
        self.drafts = cfg.dspark_block_size if drafts is None else drafts
        check_drafts(self.drafts)
        self._temperatures = np.asarray([1.0] * cfg.dspark_block_size if temperatures is None else temperatures)
        if self._temperatures.shape != (cfg.dspark_block_size,) or not (self._temperatures > 0).all():
            rule = f"must be {cfg.dspark_block_size} positive numbers, one per position of a block"
            raise ValueError(f"temperatures={self._temperatures.tolist()} {rule}.")
        self.blocks: Mapping[Hashable, Block] = {}
        self._open: dict[Hashable, _Sequence] = {}

    def open(
        self,
        name: Hashable,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        seed: int = 0,
    ) -> int:
        """Prefills a prompt and returns its first new token; `max_new_tokens` are emitted in all.

        Raises ValueError for a name that the session knows already, for a bad request as `generate_tokens`, and, with
        `costs`, for the seed of another sequence that draws; FloatingPointError for logits that are not finite.
        """
        where = f"sequence {name!r}"
        if self.session.tokens(name):
            raise ValueError(f"{where} is open already: close it first.")
        self._check_seed(where, sampling, seed)
        check_request(prompt, max_new_tokens, seed, where=where)
        check_fit(prompt, max_new_tokens, self.session.cfg, where)
        settings = settings_of([sampling], [seed], self.session.cfg.vocab_size)
        logits = self.session.append({name: list(prompt)})
        check_logits(logits, [name], [len(prompt) - 1])
        first = int(np.asarray(_next(logits, settings, np.array([len(prompt)], np.int32)))[0])
        self._open[name] = _Sequence(first, max_new_tokens - 1, sampling, seed)
        return first

    def _check_seed(self, where: str, sampling: Sampling, seed: int) -> None:
        # Equal noise at equal positions would let a sequence's own draft decide, through the other one's confidence,
        # whether it is verified: that biases what is emitted.
        if self.costs is None or sampling.temperature <= 0:
            return
        for other, s in self._open.items():
            if s.left and s.sampling.temperature > 0 and s.seed == seed:
                raise ValueError(f"{where}: seed={seed} is that of sequence {other!r}; with costs each needs its own.")

    def close(self, name: Hashable) -> None:
        """Ends a sequence before or after its last token, and in the session. ValueError for one that is not open."""
        self.session.close(name)
        self._open.pop(name, None)

    def round(self) -> dict[Hashable, list[int]]:
        """One draft and one verify step for all sequences with tokens left: the tokens that each emits, at least one.

        Drafts end at the context end and at the tokens left. Raises FloatingPointError, naming the position, where a
        token would follow logits that are not finite; nothing is committed then.
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
        drafted = self._draft(live, length, settings)
        tokens = np.asarray(drafted.tokens)
        confidence = np.asarray(drafted.confidence)
        counts = np.zeros(size, np.int32)
        counts[: len(names)] = self._lengths(live, length, confidence)
        work = {n: [live[n].pending, *tokens[i, : counts[i]].tolist()] for i, n in enumerate(names)}
        logits = np.zeros((size, cfg.dspark_block_size + 1, cfg.vocab_size), np.float32)
        for i, rows in enumerate(self.session.verify(work).values()):
            logits[i, : len(rows)] = rows
        found = jax.device_get(_accept(logits, drafted.logits, tokens, counts, length, settings))
        for i, name in enumerate(names):  # rows behind the first rejection say nothing about the sequence
            used = 1 + int(found.count[i])
            check_logits(logits[i, :used], [name] * used, range(length[i], length[i] + used))
        self.session.commit({name: 1 + int(found.count[i]) for i, name in enumerate(names)})
        self.blocks = {n: Block(int(counts[i]), int(found.count[i]), confidence[i]) for i, n in enumerate(names)}
        out = {}
        for i, name in enumerate(names):
            out[name] = [*work[name][1 : 1 + found.count[i]], int(found.next_token[i])]
            live[name].pending, live[name].left = out[name][-1], live[name].left - len(out[name])
        return out

    def _draft(self, live: dict[Hashable, _Sequence], length: np.ndarray, settings: Settings) -> DraftOutput:
        session = self.session
        anchors = [
            Anchor(session.slot(name), s.pending, int(n), session.floor(name))
            for (name, s), n in zip(live.items(), length, strict=False)
        ]
        step = make_draft_step(anchors, session.cfg, seqs=len(length))
        return self._drafter(session.params, session.cache, step, session.cfg, settings)

    def _lengths(self, live: dict[Hashable, _Sequence], length: np.ndarray, confidence: np.ndarray) -> list[int]:
        """Drafts to verify per live sequence, capped by the block, the context end and the tokens left."""
        cfg, limits = self.session.cfg, []
        for sequence, n in zip(live.values(), length.tolist(), strict=False):
            room = (cfg.max_position_embeddings - 1 - n, sequence.left - 1)
            limits.append(min(cfg.dspark_block_size, cfg.num_draft_tokens, self.drafts, *room))
        if self.costs is None:
            return fixed_lengths(limits, self.drafts)
        # The logistic function by tanh, which does not overflow.
        chances = 0.5 * (1.0 + np.tanh(0.5 * confidence[: len(limits)].astype(np.float64) / self._temperatures))
        return confidence_lengths(chances, limits, self.costs)


def speculate_tokens(
    params: Params,
    cfg: ModelConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    seed: int = 0,
    prefill_rows: int = PREFILL_ROWS,
    *,
    ngram_hash: NgramHash | None = None,
    drafts: int | None = None,
) -> Iterator[int]:
    """As `generate.generate_tokens`, with drafted blocks: greedy gives equal ids, sampling an equal distribution.

    drafts: the most drafts to verify per step; None = a whole block. Beside the two steps of `generate_tokens` a call
    compiles a draft step and one verify step per power of two of rows, up to a block and one.
    Raises what `generate_tokens` raises, and before the first id ValueError for a model without draft layers, those of
    another model, and drafts below 0.
    """
    check_request(prompt, max_new_tokens, seed, prefill_rows)
    check_fit(prompt, max_new_tokens, cfg)
    check_hash(ngram_hash, cfg)
    check_draft_params(params, cfg)
    check_drafts(cfg.dspark_block_size if drafts is None else drafts)
    request = [int(token) for token in prompt], max_new_tokens, sampling, seed
    return _run(params, cfg, request, prefill_rows, ngram_hash, drafts)


def _run(params: Params, cfg: ModelConfig, request: tuple, prefill_rows: int, ngram_hash, drafts: int | None):
    session = request_session(params, cfg, len(request[0]) + request[1], prefill_rows, ngram_hash)
    speculator = Speculator(session, drafts=drafts)
    yield speculator.open(SEQUENCE, *request)
    while emitted := speculator.round():
        yield from emitted[SEQUENCE]
