"""What speculation does on one model: accepted drafts by position, tokens per step, calibration, seconds per token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dsflash_jax.config import ModelConfig
from dsflash_jax.generate import request_session
from dsflash_jax.sampling import Sampling
from dsflash_jax.session import Session
from dsflash_jax.speculate import Block, Speculator
from dsflash_jax.speculative import CostTable, next_tokens, profile_costs, settings_of
from dsflash_jax.training.calibration import (
    Rounds,
    error_floor,
    position_errors,
    reliability,
    survival,
)
from dsflash_jax.training.corpus import Corpus
from dsflash_jax.training.data import HELD_OUT_STREAM, make_batch
from dsflash_jax.training.evaluate import EVALUATION_SEED
from dsflash_jax.training.settings import TrainSettings

KINDS = ("text", "recall", "needle", "copy")
PLAIN = "plain"
CONTROL = "untrained"  # draft layers before their training
MEASURED, FITTED = 0, 1  # which of two disjoint draws of prompts
_SHORTEST = 33  # of a prompt, so that all prompts share one compiled prefill
_NAME = "sequence"
_next = jax.jit(next_tokens)


class Prompt(NamedTuple):
    """A prompt, and the token that the row determines next; None behind running text."""

    kind: str
    tokens: list[int]
    answer: int | None


@dataclasses.dataclass(frozen=True)
class Mode:
    """How many drafts a round verifies: a fixed number, or what confidences (over temperatures) make worth its cost."""

    name: str
    drafts: int | None = None
    costs: CostTable | None = None
    temperatures: tuple[float, ...] | None = None


@dataclasses.dataclass
class Trace:
    """One generation: its tokens, and the block of every round.

    seconds: of all tokens but the first, which the prefill gives.
    """

    tokens: list[int]
    seconds: float
    blocks: list[Block] = dataclasses.field(default_factory=list)


def held_out_prompts(
    cfg: ModelConfig, settings: TrainSettings, corpus: Corpus, kind: str, count: int, length: int, draw: int
) -> list[Prompt]:
    """`count` prompts of at most `length` tokens from held-out rows; the same for every model.

    Text is a whole row. The others end where the row asks: recall with its last question, needle with its only one,
    copy with the first of the repeated span. Raises ValueError where rows are too short to give that many.
    """
    shares = {name: float(name == kind) for name in ("recall", "needle", "copy")}
    mix = settings.replace(rows=8 * count, context=length, near=0.0, **shares).mix(cfg)
    batch = make_batch(mix, corpus.held_out, EVALUATION_SEED, draw, HELD_OUT_STREAM)
    found = []
    for tokens, targets, asked in zip(batch.tokens, batch.targets, batch.answer_mask, strict=True):
        if kind == "text":
            found.append(Prompt(kind, tokens.tolist(), None))
            continue
        places = np.flatnonzero(asked)
        end = places[0] if kind == "copy" else places[-1]
        if end + 1 >= _SHORTEST:
            found.append(Prompt(kind, tokens[: end + 1].tolist(), int(targets[end])))
    if len(found) < count:
        raise ValueError(f"length={length} gives {len(found)} {kind} prompts of {_SHORTEST} tokens, {count} are asked.")
    return found[:count]


class Decoder:
    """Generates with one model, plainly or by drafts, and keeps what every round did. One sequence at a time."""

    def __init__(self, params: Any, cfg: ModelConfig, capacity: int) -> None:
        """capacity: tokens of prompt and generation at most; every mode runs in the same caches."""
        # On the device: parameters on the host would be passed again with every step, and the steps be timed with it.
        self.cfg, self._params, self._capacity = cfg, jax.device_put(params), capacity

    def run(self, prompt: Sequence[int], new: int, sampling: Sampling, seed: int, mode: Mode) -> Trace:
        """`new` tokens behind a prompt; "plain" decodes one by one, every other mode drafts."""
        session = request_session(self._params, self.cfg, self._capacity, self._capacity, None)
        if mode.name == PLAIN:
            return self._plain(session, prompt, new, sampling, seed)
        trace = Trace([], 0.0)
        speculator = Speculator(session, drafts=mode.drafts, costs=mode.costs, temperatures=mode.temperatures)
        trace.tokens.append(speculator.open(_NAME, prompt, new, sampling, seed))
        begin = time.perf_counter()
        while emitted := speculator.round():
            trace.tokens += emitted[_NAME]
            trace.blocks.append(speculator.blocks[_NAME])
        trace.seconds = time.perf_counter() - begin
        return trace

    def _plain(self, session: Session, prompt: Sequence[int], new: int, sampling: Sampling, seed: int) -> Trace:
        settings = settings_of([sampling], [seed], self.cfg.vocab_size)

        def following(tokens: Sequence[int], position: int) -> int:
            logits = session.append({_NAME: list(tokens)})
            return int(np.asarray(_next(logits, settings, np.array([position], np.int32)))[0])

        tokens = [following(prompt, len(prompt))]
        begin = time.perf_counter()
        while len(tokens) < new:
            tokens.append(following(tokens[-1:], len(prompt) + len(tokens)))
        return Trace(tokens, time.perf_counter() - begin)

    def profile(self, prompt: Sequence[int], drafts: Sequence[int], repeats: int) -> CostTable:
        """Seconds of a whole round, drafting included, by the rows that it verifies: one more than its `drafts`."""
        speculators: dict[int, Speculator] = {}
        prompt = prompt[:_SHORTEST]

        def round_of(rows: int) -> None:
            if rows not in speculators:
                session = request_session(self._params, self.cfg, self._capacity, self._capacity, None)
                speculators[rows] = Speculator(session, drafts=rows - 1)
                speculators[rows].open(_NAME, prompt, self._capacity - len(prompt))
            speculators[rows].round()

        sizes = [count + 1 for count in drafts]
        most = (self._capacity - len(prompt) - 1) // max(sizes) - 1  # rounds that end before the tokens do
        return profile_costs(round_of, sizes, time.perf_counter, min(repeats, most))


def rounds_of(traces: Sequence[Trace]) -> Rounds:
    """The rounds of some generations, as calibration takes them."""
    blocks = [block for trace in traces for block in trace.blocks]
    verified, accepted, confidence = (np.asarray(column) for column in zip(*blocks, strict=True))
    return Rounds(confidence.astype(np.float64), verified, accepted)


def acceptance(traces: Sequence[Trace], block: int) -> dict[str, list[int]]:
    """Per position of a block, over all rounds: how many verified a draft there, how many of these had accepted all
    drafts before it, and how many accepted it too.
    """
    _, verified, accepted = rounds_of(traces)
    counts: dict[str, list[int]] = {"verified": [], "reached": [], "accepted": []}
    for position in range(block):
        known = verified > position
        counts["verified"].append(int(known.sum()))
        counts["reached"].append(int((known & (accepted >= position)).sum()))
        counts["accepted"].append(int((known & (accepted > position)).sum()))
    return counts


def summary(traces: Sequence[Trace], block: int) -> dict[str, Any]:
    """Sums over generations of one mode; the first token of each, which the prefill gave, does not count."""
    tokens = sum(len(trace.tokens) - 1 for trace in traces)
    found: dict[str, Any] = {
        "prompts": len(traces), "tokens": tokens, "seconds": sum(trace.seconds for trace in traces),
        "rounds": sum(len(trace.blocks) for trace in traces) or tokens,
    }  # fmt: skip
    if any(trace.blocks for trace in traces):
        found |= acceptance(traces, block)
    return found


def calibration(fitted: Rounds, measured: Rounds, temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Error and reliability of `measured`, before and after temperatures that were fitted on `fitted`."""
    rounds = [len(r.verified) for r in (fitted, measured)]
    found: dict[str, Any] = {"temperatures": list(temperatures), "rounds": rounds}
    for name, used in (("before", (1.0,) * len(temperatures)), ("after", temperatures)):
        chances = survival(measured.logits, used)
        known = [measured.labelled(position) for position in range(chances.shape[1])]
        predicted = np.concatenate([chances[k, i] for i, k in enumerate(known)])
        observed = np.concatenate([measured.survived(i)[k] for i, k in enumerate(known)])
        bins = [[b.count, round(b.predicted, 5), round(b.observed, 5)] for b in reliability(predicted, observed)]
        floors = [error_floor(chances[k, i]) if k.any() else None for i, k in enumerate(known)]
        found[name] = {"error": position_errors(measured, used), "floor": floors, "bins": bins}
    return found
