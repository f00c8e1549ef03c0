"""Runs the model step by step on the host and remembers what every token saw: the base of the model's tests."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.ngram_hash import NgramHash, stand_in_hash
from dsflash_jax.roles import layer_roles

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
# Few shapes, so that one compiled step serves many examples.
ROW_BUCKETS = (1, 16, 64)
CALM = 0.1  # scale of the weights that write into the streams
PAGES = 16  # block-table width that covers tiny.json's 128 positions
# Every byte of such rows decodes to NaN where the format has NaN (e4m3 codes, float32), else to large numbers.
POISON_BYTE, POISON_FLOAT = 0xFF, np.nan


@functools.lru_cache(maxsize=32)
def tiny(**changes) -> ModelConfig:
    """configs/tiny.json with fields changed.

    The XLA forms are named: otherwise every step also traces the kernels, which a CPU then drops, at a tenth of the
    time of a compilation. `test_steps.py` keeps the default, "the best for the platform".
    """
    return ModelConfig.from_json(CONFIGS / "tiny.json").replace(**({"implementation": "xla"} | changes))


def shallow(**changes) -> ModelConfig:
    """Three layers with every mechanism but a plain window layer: half the compile time of `tiny`."""
    layers = {"num_hidden_layers": 3, "compress_ratios": (2, 1, 1), "kv_source_layer_ids": (0, 1)}
    layers |= {"index_source_layer_ids": (0, 1, 2), "candidate_source_layer_id": 1}
    return tiny(**(layers | changes))


def single(**changes) -> ModelConfig:
    """One layer of ratio 2 with its own entries and selection: the cheapest model that uses all three caches."""
    layers = {"num_hidden_layers": 1, "compress_ratios": (2,), "kv_source_layer_ids": (0,)}
    layers |= {"index_source_layer_ids": (0,), "candidate_source_layer_id": -1}
    return tiny(**(layers | changes))


def remembering(**changes) -> ModelConfig:
    """Three layers, the first two with n-gram memory: 4-grams, so that the look-back crosses most cuts."""
    layers = {"num_hidden_layers": 3, "compress_ratios": (0, 0, 2), "kv_source_layer_ids": (2,)}
    layers |= {"index_source_layer_ids": (2,), "candidate_source_layer_id": -1, "engram_layer_ids": (0, 1)}
    layers |= {"engram_num_embeddings": (252, 410), "engram_max_ngram_size": 4, "engram_vocab_size": 30}
    layers |= {"engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": 48}
    return tiny(**(layers | changes))


def hash_of(cfg: ModelConfig) -> NgramHash | None:
    """What n-grams of a test's model are hashed with; None where nothing is."""
    return stand_in_hash(cfg) if cfg.engram_layer_ids else None


# Fields that change neither the shape of a parameter nor its draw.
_INDIFFERENT = {
    "window_format": "mxfp8", "main_format": "fp4_e4m3", "index_format": "mxfp4", "qat": False, "num_draft_tokens": 5,
    "scratch_bytes": 2**25, "index_topk": 4, "sliding_window": 4, "page_size": 8, "implementation": "",
    "interpret": False,
}  # fmt: skip


def parameters(cfg: ModelConfig, seed: int = 0, calm: float = CALM):
    """`_parameters` of `cfg`, shared by configurations that differ only in what leaves parameters alone."""
    return _parameters(cfg.replace(**_INDIFFERENT), seed, calm)


@functools.lru_cache(maxsize=32)
def _parameters(cfg: ModelConfig, seed: int, calm: float):
    """Seeded parameters with nothing left at its neutral start: sinks, biases and norm weights all matter.

    Sub-layer outputs are small beside the streams, so that one stored code that rounds the other way stays one code:
    at these widths it would otherwise move the inputs of later roundings by more than their step. An error inside a
    sub-layer therefore reaches the logits about ten times smaller (`calm`).
    """
    params = steps.init_params(cfg, seed)
    draws = np.random.default_rng(seed)

    def disturb(path, leaf):
        names = [str(getattr(p, "key", p)) for p in path]
        if names[0] == "freqs":
            return leaf
        if leaf.dtype == np.uint8:  # codes and exponents: an eighth of the weights that write into the streams
            return leaf - np.uint8(3) if names[-2:] in (["wo_b", "scale"], ["w2", "scale"]) else leaf
        noise = draws.normal(size=leaf.shape).astype(np.float32)
        if names[-1] in ("attn_sink", "bias") or names[-1].endswith(("_base", "_scale")):
            return leaf + 0.5 * noise
        if names[-1] == "weight" and leaf.ndim == 1:
            return leaf * (1 + 0.2 * noise)
        if names[-1] in ("q_weight", "k_weight"):
            return leaf * (1 + 0.2 * noise)
        return leaf * calm if names[-2:] in (["wo_b", "weight"], ["w2", "weight"]) else leaf

    return jax.tree_util.tree_map_with_path(disturb, params)


