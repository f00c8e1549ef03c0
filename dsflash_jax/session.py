"""A cache with the host bookkeeping that a loop over steps needs: slots, pages and the tokens known so far."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, bucket, check_hash, check_tail, check_tokens, make_step
from dsflash_jax.cache.layout import pages_for
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.cache.pages import PagePool
from dsflash_jax.config import ModelConfig
from dsflash_jax.host_tables import HostTables
from dsflash_jax.ops.ngram_hash import NgramHash
from dsflash_jax.replay import draft_floor
from dsflash_jax.types import StepInfo

Work = Mapping[Hashable, Sequence[int]]  # sequence name -> its next tokens
PREFILL_ROWS = 128  # rows of a step at most: bounds memory, and the chunks of a prompt share one compiled shape


class Planned(NamedTuple):
    """A step that is ready to run, and the tokens it takes from each sequence."""

    work: dict[Hashable, list[int]]
    step: StepInfo
    decoder: str  # how `prefill` runs it; "all" for a step of one token per sequence, which is a decode step


class Session:
    """Sequences by name on one cache. A name that is new opens a sequence; `close` gives its slot and pages back.

    A refused call raises ValueError and changes nothing. Not for threads; sharing and eviction are left to an engine.
    """

    def __init__(
        self,
        params: steps.Params,
        cfg: ModelConfig,
        *,
        num_pages: int,
        sequences: int = 1,
        prefill_rows: int = PREFILL_ROWS,
        table_pages: int | None = None,
        decoder: str = "all",
        ngram_hash: NgramHash | None = None,
        host_tables: HostTables | None = None,
    ) -> None:
        """An empty cache of `num_pages` pages for up to `sequences` sequences at a time.

        prefill_rows: a longer `append` runs in steps of that many rows, as a power of two.
        table_pages: width of all block tables; without it, a power of two that grows with the longest sequence. Each
        new width compiles a step, and a wider table is more to read.
        decoder: how prompts run the decoder layers, as in `steps.prefill`; decoded and verified tokens run all layers.
        ngram_hash: what a model with Engram layers needs: `NgramHash.of` its tokenizer's map (`build_token_map`), or
        `stand_in_hash` where there is no tokenizer.
        host_tables: n-gram tables that are not among `params`; those of a prompt's next step are read while one runs.
        """
        for name, value in (("sequences", sequences), ("prefill_rows", prefill_rows)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if host_tables is not None and not cfg.engram_layer_ids:
            raise ValueError("host_tables are of no use to a model with engram_layer_ids=[].")
        check_hash(ngram_hash, cfg)
        self.params, self.cfg = params, cfg
        self._ngram_hash = ngram_hash
        self._host_tables = host_tables
        self.pool = PagePool(num_pages, cfg.page_size)
        self.cache = ModelCache.empty(cfg, num_pages, sequences, decoder=decoder)
        if decoder != "all":
            check_tail(self.cache, cfg, decoder)
        self._decoder = decoder
        self._rows, self._table_pages = bucket(prefill_rows), table_pages
        self._free = list(range(sequences))  # ascending, hence a heap
        self._slots: dict[Hashable, int] = {}
        self._known: dict[Hashable, list[int]] = {}
        self._floors: dict[Hashable, int] = {}
        self._verified: Planned | None = None
        self._closed: set[Hashable] = set()  # since the last verify: a name may be open again, as another sequence

    def tokens(self, sequence: Hashable) -> tuple[int, ...]:
        """Tokens of a sequence that the cache holds; () for one that is not open."""
        return tuple(self._known.get(sequence, ()))

    def slot(self, sequence: Hashable) -> int:
        """The cache slot of an open sequence. Raises ValueError for another one."""
        if sequence not in self._slots:
            raise ValueError(f"sequence {sequence!r} is not open: it has no slot.")
        return self._slots[sequence]

    def floor(self, sequence: Hashable) -> int:
        """Lowest position of an open sequence that passed all layers: where a draft may start to read.

        Above 0 where `decoder` left the first tokens of a prompt to the encoder. ValueError for one that is not open.
        """
        self.slot(sequence)
        return self._floors[sequence]

    def append(self, work: Work) -> jax.Array:
        """Processes the next tokens of each sequence: float32 logits [len(work), V] after the last token of each.

        One token each is a decode step; more are a prefill, in as many steps as its rows need.
        """
        left = self._admit(work)
        total, decoder = sum(map(len, left.values())), self._mode(left)
        rows, seqs = min(bucket(total), self._rows), bucket(len(left))
        if total <= rows:
            logits = self.run(self._plan(left, rows, left, decoder))
            return logits if len(logits) == len(left) else logits[: len(left)]
        last: dict[Hashable, jax.Array] = {}
        while left:
            part = _first_rows(left, rows)
            planned = self._plan(part, rows, left, decoder, seqs)
            ended = [name for name, tokens in part.items() if len(tokens) == len(left[name])]
            left = {name: tokens[len(part.get(name, ())) :] for name, tokens in left.items()}
            left = {name: tokens for name, tokens in left.items() if tokens}
            self._read_ahead(part, _first_rows(left, rows))
            logits = self.run(planned)
            last |= {name: logits[row] for row, name in enumerate(part) if name in ended}
        return jnp.stack([last[name] for name in work])

    def plan(self, work: Work) -> Planned:
        """The one step that takes the next tokens of each sequence, its pages reserved: `run` runs it, once."""
        admitted = self._admit(work)
        return self._plan(admitted, bucket(sum(map(len, admitted.values()))), admitted, self._mode(admitted))

    def run(self, planned: Planned) -> jax.Array:
        """Runs a plan before any other call: logits [S, V], a row per sequence in the plan's order, then padding.

        Raises ValueError for a plan whose sequences have moved on since, also by running it.
        """
        for name, start in zip(planned.work, planned.step.start.tolist(), strict=False):
            known = len(self._known[name]) if name in self._known else None
            if known != start:
                now = "it is closed" if known is None else f"it has {known} now"
                raise ValueError(f"sequence {name!r} was planned behind {start} tokens, {now}: plan again.")
        self._verified = None
        logits, self.cache = steps.prefill(self.params, self.cache, planned.step, self.cfg, decoder=planned.decoder)
        for name, tokens in planned.work.items():
            self._known[name] += tokens
        if planned.decoder != "all":
            self._raise_floors(planned)
        return logits

    def _raise_floors(self, planned: Planned) -> None:
        """A step that leaves a prompt open ran no decoder at all."""
        facts = zip(planned.work, planned.step.length.tolist(), planned.step.last_chunk, strict=False)
        for name, length, last in facts:
            self._floors[name] = draft_floor(self.cfg, 0, length, planned.decoder) if last else length

    def verify(self, work: Work) -> dict[Hashable, np.ndarray]:
        """Logits [k, V] after each of k drafted tokens per sequence, on the host: any k is cut without compiling.

        No token is known yet: `commit` says how many are.
        """
        for name, drafts in work.items():
            if len(drafts) > self.cfg.num_draft_tokens + 1:
                most = f"num_draft_tokens + 1 = {self.cfg.num_draft_tokens + 1}"
                raise ValueError(f"sequence {name!r}: {len(drafts)} tokens to verify exceed {most}.")
        planned = self.plan(work)
        logits, self.cache = steps.verify(self.params, self.cache, planned.step, self.cfg)
        self._verified, self._closed, logits = planned, set(), np.asarray(logits)
        ends = np.cumsum([len(drafts) for drafts in planned.work.values()])
        return {name: logits[end - len(planned.work[name]) : end] for name, end in zip(planned.work, ends, strict=True)}

    def commit(self, accepted: Mapping[Hashable, int]) -> None:
        """Makes the first `accepted` tokens of each verified sequence known, none of a sequence that is left out.

        Must follow `verify` with no other step between: an `append` in its place rejects all drafts.
        """
        if self._verified is None:
            raise ValueError(f"accepted={dict(accepted)} has nothing to accept from: call verify first.")
        work, step = self._verified.work, self._verified.step
        for name, count in accepted.items():
            if name not in work:
                raise ValueError(f"accepted names sequence {name!r}, verified were {', '.join(map(repr, work))}.")
            if name in self._closed:
                raise ValueError(f"accepted names sequence {name!r}, which was closed after it was verified.")
            if int(count) != count or not 0 <= count <= len(work[name]):
                most = len(work[name])
                raise ValueError(f"sequence {name!r}: accepted={count} must be one of 0..{most}, the tokens verified.")
        counts = np.zeros(step.num_seqs, np.int32)
        counts[: len(work)] = [accepted.get(name, 0) for name in work]
        self.cache = steps.commit(self.cache, step, counts)
        for name, count in zip(work, counts.tolist(), strict=False):
            if count:
                self._known[name] += work[name][:count]
        self._verified = None

    def close(self, sequence: Hashable) -> None:
        """Ends a sequence. Its slot and pages are free, their bytes stay until the next sequence writes over them."""
        if sequence not in self._slots:
            names = ", ".join(map(repr, self._slots)) or "none"
            raise ValueError(f"sequence {sequence!r} is not open: open are {names}.")
        self.pool.release(sequence)
        del self._known[sequence], self._floors[sequence]
        self._closed.add(sequence)
        heapq.heappush(self._free, self._slots.pop(sequence))

    def _admit(self, work: Work) -> dict[Hashable, list[int]]:
        """Checks all of `work` first, then reserves its pages and opens its new sequences."""
        if not work:
            raise ValueError("work names no sequence: a step needs at least one.")
        for name, tokens in work.items():
            check_tokens(tokens, len(self._known.get(name, ())), self.cfg, f"sequence {name!r}")
        new = [name for name in work if name not in self._slots]
        if len(new) > len(self._free):
            slots = len(self._slots) + len(self._free)
            raise ValueError(f"sequence {new[len(self._free)]!r} has no slot: all {slots} are taken, close one first.")
        ends = {name: len(self._known.get(name, ())) + len(tokens) for name, tokens in work.items()}
        widest = max(pages_for(self.cfg, end) for end in ends.values())
        if self._table_pages is not None and widest > self._table_pages:
            raise ValueError(f"table_pages={self._table_pages} is smaller than the {widest} that this step needs.")
        self.pool.reserve_all(ends)
        for name in new:
            self._slots[name], self._known[name], self._floors[name] = heapq.heappop(self._free), [], 0
        return {name: [int(token) for token in tokens] for name, tokens in work.items()}

    def _mode(self, work: dict[Hashable, list[int]]) -> str:
        """How the decoder runs on `work` as a whole: the last part of a prompt may be one token long, too."""
        return self._decoder if any(len(tokens) > 1 for tokens in work.values()) else "all"

    def _plan(
        self,
        work: dict[Hashable, list[int]],
        rows: int,
        wanted: dict[Hashable, list[int]],
        decoder: str,
        seqs: int | None = None,
    ) -> Planned:
        """A step of `rows` rows; `wanted` is what is left of the prompts, of which `work` may be a first part.

        seqs: of all steps of an `append`, whichever prompts the rows of one happen to hold, so that they share a shape.
        """
        chunks = []
        for name, tokens in work.items():
            known = self._known[name]
            pages = self.pool.pages(name)[: pages_for(self.cfg, len(known) + len(tokens))]
            previous = known[-1] if known else -1
            last = len(tokens) == len(wanted[name])
            chunks.append(
                Chunk(
                    self._slots[name], tokens, len(known), pages, previous_token=previous, last_chunk=last,
                    context=self._context(known),
                )
            )  # fmt: skip
        step = make_step(
            chunks, self.cfg, rows=rows, seqs=seqs, pages=self._table_pages, ngram_hash=self._ngram_hash
        )  # fmt: skip
        return Planned(work, step if self._host_tables is None else self._host_tables.fetch(step), decoder)

    def _context(self, known: list[int]) -> list[int]:
        """The last tokens, as many as n-grams look back on."""
        return known[max(0, len(known) - self._ngram_hash.lookback) :] if self._ngram_hash else []

    def _read_ahead(self, running: dict[Hashable, list[int]], following: dict[Hashable, list[int]]) -> None:
        """Starts to read the table rows of the step that follows, before the one before it runs."""
        if self._host_tables is None or not following:
            return
        known = {name: self._context(self._known[name]) + running.get(name, []) for name in following}
        rows = [self._ngram_hash.rows(tokens, known[name]) for name, tokens in following.items()]
        self._host_tables.prefetch(np.concatenate(rows))


def _first_rows(left: dict[Hashable, list[int]], rows: int) -> dict[Hashable, list[int]]:
    """The first `rows` tokens of `left`, sequence by sequence."""
    part: dict[Hashable, list[int]] = {}
    for name, tokens in left.items():
        if rows:
            part[name] = tokens[:rows]
            rows -= len(part[name])
    return part
