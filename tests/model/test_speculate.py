"""Speculation changes nothing but the number of steps: greedy output and caches are those of plain decoding."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from dsflash_jax import batch, draft_step, speculate, steps
from dsflash_jax import session as session_module
from dsflash_jax.batch import Chunk, bucket, make_step
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.draft_step import Anchor, check_draft_params, draft, make_draft_step
from dsflash_jax.generate import generate_tokens
from dsflash_jax.modules.dspark import DraftOutput, draft_roles, window_positions
from dsflash_jax.replay import draft_floor
from dsflash_jax.sampling import Sampling
from dsflash_jax.session import Session
from dsflash_jax.speculate import Speculator, speculate_tokens
from dsflash_jax.speculative import CostTable, settings_of
from dsflash_jax.types import DraftStep
from tests.model import running
from tests.model.running import stored_rows

BLOCK, ROWS, SEQS = 3, 16, 4
DRAFTS = {
    "num_nextn_predict_layers": 2, "dspark_block_size": BLOCK, "dspark_target_layer_ids": (0,), "dspark_markov_rank": 8,
    "dspark_noise_token_id": 9, "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 1,
    "max_position_embeddings": 32,
}  # fmt: skip
CFG = running.single(**DRAFTS)
REMEMBERING = running.remembering(**DRAFTS)  # three layers, n-grams of four tokens look back over a block
LENGTHS = (3, 4)  # prompts of both parities
WARM = Sampling(temperature=1.0)


@contextlib.contextmanager
def one_shape():
    """All steps get ROWS rows and SEQS sequences: few are compiled, and equal rows have equal bits in all of them."""
    with pytest.MonkeyPatch.context() as patch:
        for module, smallest in ((session_module, ROWS), (batch, SEQS), (speculate, SEQS)):
            patch.setattr(module, "bucket", functools.partial(bucket, smallest=smallest))
        yield


def session(cfg=CFG, params=None, **options):
    sizes = {"num_pages": 16, "table_pages": 4, "sequences": SEQS, "ngram_hash": running.hash_of(cfg)}
    return Session(running.parameters(cfg) if params is None else params, cfg, **{**sizes, **options})


def stored(mine, name="a"):
    """Everything that the next token may read of a sequence, as bytes and exact floats."""
    length, pages = len(mine.tokens(name)), mine.pool.pages(name)
    return stored_rows(mine.cfg, mine.cache, mine.slot(name), pages, length)


@dataclasses.dataclass
class Plain:
    """Greedy decoding token by token: the whole sequence, and what is stored at every length from the prompt's on."""

    tokens: list[int]
    states: dict[int, dict]


@functools.lru_cache(maxsize=8)
def plain(cfg, length, end=32):
    with one_shape():
        mine, states = session(cfg), {}
        tokens = new = running.prompt(length)
        while len(tokens) < end:
            logits = mine.append({"a": new})
            states[len(tokens)] = stored(mine)
            new = [int(np.argmax(logits[0]))]
            tokens = tokens + new
    return Plain(tokens, states)


def scripted(sequence, wrong=None, instead=lambda token: (token + 1) % CFG.vocab_size):
    """A drafter that knows what follows in slot 0, and in every block errs at place `wrong`, if any."""

    def drafter(params, cache, step, cfg, settings):
        at = int(step.length[0])
        assert int(step.tokens[0]) == sequence[at] and step.slot.tolist() == [0, -1, -1, -1]
        tokens = np.zeros((len(step.slot), BLOCK), np.int32)
        known = sequence[at + 1 : at + 1 + BLOCK]
        tokens[0, : len(known)] = known
        if wrong is not None:
            tokens[0, wrong] = instead(tokens[0, wrong])
        logits = np.where(np.arange(cfg.vocab_size) == tokens[..., None], 20.0, 0.0).astype(np.float32)
        return DraftOutput(tokens, logits, np.zeros(tokens.shape, np.float32))

    return drafter


def run(speculator, requests):
    """Opens every (name, prompt, new, sampling, seed) and runs all to their ends: name -> list of emissions."""
    with one_shape():
        out = {name: [[speculator.open(name, *request)]] for name, *request in requests}
        while emitted := speculator.round():
            for name, tokens in emitted.items():
                out[name].append(tokens)
    return out


def flat(emissions):
    return [token for tokens in emissions for token in tokens]


