"""N-gram memory in the steps: what never matters to it, what it never reads, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.generate import generate_tokens
from dsflash_jax.host_tables import HostTables
from dsflash_jax.ops.ngram_hash import EXCLUDED, NgramHash, stand_in_hash
from dsflash_jax.session import Session
from tests.model import running
from tests.model.comparing import assert_close_logits, assert_same_run
from tests.oracles import norms
from tests.properties.test_prefill_decode import check_every_split

CFG = running.remembering(window_format="fp32")
# The two layers with memory alone, where caches of entries play no part: half the time to compile.
BARE = CFG.replace(num_hidden_layers=2, compress_ratios=(0, 0), kv_source_layer_ids=(), index_source_layer_ids=())
PARAMS, HASH = {cfg: running.parameters(cfg) for cfg in (CFG, BARE)}, stand_in_hash(CFG)
A, B = running.prompt(21, 0), running.prompt(9, 1)
NAN_CODE = 0x7F


def session(params=PARAMS[BARE], **options) -> Session:
    """Two sequences; one width of block tables, so that few steps are compiled."""
    sizes = {"num_pages": 12, "sequences": 2, "prefill_rows": 8, "table_pages": 16, "ngram_hash": HASH}
    return Session(params, BARE, **{**sizes, **options})


def traced(chunks, params=PARAMS[BARE]):
    """(step, logits [T, V], captures) of one traced step of BARE on an empty cache."""
    step = make_step(chunks, BARE, rows=16, seqs=1, pages=16, ngram_hash=HASH)
    logits, _, captures = steps.trace_step(params, ModelCache.empty(BARE, 16, 4), step, BARE)
    return step, np.asarray(logits), jax.device_get(captures)


def with_tables(change, params=PARAMS[BARE]):
    """Parameters whose packed tables went through `change(layer, part, array)`."""
    layers = dict(params["layers"])
    for layer in CFG.engram_layer_ids:
        engram = layers[layer]["engram"]
        embed = {part: change(layer, part, np.array(array)) for part, array in engram["embed"].items()}
        layers[layer] = {**layers[layer], "engram": {**engram, "embed": embed}}
    return {**params, "layers": layers}


def rows_of(tokens, dead=()):
    return HASH.rows([EXCLUDED if i in dead else t for i, t in enumerate(tokens)])


@pytest.fixture(scope="module")
def expected():
    """Logits after every token of A and of B from the whole-sequence form, hashed in one shot."""
    padded = [A, B + [0] * (len(A) - len(B))]
    ngram_rows = np.stack([HASH.rows(row) for row in padded])
    forward = jax.jit(steps.forward, static_argnums=2)
    logits = forward(PARAMS[BARE], jnp.asarray(padded), BARE.replace(qat=True), ngram_rows=ngram_rows).logits
    return dict(zip("ab", np.asarray(logits), strict=True))


@pytest.mark.smoke
def test_chunks_decode_and_batch_partners_equal_the_whole_sequence(expected):
    """B75, through the session: prompts cut wherever 8 rows end, then decode steps of both sequences."""
    mine = session()
    assert_close_logits(mine.append({"a": A[:19], "b": B[:7]}), [expected["a"][18], expected["b"][6]])
    assert_close_logits(mine.append({"b": [B[7]], "a": [A[19]]}), [expected["b"][7], expected["a"][19]])
    assert_close_logits(mine.append({"a": [A[20]]}), [expected["a"][20]])


def test_the_memory_matters(expected):
    """Of the comparison above: other rows are other logits."""
    other = NgramHash.of(CFG, np.roll(HASH.token_map, 3))
    logits = np.asarray(session(ngram_hash=other).append({"a": A[:8]}))
    assert np.abs(logits - expected["a"][7]).max() > 1e-2


@pytest.mark.slow
def test_chunks_of_2_1_5_equal_one_shot():
    """B75: stored rows, selections and logits of every position."""
    whole, parts = (running.run_chunks(CFG, PARAMS[CFG], A[:8], sizes, row_bucket=16) for sizes in ([8], [2, 1, 5]))
    assert_same_run((CFG, PARAMS[CFG]), (whole.runs[0], whole.stored(0)), (parts.runs[0], parts.stored(0)))
    for layer in CFG.engram_layer_ids:
        both = [side.runs[0].stack(layer, "engram_out") for side in (whole, parts)]
        np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_prefill_equals_every_split_into_prefill_and_decode():
    """B75: every prompt of up to 9 tokens, cut everywhere, in a model with entries and a selection."""
    check_every_split(CFG, PARAMS[CFG], 0, 9).check()


@pytest.mark.slow
def test_a_prompt_whose_decoder_runs_on_its_end_reads_the_same_rows():
    """Memory is the encoder's: rows go to its pass over the chunk, none to the later pass over the prompt's end."""
    sizes = {"num_pages": 8, "prefill_rows": 8, "ngram_hash": HASH}
    sides = [Session(PARAMS[CFG], CFG, decoder=mode, **sizes) for mode in ("all", "exact")]
    assert_close_logits(*(np.asarray(side.append({"a": A[:12]})) for side in sides))


def test_rows_of_every_position_are_those_of_the_committed_tokens(expected):
    """B75: drafts are hashed behind what is committed, and a rejected draft is in nobody's look-back."""
    mine = session()
    mine.append({"a": A[:7]})
    for drafts, accepted in (
        ([A[7], A[8], (A[9] + 1) % 96], 2),
        ([(A[9] + 5) % 96, A[10], A[11]], 0),
        ([A[9], A[10], 0], 2),
    ):
        at = len(mine.tokens("a"))
        planned = mine.plan({"a": drafts})
        assert np.array_equal(planned.step.ngrams.index[: len(drafts)], rows_of([*A[:at], *drafts])[at:])
        seen = mine.verify({"a": drafts})["a"]
        assert_close_logits(seen[:accepted], expected["a"][at : at + accepted]) if accepted else None
        mine.commit({"a": accepted})
    assert mine.tokens("a") == tuple(A[:11])
    assert_close_logits(mine.append({"a": [A[11]]}), [expected["a"][11]])