def prompt(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    """Seeded token ids."""
    return np.random.default_rng(1000 + seed).integers(0, vocab, length).tolist()


@dataclasses.dataclass
class Run:
    """What each processed position of one sequence produced, in order: lists of one array per position."""

    tokens: list = dataclasses.field(default_factory=list)
    logits: list = dataclasses.field(default_factory=list)
    layers: dict = dataclasses.field(default_factory=dict)  # (layer, name) -> list

    def stack(self, layer: int, name: str) -> np.ndarray:
        """[positions, ...] of one intermediate of one layer."""
        return np.stack(self.layers[layer, name])

    @property
    def length(self) -> int:
        """Positions processed."""
        return len(self.logits)


class Session:
    """A cache with its sequences: slot -> pages, and one `Run` per slot. Steps go through `steps.trace_step`.

    tables: pages of each slot, in order; by default slot s owns every `slots`-th page.
    poison: start from caches whose every byte is garbage instead of zeros.
    """

    def __init__(self, cfg, params, *, slots=4, tables=None, num_pages=None, page_bytes=None, poison=False):
        self.cfg, self.params = cfg, params
        per_slot = -(-cfg.max_position_embeddings // cfg.page_size)
        self.tables = tables or {s: [s + slots * i for i in range(per_slot)] for s in range(slots)}
        self.num_pages = num_pages or slots * per_slot
        self.cache = ModelCache.empty(cfg, self.num_pages, slots, page_bytes)
        if poison:
            self.cache = poisoned(self.cache)
        self.runs = {slot: Run() for slot in self.tables}

    def chunk(self, slot: int, tokens, pages=PAGES) -> Chunk:
        """The next tokens of a sequence as a `Chunk` that lists at most `pages` pages."""
        before = self.runs[slot].tokens
        previous = before[-1] if before else -1
        pages = self.tables[slot][:pages]
        return Chunk(slot, tokens, len(before), pages, previous_token=previous, context=list(before))

    def feed(self, work: dict[int, list[int]], *, rows=None, seqs=None, pages=PAGES) -> None:
        """One ragged step: the next tokens of each slot in `work`, in its order."""
        total = sum(len(tokens) for tokens in work.values())
        rows = rows or next(b for b in ROW_BUCKETS if b >= total)
        chunks = [self.chunk(slot, tokens, pages) for slot, tokens in work.items()]
        seqs = seqs or (1 if len(work) == 1 else 4)
        step = make_step(chunks, self.cfg, rows=rows, seqs=seqs, pages=pages, ngram_hash=hash_of(self.cfg))
        logits, self.cache, captures = steps.trace_step(self.params, self.cache, step, self.cfg)
        captures = jax.device_get(captures)
        logits, row = np.asarray(logits), 0
        for slot, tokens in work.items():
            record_rows(self.runs[slot], logits, captures, range(row, row + len(tokens)))
            self.runs[slot].tokens += tokens
            row += len(tokens)

    def restart(self, slot: int) -> None:
        """Ends the slot's sequence; the next one starts at position 0 in the same rows, which keep their bytes."""
        self.runs[slot] = Run()

    def stored(self, slot: int, length: int | None = None) -> dict:
        """What the caches hold for the first `length` tokens, by logical row; see `stored_rows`."""
        length = self.runs[slot].length if length is None else length
        return stored_rows(self.cfg, self.cache, slot, self.tables[slot], length)


def record_rows(run: Run, logits: np.ndarray, captures: list[dict], rows) -> None:
    """Appends the given rows of a traced step to a run."""
    for row in rows:
        run.logits.append(logits[row])
        for layer, capture in enumerate(captures[:-1]):
            for name, values in capture.items():
                if values is not None:
                    run.layers.setdefault((layer, name), []).append(values[row])


def run_chunks(cfg, params, tokens, sizes, *, row_bucket=None, **options) -> Session:
    """A session whose slot 0 has processed `tokens` in chunks of the given sizes."""
    session, at = Session(cfg, params, **options), 0
    for size in sizes:
        session.feed({0: tokens[at : at + size]}, rows=row_bucket)
        at += size
    return session


def stored_rows(cfg, cache: ModelCache, slot: int, pages, length: int) -> dict:
    """Packed rows that a later token may read, in logical order, whatever pages and slots they lie in.

    (kind, layer) -> uint8[rows, row_bytes]: "main" and "index" rows of all complete groups, "window" rows of the last
    `sliding_window` positions; ("open", owner) -> float32 rows of the group left open.
    """
    layout = cache_layout(cfg)
    arena, ring, state = np.asarray(cache.pages), np.asarray(cache.ring), np.asarray(cache.state)
    out = {}
    for member in layout.members:
        rows = []
        for entry in range(length // member.tokens_per_row):
            at = member.offset + entry % member.rows_per_page * member.row_bytes
            rows.append(arena[pages[entry // member.rows_per_page], at : at + member.row_bytes])
        out[member.kind, member.layer] = np.array(rows, np.uint8).reshape(-1, member.row_bytes)
    for member in layout.ring:
        rows = []
        for position in range(max(0, length - cfg.sliding_window), length):
            at = member.offset + position % member.rows_per_page * member.row_bytes
            rows.append(ring[slot, at : at + member.row_bytes])
        out["window", member.layer] = np.array(rows, np.uint8).reshape(-1, member.row_bytes)
    for index, owner in enumerate(layout.state_owners):
        first = length - length % layer_roles(cfg)[owner].ratio
        out["open", owner] = state[slot, index, [p % layout.state_rows for p in range(first, length)]]
    return out


def poisoned(cache: ModelCache) -> ModelCache:
    """Caches of the same shape full of garbage."""
    return ModelCache(
        pages=np.full_like(cache.pages, POISON_BYTE),
        ring=np.full_like(cache.ring, POISON_BYTE),
        state=np.full_like(cache.state, POISON_FLOAT),
        length=np.full_like(cache.length, 77),
        tail=jax.tree.map(lambda leaf: np.full_like(leaf, POISON_FLOAT), cache.tail),
    )