# -- a drafter whose drafts are known to be right or wrong --


@pytest.mark.parametrize("cfg", [CFG, pytest.param(REMEMBERING, marks=pytest.mark.slow)], ids=["single", "ngrams"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_forced_drafts_leave_plain_decoding_bit_for_bit(cfg, length, wrong):
    """B75, B89, B91: all right, or wrong at each place: tokens, rings, pages, open groups and look-back are serial.

    A right block gives its tokens and one more; of a block that is wrong at place k, k tokens and the correction.
    """
    expected = plain(cfg, length)
    with one_shape():
        mine = session(cfg)
        speculator = Speculator(mine, drafter=scripted(expected.tokens, wrong))
        per_round = BLOCK + 1 if wrong is None else wrong + 1
        tokens = [*running.prompt(length), speculator.open("a", running.prompt(length), 1 + 3 * (BLOCK + 1))]
        while emitted := speculator.round():
            tokens += emitted["a"]
            left = length + 1 + 3 * (BLOCK + 1) - len(tokens)
            assert len(emitted["a"]) == per_round or left == 0
            for key, rows in stored(mine).items():
                assert rows.tobytes() == expected.states[len(tokens) - 1][key].tobytes(), (key, len(tokens))
            if cfg.engram_layer_ids:
                index = mine.plan({"a": tokens[-1:]}).step.ngrams.index[0]
                assert np.array_equal(index, running.hash_of(cfg).rows(tokens)[-1])
    assert tokens == expected.tokens[: len(tokens)] and len(tokens) == length + 1 + 3 * (BLOCK + 1)
    assert {kind for kind, _ in expected.states[7]} == {"main", "index", "window", "open"}
    assert ("window", cfg.num_hidden_layers + 1) in expected.states[7], "the last draft layer's ring is compared"


def test_drafts_stop_at_the_context_end():
    """B28: the last verified position is the context's last but one, of a drafter that would go on for ever."""
    expected, mine = plain(CFG, 4), session()
    out = run(Speculator(mine, drafter=scripted(expected.tokens)), [("a", expected.tokens[:4], 28)])
    assert flat(out["a"]) == expected.tokens[4:] and len(mine.tokens("a")) == 31
    assert [len(tokens) for tokens in out["a"]] == [1, 4, 4, 4, 4, 4, 4, 3]


def test_fewer_drafts_than_a_block_are_verified():
    expected = plain(CFG, 4)
    for drafts, sizes in ((0, [1] * 7), (1, [1, 2, 2, 2])):
        speculator = Speculator(session(), drafts=drafts, drafter=scripted(expected.tokens))
        out = run(speculator, [("a", expected.tokens[:4], 7)])
        assert flat(out["a"]) == expected.tokens[4:11] and [len(tokens) for tokens in out["a"]] == sizes


def nan_for(token):
    params = running.parameters(CFG)
    return {**params, "embed": {"weight": params["embed"]["weight"].at[token].set(np.nan)}}


def test_a_token_after_logits_that_are_not_finite_is_refused_by_position():
    expected = plain(CFG, 4)
    first = expected.tokens.index(expected.tokens[6], 4)  # the first of the new tokens that is this one
    speculator = Speculator(session(params=nan_for(expected.tokens[6])), drafter=scripted(expected.tokens))
    with pytest.raises(FloatingPointError, match=f"logits of sequence 'a' at position {first} hold NaN"):
        run(speculator, [("a", expected.tokens[:4], 9)])
    bad = nan_for(expected.tokens[3])
    with pytest.raises(FloatingPointError, match="logits of sequence 'a' at position 3 hold NaN"):
        run(Speculator(session(params=bad), drafter=scripted(expected.tokens)), [("a", expected.tokens[:4], 9)])


def test_logits_behind_a_rejected_draft_stop_nothing():
    """Nothing follows them: whatever they hold, plain decoding never sees them."""
    expected = plain(CFG, 4)
    unused = next(token for token in range(CFG.vocab_size) if token not in expected.tokens)
    drafter = scripted(expected.tokens, 1, lambda _: unused)
    out = run(Speculator(session(params=nan_for(unused)), drafter=drafter), [("a", expected.tokens[:4], 9)])
    assert flat(out["a"]) == expected.tokens[4:13]


# -- the draft layers themselves --


REQUESTS = [
    ("a", running.prompt(4, 4), 10, WARM, 28),
    ("b", running.prompt(7, 7), 6, Sampling(temperature=0.8, top_k=40, top_p=0.9), 49),
    ("c", running.prompt(5, 5), 9, Sampling(), 35),
]


def test_a_seed_gives_the_same_tokens_alone_and_in_every_batch():
    """B92: other lengths, parities, seeds and accepted lengths beside it, opened in another order, ending elsewhere."""
    alone = {request[0]: run(Speculator(session()), [request])[request[0]] for request in REQUESTS}
    assert len({len(tokens) for emissions in alone.values() for tokens in emissions}) > 1, "some drafts were accepted"
    for order in ((0, 1, 2), (2, 0, 1)):
        together = run(Speculator(session()), [REQUESTS[i] for i in order])
        assert together == alone
    partners = [(name, prompt, 9, WARM, 100 + seed) for name, prompt, _, _, seed in REQUESTS[1:]]
    assert run(Speculator(session()), [partners[0], REQUESTS[0], partners[1]])["a"] == alone["a"]


def confident(confidence):
    """A drafter of token 0 with the same confidence logits [S][BLOCK] in every block."""

    def drafter(params, cache, step, cfg, settings):
        shape = (len(step.slot), BLOCK)
        given = np.zeros(shape, np.float32)
        given[: len(confidence)] = confidence
        return DraftOutput(np.zeros(shape, np.int32), np.zeros((*shape, cfg.vocab_size), np.float32), given)

    return drafter


@pytest.mark.parametrize(("temperatures", "expected"), [(None, [3, 0]), ((1e6, 1e6, 1e6), [1, 1])])
def test_lengths_follow_the_calibrated_confidences_and_the_costs(temperatures, expected):
    """One sequence is sure of its drafts, one is not; the temperatures make both as unsure, and rows cost time."""
    costs = CostTable((2, 8), (1.0, 2.0))
    speculator = Speculator(
        session(), costs=costs, temperatures=temperatures, drafter=confident([[9.0] * BLOCK, [-9.0] * BLOCK])
    )
    with one_shape():
        for name in "ab":
            speculator.open(name, running.prompt(4), 12)
        emitted = speculator.round()
    assert [speculator.blocks[name].verified for name in "ab"] == expected
    assert all(len(emitted[name]) == 1 + speculator.blocks[name].accepted for name in "ab")


def test_scheduled_sequences_that_draw_need_seeds_of_their_own():
    speculator = Speculator(session(), costs=CostTable((1,), (1.0,)))
    with one_shape():
        speculator.open("a", running.prompt(4), 4, WARM, 3)
        with pytest.raises(ValueError, match="sequence 'b': seed=3 is that of sequence 'a'; with costs each needs"):
            speculator.open("b", running.prompt(4), 4, WARM, 3)
        speculator.open("b", running.prompt(4), 4)  # a greedy one draws nothing
        speculator.open("c", running.prompt(4), 4, WARM, 4)


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.0, 1.0), (1.0, float("nan"), 1.0)])
def test_temperatures_that_do_not_fit_a_block_are_refused(temperatures):
    with pytest.raises(ValueError, match="must be 3 positive numbers, one per position of a block"):
        Speculator(session(), temperatures=temperatures)