def test_tables_on_the_host_give_the_same_bits():
    """Prompts in steps of 8 rows, read ahead, then decode steps."""
    bare, tables = HostTables.take(PARAMS[BARE], BARE)
    assert "embed" not in bare["layers"][0]["engram"] and "embed" in PARAMS[BARE]["layers"][0]["engram"]
    both = session(), session(bare, host_tables=tables)
    for work in ({"a": A[:19], "b": B[:7]}, {"a": [A[19]], "b": [B[7]]}):
        assert np.array_equal(*(np.asarray(side.append(work)) for side in both))
    leaves = [jax.tree.leaves(side.cache) for side in both]
    assert all(np.array_equal(*map(np.asarray, pair)) for pair in zip(*leaves, strict=True))
    tables.close()


@pytest.mark.slow
def test_decoding_compiles_once_wherever_the_tables_are():
    bare, tables = HostTables.take(PARAMS[BARE], BARE)
    for mine in (session(), session(bare, host_tables=tables)):
        mine.append({"a": A[:3]})
        mine.append({"a": [A[3]]})
        compiled = steps._step._cache_size()
        for token in A[4:12]:
            mine.append({"a": [token]})
        assert steps._step._cache_size() == compiled


def test_excluded_tokens_pass_unchanged_and_are_in_nobodys_look_back():
    tokens, dead = A[:8], {2, 3}
    alive = [i not in dead for i in range(8)]
    step, _, captures = traced([Chunk(0, tokens, 0, [0], alive=alive)])
    assert np.all(step.ngrams.index[[2, 3]] == -1)
    embedded = np.asarray(PARAMS[BARE]["embed"]["weight"])[tokens]
    first = captures[0]["engram_out"][:8]
    changed = np.any(first != embedded[:, None], axis=(1, 2))
    assert changed.tolist() == alive, "bit for bit the streams that came in, where nothing is read"
    living = [i for i in range(8) if alive[i]]
    assert np.array_equal(step.ngrams.index[living], rows_of(tokens, dead)[living])
    other = [t if alive[i] else (t + 9) % 96 for i, t in enumerate(tokens)]
    again = make_step([Chunk(0, other, 0, [0], alive=alive)], CFG, rows=16, ngram_hash=HASH)
    assert np.array_equal(again.ngrams.index, step.ngrams.index)


