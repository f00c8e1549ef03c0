"""A session keeps the books of the steps: it returns what whole prefills return, and a refusal changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.session import Session
from tests.model import running
from tests.model.comparing import assert_close_logits

CFG = running.single(window_format="fp32", token_shift=True)  # the shift needs the token before every chunk
PARAMS = running.parameters(CFG)
A, B = running.prompt(21, 0), running.prompt(9, 1)


def session(**options) -> Session:
    """Two sequences; one width of block tables, so that few steps are compiled."""
    sizes = {"num_pages": 12, "sequences": 2, "prefill_rows": 8, "table_pages": 16}
    return Session(PARAMS, CFG, **{**sizes, **options})


@pytest.fixture(scope="module")
def expected():
    """Logits after every token of A and of B from the whole-sequence form, which knows no cache."""
    forward = jax.jit(steps.forward, static_argnums=2)
    rows = jnp.asarray([A, B + [0] * (len(A) - len(B))])
    flags = {"dense": jnp.asarray(False), "use_global": jnp.asarray(True)}
    return dict(zip("ab", np.asarray(forward(PARAMS, rows, CFG.replace(qat=True), **flags).logits), strict=True))


def state(mine: Session):
    """All that a refused call must leave alone."""
    return mine.pool.num_free, {name: mine.tokens(name) for name in "abc"}, mine.cache


@pytest.mark.smoke
@pytest.mark.slow
def test_prompts_of_any_length_and_decoded_tokens_get_the_logits_of_a_whole_prefill(expected):
    mine = session()
    logits = mine.append({"a": A[:19], "b": B[:7]})  # 26 tokens in steps of 8 rows, cut wherever they fall
    assert_close_logits(logits, [expected["a"][18], expected["b"][6]])
    logits = mine.append({"b": [B[7]], "a": [A[19]]})
    assert_close_logits(logits, [expected["b"][7], expected["a"][19]])
    assert_close_logits(mine.append({"a": [A[20]]}), [expected["a"][20]])
    assert (mine.tokens("a"), mine.tokens("b"), mine.tokens("c")) == (tuple(A), tuple(B[:8]), ())


def test_only_accepted_drafts_become_known(expected):
    mine = session()
    mine.append({"a": A[:10], "b": B[:4]})
    wrong = (A[12] + 1) % CFG.vocab_size
    seen = mine.verify({"a": [A[10], A[11], wrong], "b": [B[4]]})
    assert_close_logits(seen["a"][:2], expected["a"][10:12])
    assert_close_logits(seen["b"], [expected["b"][4]])
    assert mine.tokens("a") == tuple(A[:10])
    mine.commit({"a": 2, "b": 1})
    assert (mine.tokens("a"), mine.tokens("b")) == (tuple(A[:12]), tuple(B[:5]))
    assert mine.cache.length.tolist() == [12, 5]
    assert_close_logits(mine.append({"a": [A[12]], "b": [B[5]]}), [expected["a"][12], expected["b"][5]])


@pytest.mark.slow
def test_drafts_that_nobody_commits_are_rejected(expected):
    mine = session()
    mine.append({"a": A[:10]})
    mine.verify({"a": [1, 2, 3]})
    assert_close_logits(mine.append({"a": [A[10]]}), [expected["a"][10]])
    with pytest.raises(ValueError, match=r"accepted=\{'a': 1\} has nothing to accept from: call verify first"):
        mine.commit({"a": 1})


def test_a_closed_sequence_gives_its_slot_and_pages_to_the_next(expected):
    mine = session(sequences=1, num_pages=3)
    mine.append({"a": A})
    mine.close("a")
    assert mine.pool.num_free == 3 and mine.tokens("a") == ()
    assert_close_logits(mine.append({"b": B}), [expected["b"][8]])


def test_tables_grow_in_powers_of_two_unless_a_width_is_given():
    mine, fixed = session(table_pages=None), session(table_pages=12)
    plans = [each.plan({"a": [1] * tokens}) for tokens in (8, 9, 17) for each in (mine, fixed)]
    assert [planned.step.block_tables["global"].shape[1] for planned in plans] == [1, 12, 2, 12, 4, 12]


def test_a_long_prompt_runs_in_one_shape():
    mine = session()
    mine.append({"a": A[:17]})
    compiled = steps._step._cache_size()
    mine.append({"b": A[:18]})  # steps of 8, 8 and 2 tokens, all of 8 rows
    assert steps._step._cache_size() == compiled


def test_steps_of_several_long_prompts_have_one_shape():
    """Whichever prompts the rows of a step belong to: 8 of "a", 8 of "a", one of "a" and 7 of "b", 2 of "b"."""
    mine, shapes = session(), []
    run = mine.run
    mine.run = lambda planned: shapes.append(jax.tree.map(np.shape, planned.step)) or run(planned)
    mine.append({"a": A[:17], "b": B})
    assert len(shapes) == 4 and all(shape == shapes[0] for shape in shapes)


def test_all_rows_of_a_prompt_passed_all_layers():
    mine = session()
    mine.append({"a": A[:10]})
    mine.append({"a": A[10:11], "b": B[:1]})
    assert (mine.floor("a"), mine.floor("b")) == (0, 0)
    mine.close("a")
    with pytest.raises(ValueError, match="sequence 'a' is not open"):
        mine.floor("a")


REFUSALS = {
    "nothing": ({}, "work names no sequence: a step needs at least one"),
    "empty": ({"a": [1], "b": []}, "sequence 'b': tokens is empty"),
    "token": ({"a": [1], "b": [96]}, r"sequence 'b': token id 96 is outside 0\.\.95"),
    "length": ({"a": [1] * 119}, r"sequence 'a': positions 10\.\.128 exceed max_position_embeddings=128"),
    "slots": ({"a": [1], "b": [1], "c": [1]}, "sequence 'c' has no slot: all 2 are taken, close one first"),
    "pages": ({"b": [1], "a": [1] * 90}, "sequence 'a' needs 11 more pages of 8 for 100 tokens, have 9 free of 12"),
}


@pytest.mark.parametrize(("work", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refused_work_changes_nothing(work, message):
    mine = session()
    mine.append({"a": A[:10]})
    before = state(mine)
    for call in (mine.append, mine.plan):
        with pytest.raises(ValueError, match=message):
            call(work)
    assert state(mine) == before
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine.cache))


def test_work_that_a_fixed_table_cannot_hold_is_refused():
    mine = session(table_pages=1)
    with pytest.raises(ValueError, match="table_pages=1 is smaller than the 2 that this step needs"):
        mine.append({"a": [1] * 9})
    assert mine.pool.num_free == 12


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ({"a": 4}, r"sequence 'a': accepted=4 must be one of 0\.\.3, the tokens verified"),
        ({"a": -1}, r"sequence 'a': accepted=-1 must be one of 0\.\.3"),
        ({"a": 1.7}, r"sequence 'a': accepted=1.7 must be one of 0\.\.3"),
        ({"b": 1}, "accepted names sequence 'b', verified were 'a'"),
    ],
)
def test_accepting_what_was_not_verified_is_refused(accepted, message):
    mine = session()
    mine.append({"a": A[:10]})
    mine.verify({"a": [1, 2, 3]})
    with pytest.raises(ValueError, match=message):
        mine.commit(accepted)
    mine.commit({"a": 1})
    assert mine.tokens("a") == (*A[:10], 1)


def test_a_plan_runs_once_and_only_while_it_holds():
    mine = session()
    planned = mine.plan({"a": A[:3]})
    mine.run(planned)
    with pytest.raises(ValueError, match="sequence 'a' was planned behind 0 tokens, it has 3 now: plan again"):
        mine.run(planned)
    planned = mine.plan({"a": A[3:5]})
    mine.close("a")
    with pytest.raises(ValueError, match="sequence 'a' was planned behind 3 tokens, it is closed: plan again"):
        mine.run(planned)


def test_closing_one_sequence_leaves_what_was_verified_of_another():
    mine = session()
    mine.append({"a": A[:4], "b": B[:3]})
    mine.verify({"a": A[4:6], "b": B[3:5]})
    mine.close("b")
    with pytest.raises(ValueError, match="'b', which was closed after it was verified"):
        mine.commit({"b": 1})
    mine.commit({"a": 2})
    assert (mine.tokens("a"), mine.tokens("b")) == (tuple(A[:6]), ())


def test_a_name_that_was_opened_again_takes_nothing_of_what_was_verified():
    mine = session()
    mine.append({"a": A[:4]})
    mine.verify({"a": A[4:6]})
    mine.close("a")
    mine.plan({"a": B[:3]})
    with pytest.raises(ValueError, match="'a', which was closed after it was verified"):
        mine.commit({"a": 2})
    assert mine.tokens("a") == ()


def test_more_drafts_than_can_be_rolled_back_are_refused_before_anything_is_reserved():
    mine = session()
    with pytest.raises(ValueError, match=r"sequence 'a': 7 tokens to verify exceed num_draft_tokens \+ 1 = 6"):
        mine.verify({"a": [1] * 7})
    assert mine.pool.num_free == 12


def test_closing_what_is_not_open_is_refused():
    mine = session()
    mine.append({"a": [1]})
    with pytest.raises(ValueError, match="sequence 'b' is not open: open are 'a'"):
        mine.close("b")


@pytest.mark.parametrize(("field", "value"), [("sequences", 0), ("prefill_rows", 0), ("num_pages", 0)])
def test_sizes_below_one_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        session(**{field: value})


def test_numpy_tokens_are_taken(expected):
    mine = session()
    assert_close_logits(mine.append({"a": np.array(A[:19], np.uint8)}), [expected["a"][18]])


@pytest.mark.slow
def test_a_prompt_in_parts_runs_the_decoder_once_at_its_end():
    """The last part of one prompt is a single token: still the end of a prompt, not a decode step."""
    cfg = running.shallow()
    sizes = {"num_pages": 8, "table_pages": 4, "decoder": "replay"}
    whole, parts = (Session(running.parameters(cfg), cfg, prefill_rows=rows, **sizes) for rows in (32, 8))
    tokens = running.prompt(17, 11)
    for more in (tokens, [5]):
        logits = [np.asarray(mine.append({"a": more})) for mine in (whole, parts)]
        assert_close_logits(*logits, atol=1e-3)


def test_a_decoder_mode_is_refused_before_a_step():
    with pytest.raises(ValueError, match="decoder='some' must be one of all, replay, exact"):
        session(decoder="some")