def test_rounds_in_steady_state_compile_nothing_and_move_no_pool(caplog):
    """Four sequences with drafts that are accepted or not; opened in one shape, then left to their own sizes."""
    mine = session()
    speculator = Speculator(mine)
    with one_shape():
        for n in range(SEQS):
            speculator.open(n, running.prompt(4 + n, n), 22, WARM, n)
    speculator.round()
    before = [getattr(mine.cache, name).unsafe_buffer_pointer() for name in ("pages", "ring", "state")]
    with jax.log_compiles(), caplog.at_level("DEBUG"):
        sizes = [len(tokens) for _ in range(3) for tokens in speculator.round().values()]
    assert len(set(sizes)) > 1, "accepted lengths differ"
    assert not [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()]
    assert [getattr(mine.cache, name).unsafe_buffer_pointer() for name in ("pages", "ring", "state")] == before


@pytest.mark.slow
def test_the_compiled_round_updates_every_pool_in_place():
    """Pools of many megabytes: verify and commit reuse them, and the draft step, which only reads, copies none."""
    big = ModelCache.abstract(CFG, 20_000, 3_000)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), running.parameters(CFG))
    step = make_step([Chunk(0, [5, 6], 0, [0])], CFG, rows=ROWS, seqs=SEQS, pages=4)
    settings = settings_of([WARM], [0], CFG.vocab_size, SEQS)
    drafting = make_draft_step([Anchor(0, 5, 2)], CFG, seqs=SEQS)
    lowered = {
        "verify": steps._step.lower(params, big, step, CFG, "all", False),
        "commit": steps._commit.lower(big, step, np.ones(SEQS, np.int32)),
        "draft": draft_step._draft.lower(params, big, drafting, CFG, settings),
    }
    pools = [getattr(big, name) for name in ("pages", "ring", "state")]
    sizes = [pool.size * pool.dtype.itemsize for pool in pools]
    assert min(sizes) > 2 * 2**20
    for name, each in lowered.items():
        compiled = each.compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory.temp_size_in_bytes < 2**20, name
        if name == "draft":
            assert memory.output_size_in_bytes < 2**20
        else:
            assert memory.alias_size_in_bytes >= sum(sizes), name
        for pool in pools:
            shape = f"[{','.join(map(str, pool.shape))}]"
            assert not [line for line in text.splitlines() if shape in line and " copy(" in line], name