def test_memory_is_written_before_the_collapse_that_it_feeds():
    """B65: the first attention input is the norm of stream 0 with the memory in it, not of the embedding."""
    _, _, captures = traced([Chunk(0, A[:8], 0, [0])])
    weight, written = np.asarray(PARAMS[BARE]["layers"][0]["attn_norm"]["weight"]), captures[0]["engram_out"][:8, 0]
    np.testing.assert_allclose(
        captures[0]["attn_in"][:8], norms.rms_norm(written, weight, CFG.rms_norm_eps), rtol=1e-5, atol=1e-6
    )
    embedded = norms.rms_norm(np.asarray(PARAMS[BARE]["embed"]["weight"])[A[:8]], weight, CFG.rms_norm_eps)
    assert np.abs(captures[0]["attn_in"][:8] - embedded).max() > 1e-2


def test_excluded_tokens_stay_excluded_in_the_next_chunk():
    tokens, dead = A[:8], {2, 3}
    chunk = Chunk(0, tokens[4:], 4, [0], context=[tokens[1], EXCLUDED, EXCLUDED])
    step = make_step([chunk], CFG, ngram_hash=HASH)
    assert np.array_equal(step.ngrams.index, rows_of(tokens, dead)[4:])


def test_rows_that_no_token_hashes_to_are_never_read():
    """All other rows hold NaN, row 0 too, which padding rows and absent rows point at."""
    tokens = next(p for p in (running.prompt(6, seed) for seed in range(50)) if not np.any(HASH.rows(p) == 0))
    read = HASH.rows(tokens)

    def poison(layer, part, array):
        kept = np.isin(np.arange(len(array)), read[:, CFG.engram_layer_ids.index(layer)])
        array[~kept] = NAN_CODE if part == "weight" else 0xFF
        return array

    alive = [True] * 5 + [False]
    for chunk in (Chunk(0, tokens, 0, [0]), Chunk(0, tokens, 0, [0], alive=alive)):
        (_, clean, _), (_, dirty, _) = traced([chunk]), traced([chunk], with_tables(poison))
        assert np.array_equal(clean[:6], dirty[:6]) and np.isfinite(dirty).all(), "padding rows too"


def test_a_row_that_is_read_does_show_its_poison():
    def poison(layer, part, array):
        array[HASH.rows(A[:6])[5, 0, 0] if layer == 0 else 0] = NAN_CODE if part == "weight" else 127
        return array

    _, logits, _ = traced([Chunk(0, A[:6], 0, [0])], with_tables(poison))
    assert np.isnan(logits[5]).all()


@pytest.mark.slow
def test_forward_gives_gradients_to_all_but_the_tables():
    tokens, params = jnp.asarray([A[:6]]), jax.tree.map(jnp.asarray, PARAMS[BARE])
    floats = {"q_weight", "k_weight", "wkv"}

    def loss(trained):
        layers = dict(params["layers"])
        layers[0] = {**layers[0], "engram": {**layers[0]["engram"], **trained}}
        logits = steps.forward({**params, "layers": layers}, tokens, BARE, ngram_rows=HASH.rows(A[:6])[None]).logits
        return jnp.sum(jax.nn.log_softmax(logits)[0, :, 0])

    slopes = jax.jit(jax.grad(loss))({name: params["layers"][0]["engram"][name] for name in floats})
    for leaf in jax.tree.leaves(slopes):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


def test_forward_without_rows_is_refused_by_key():
    with pytest.raises(ValueError, match=r"engram_layer_ids=\[0, 1\] need ngram_rows in forward"):
        steps.forward(PARAMS[CFG], jnp.asarray([A[:6]]), CFG)


def call(params=PARAMS[BARE], change=lambda step: step, run=steps.prefill):
    step = make_step([Chunk(0, A[:4], 0, [0])], BARE, rows=8, pages=16, ngram_hash=HASH)
    return run(params, ModelCache.empty(BARE, 16, 4), change(step), BARE)