def test_a_draft_behind_a_prefix_hit_reads_what_was_written():
    """B83: a hit brings pages, no window rows. Rows below the restart are garbage, and the draft never sees them."""
    params, tokens, hit, restart = running.parameters(CFG), running.prompt(9), 8, 6
    pages = list(range(4))
    sizes = {"rows": ROWS, "seqs": SEQS, "pages": 4}
    cache = ModelCache.empty(CFG, 16, SEQS)
    _, cache = steps.prefill(params, cache, make_step([Chunk(0, tokens[:hit], 0, pages)], CFG, **sizes), CFG)
    chunk = Chunk(1, tokens[restart:], restart, pages, replay_start=restart, write_floor=hit)
    floor = draft_floor(CFG, restart, len(tokens), "all")
    settings = settings_of([Sampling()], [0], CFG.vocab_size, SEQS)
    drafted = {}
    for garbage in (0, running.POISON_BYTE):
        stale = dataclasses.replace(cache, ring=np.full_like(cache.ring, garbage), pages=np.array(cache.pages))
        step = make_step([chunk], CFG, **sizes)
        logits, after = steps.prefill(params, jax.tree.map(jax.numpy.array, stale), step, CFG)
        for low in (floor, 0):
            step = make_draft_step([Anchor(1, int(np.argmax(logits[0])), len(tokens), low)], CFG, seqs=SEQS)
            drafted[garbage, low] = np.asarray(draft(params, after, step, CFG, settings).logits[0])
    assert floor == restart > len(tokens) - CFG.sliding_window, "one row of the window was never written"
    assert np.isfinite(drafted[0, floor]).all()
    assert np.array_equal(drafted[0, floor], drafted[running.POISON_BYTE, floor])
    assert np.isnan(drafted[running.POISON_BYTE, 0]).all(), "without the floor it would be read"


@pytest.mark.slow
def test_a_session_knows_the_lowest_row_that_a_draft_may_read():
    """B83: after a replayed prompt the draft layers' rows are written from the floor on, below it they are garbage."""
    with one_shape():
        mine, clean = session(decoder="replay", sequences=SEQS), session(decoder="replay", sequences=SEQS)
        mine.cache = jax.tree.map(jax.numpy.asarray, running.poisoned(mine.cache))
        first, last = (cache_layout(CFG).ring[layer] for layer in (1, 2))
        for tokens, floor in ((running.prompt(9), 5), ([7], 5), (running.prompt(3, 1), 9)):
            for one in (mine, clean):
                one.append({"a": tokens})
            assert mine.floor("a") == floor
            length, ring = len(mine.tokens("a")), np.asarray(mine.cache.ring)[mine.slot("a")]
            for member in (first, last) if length <= 10 else ():  # while every row has its own place in the ring
                at = member.offset + np.arange(length)[:, None] * member.row_bytes + np.arange(member.row_bytes)
                written = (ring[at] != running.POISON_BYTE).any(axis=1)
                assert written.tolist() == [p >= floor for p in range(length)]
        blocks = [run_block(one) for one in (mine, clean)]
    assert np.isfinite(blocks[0]).all() and np.array_equal(*blocks)