def test_no_model_is_served_with_the_stand_in_map_unasked():
    """A released checkpoint read with another map than its tokenizer's looks up rows of other n-grams."""
    sentence = r"engram_layer_ids=\[0, 1\] need ngram_hash: NgramHash.of the tokenizer's map, or stand_in_hash"
    for served in (
        lambda: Session(PARAMS[BARE], BARE, num_pages=1),
        lambda: make_step([Chunk(0, [1], 0, [0])], BARE),
        lambda: generate_tokens(PARAMS[BARE], BARE, [1], 2),
    ):
        with pytest.raises(ValueError, match=sentence):
            served()


def other_index(step, index):
    return dataclasses.replace(step, ngrams=step.ngrams._replace(index=index))


@pytest.mark.parametrize("run", [steps.prefill, steps.decode, steps.verify])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: dataclasses.replace(s, ngrams=None), r"ngrams\.index of shape None must be \(8, 2, 6\)"),
        (lambda s: other_index(s, s.ngrams.index[:, :, :1]), r"ngrams\.index of shape \(8, 2, 1\) must be \(8, 2, 6\)"),
        (
            lambda s: other_index(s, s.ngrams.index + 252),
            r"ngrams\.index of layers\.0\.engram\.embed=\d+ must lie in 0.*the table has 252 rows",
        ),
        (
            lambda s: dataclasses.replace(s, ngrams=s.ngrams._replace(fetched=np.zeros((2, 8, 32), np.uint8))),
            r"ngrams\.fetched of shape \(2, 8, 32\) must be \(2, rows, 33\)",
        ),
    ],
)
def test_steps_with_wrong_rows_are_refused(run, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(change=change, run=run)


def test_tables_that_do_not_fit_are_refused_by_name():
    short = with_tables(lambda layer, part, array: array[:-1] if (layer, part) == (1, "scale") else array)
    with pytest.raises(
        ValueError, match=r"layers\.1\.engram\.embed\.scale of type uint8\[409, 1\] must be uint8\[410, 1\]"
    ):
        call(short)
    wide = with_tables(lambda layer, part, array: array.astype(np.float32) if part == "weight" else array)
    with pytest.raises(ValueError, match=r"layers\.0\.engram\.embed\.weight of type float32\[252, 32\] must be uint8"):
        call(wide)
    plain, tables = BARE.replace(engram_layer_ids=(), engram_num_embeddings=()), HostTables.take(PARAMS[BARE], BARE)[1]
    with pytest.raises(ValueError, match=r"host_tables are of no use to a model with engram_layer_ids=\[\]"):
        Session(PARAMS[BARE], plain, num_pages=1, host_tables=tables)
    with pytest.raises(ValueError, match=r"layers\.0\.engram\.embed\.weight is not among the parameters: fetch"):
        call(HostTables.take(PARAMS[BARE], BARE)[0])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"context": [1, 2]}, "slot 0: context of 2 tokens at start=4 must hold 3 to 4: n-grams of 4 look back"),
        ({"context": [1] * 5}, "slot 0: context of 5 tokens at start=4 must hold 3 to 4"),
        ({"context": [1, 96, 2]}, r"slot 0, context: token id 96 is outside 0\.\.95"),
        ({"context": [1, -2, 2]}, r"slot 0, context: token id -2 is outside 0\.\.95"),
        ({"alive": [True]}, r"slot 0: alive of type bool\[1\] must hold true or false for each of 2 tokens"),
        ({"alive": [[True], [True]]}, r"slot 0: alive of type bool\[2, 1\] must hold true or false"),
        ({"alive": [1, 0]}, r"slot 0: alive of type int64\[2\] must hold true or false"),
    ],
)
def test_chunks_with_a_wrong_look_back_or_mask_are_refused(changes, sentence):
    """B77 (a mask of the wrong length must not broadcast), and a look-back that is not there."""
    chunk = Chunk(0, [5, 6], 4, [0], context=[1, 2, 3])
    make_step([chunk], BARE, ngram_hash=HASH)
    with pytest.raises(ValueError, match=sentence):
        make_step([dataclasses.replace(chunk, **changes)], BARE, ngram_hash=HASH)