def run_block(mine):
    anchors = [Anchor(mine.slot("a"), 5, len(mine.tokens("a")), mine.floor("a"))]
    settings = settings_of([Sampling()], [0], CFG.vocab_size, SEQS)
    return np.asarray(draft(mine.params, mine.cache, make_draft_step(anchors, CFG, seqs=SEQS), CFG, settings).logits[0])


@pytest.mark.slow
def test_greedy_output_is_that_of_plain_decoding():
    """In the sizes that a caller meets: prompts of both parities, one that ends with the context."""
    params = running.parameters(CFG)
    for length in (15, 16):
        expected = list(generate_tokens(params, CFG, running.prompt(length), 16, prefill_rows=4))
        assert list(speculate_tokens(params, CFG, running.prompt(length), 16, prefill_rows=4)) == expected


def test_draft_layers_are_window_layers_whatever_the_backbone_is():
    """B82: layer 0 of the backbone has ratio 2; draft layer 0 has none, and the RoPE table of window layers."""
    assert CFG.layer_ratios == (2,)
    assert [(r.layer, r.ratio, r.rope, r.owns_kv) for r in draft_roles(CFG)] == [
        (1, 0, "swa", False),
        (2, 0, "swa", False),
    ]
    assert [m.layer for m in cache_layout(CFG).ring] == [0, 1, 2]


def test_a_draft_sees_committed_positions_that_were_written():
    """B80, B83: the block starts behind `length` committed tokens and sees none of them below the floor."""
    step = DraftStep(*(np.array(v, np.int32) for v in ([1, 1, 1], [2, 9, 9], [0, 1, 2], [0, 0, 7])))
    assert window_positions(step, 4).tolist() == [[-1, -1, 0, 1], [5, 6, 7, 8], [-1, -1, 7, 8]]


# -- refusals --


def test_a_draft_head_of_another_model_is_refused():
    other = steps.abstract_params(CFG.replace(dspark_markov_rank=4))
    with pytest.raises(ValueError, match=r"mtp\.1\.confidence_head\.proj\.weight of shape .* belong to another model"):
        check_draft_params(other, CFG)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty, generation needs at least one token"),
        ([1, 96], {}, r"prompt: token id 96 is outside 0\.\.95"),
        ([1] * 30, {}, "prompt of 30 tokens and max_new_tokens=4 need 34 positions, max_position_embeddings=32"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([1], {"prefill_rows": 0}, "prefill_rows=0 must be at least 1"),
        ([1], {"seed": -1}, "seed=-1 must be a whole number"),
    ],
)
def test_what_generation_refuses_speculation_refuses_in_the_same_words(prompt, options, message):
    for function in (generate_tokens, speculate_tokens):
        with pytest.raises(ValueError, match=message):
            function(running.parameters(CFG), CFG, prompt, **{"max_new_tokens": 4, **options})


def test_speculation_without_what_it_needs_is_refused_before_anything_runs():
    params, bare = running.parameters(CFG), running.single()
    with pytest.raises(ValueError, match="drafts=-1 must not be negative"):
        speculate_tokens(params, CFG, [1], 2, drafts=-1)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0 must be at least 1: a model without draft layers"):
        speculate_tokens(params, bare, [1], 2)
    with pytest.raises(ValueError, match=r"engram_layer_ids=\[0, 1\] need ngram_hash"):
        speculate_tokens(params, REMEMBERING, [1], 2)


def test_a_sequence_is_opened_once_and_named_in_what_is_refused():
    mine = session()
    speculator = Speculator(mine, drafter=scripted(plain(CFG, 4).tokens))
    refusals = [
        ([], 2, "sequence 'a' is empty"),
        ([99], 2, "sequence 'a': token id 99 is outside"),
        ([1] * 30, 3, "sequence 'a' of 30 tokens and max_new_tokens=3 need 33 positions"),
    ]
    for prompt, new, message in refusals:
        with pytest.raises(ValueError, match=message):
            speculator.open("a", prompt, new)
    assert mine.pool.num_free == 16
    with one_shape():
        speculator.open("a", plain(CFG, 4).tokens[:4], 9)
    with pytest.raises(ValueError, match="sequence 'a' is open already: close it first"):
        speculator.open("a", [1], 2)
    speculator.close("a")
    assert speculator.round() == {} and mine.pool.num_free == 16
