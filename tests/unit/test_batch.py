"""The host side of a step: what lands in which row, and what is refused before dispatch."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax.batch import Chunk, bucket, check_token_ids, make_step
from dsflash_jax.config import ModelConfig
from dsflash_jax.types import GLOBAL_GROUP

TINY = ModelConfig.from_json(Path(__file__).resolve().parents[2] / "configs" / "tiny.json")  # pages of 8, 128 positions
SHIFTED = TINY.replace(token_shift=True)
ONE = Chunk(slot=0, tokens=[5], start=0, pages=[0])


@pytest.mark.parametrize(
    ("n", "smallest", "size"),
    [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 1, 4), (4, 1, 4), (5, 1, 8), (3, 16, 16), (17, 16, 32)],
)
def test_bucket(n, smallest, size):
    assert bucket(n, smallest) == size


def test_two_chunks_in_one_step():
    step = make_step(
        [
            Chunk(slot=3, tokens=[11, 12, 13], start=7, pages=[4, 6], previous_token=10, replay_start=2, write_floor=8),
            Chunk(slot=1, tokens=[21, 22], start=0, pages=[5], last_chunk=False),
        ],
        TINY, rows=8, seqs=4, pages=4,
    )  # fmt: skip
    assert step.tokens.tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert step.positions.tolist() == [7, 8, 9, 0, 1, -1, -1, -1]
    assert step.row_to_seq.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert step.slot.tolist() == [3, 1, -1, -1]
    assert step.start.tolist() == [7, 0, 0, 0]
    assert step.length.tolist() == [10, 2, 0, 0]
    assert step.last_row.tolist() == [2, 4, -1, -1]
    assert step.first_row.tolist()[:2] == [0, 3]
    assert step.replay_start.tolist() == [2, 0, 0, 0]
    assert step.write_floor.tolist() == [8, 0, 0, 0]
    assert step.previous_token.tolist() == [10, -1, -1, -1]
    assert step.last_chunk.tolist() == [True, False, False, False]
    assert step.block_tables[GLOBAL_GROUP].tolist() == [[4, 6, -1, -1], [5, -1, -1, -1], [-1] * 4, [-1] * 4]


def test_every_array_is_int32_but_one():
    step = make_step([ONE], TINY)
    for field in dataclasses.fields(step):
        value = getattr(step, field.name)
        if field.name == "ngrams":
            assert value is None, "a model without Engram layers pays nothing for them"
            continue
        for array in value.values() if isinstance(value, dict) else [value]:
            assert array.dtype == (np.bool_ if field.name == "last_chunk" else np.int32), field.name


def test_sizes_default_to_powers_of_two():
    chunks = [Chunk(slot, [1] * 3, 0, pages) for slot, pages in enumerate([[0], [1], [2, 3, 4]])]
    step = make_step(chunks, TINY)
    assert (step.num_rows, step.num_seqs, step.block_tables[GLOBAL_GROUP].shape) == (16, 4, (4, 4))


def test_a_step_without_chunks_is_all_padding():
    step = make_step([], TINY, rows=2, seqs=2)
    assert step.positions.tolist() == [-1, -1] and step.slot.tolist() == [-1, -1]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), extra=st.integers(0, 3))
def test_rows_of_a_sequence_are_contiguous_ascending_and_end_at_its_last_row(lengths, extra):
    chunks = [Chunk(s, [s + 1] * n, s, [2 * s, 2 * s + 1]) for s, n in enumerate(lengths)]
    step = make_step(chunks, TINY, rows=sum(lengths) + extra, seqs=len(lengths) + extra)
    for s, n in enumerate(lengths):
        rows = np.arange(step.first_row[s], step.last_row[s] + 1)
        assert step.positions[rows].tolist() == list(range(s, s + n))
        assert (step.row_to_seq[rows] == s).all() and (step.tokens[rows] == s + 1).all()
    assert (step.positions >= 0).sum() == sum(lengths)


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), np.array([1, 2], np.uint8), np.array([1, 2])], ids=repr)
def test_tokens_may_be_any_sequence_of_integers(tokens):
    assert make_step([Chunk(0, tokens, 0, [0])], TINY).tokens.tolist() == [1, 2]


def test_a_window_only_model_needs_no_pages():
    bare = {"kv_source_layer_ids": (), "index_source_layer_ids": (), "candidate_source_layer_id": -1}
    make_step([Chunk(0, [1, 2], 60, [])], TINY.replace(compress_ratios=(0,) * 6, **bare))


REFUSALS = {
    "no-tokens": ({"tokens": []}, "slot 0: tokens is empty, a chunk needs at least one token."),
    "token-above": ({"tokens": [1, 96]}, "slot 0: token id 96 is outside 0..95."),
    "token-below": ({"tokens": [-1]}, "slot 0: token id -1 is outside 0..95."),
    "token-fraction": ({"tokens": [1.0]}, "slot 0: token ids of type float64 must be integers."),
    "token-boolean": ({"tokens": [True]}, "slot 0: token ids of type bool must be integers."),
    "no-slot": ({"slot": -1}, "slot=-1 must not be negative: only padding has no slot."),
    "past-capacity": (
        {"start": 127, "tokens": [1, 2], "pages": range(16)},
        "slot 0: positions 127..128 exceed max_position_embeddings=128.",
    ),
    "before-zero": ({"start": -1}, "slot 0: start=-1 must not be negative."),
    "table-too-short": (
        {"start": 7, "tokens": [1, 2]}, "slot 0: block table of 1 pages is too short, 9 tokens need 2 pages of 8.",
    ),
    "no-table": ({"pages": []}, "slot 0: block table of 0 pages is too short, 1 tokens need 1 pages of 8."),
    "page-twice": ({"pages": [2, 2]}, "slot 0: pages=[2, 2] must be distinct and not negative."),
    "page-negative": ({"pages": [-1]}, "slot 0: pages=[-1] must be distinct and not negative."),
    "replay-after-start": ({"replay_start": 1}, "slot 0: replay_start=1 must lie in 0..start=0."),
    "replay-negative": ({"replay_start": -1}, "slot 0: replay_start=-1 must lie in 0..start=0."),
    "floor-negative": ({"write_floor": -1}, "slot 0: write_floor=-1 must not be negative."),
    "previous-outside": ({"previous_token": 96}, "slot 0, previous_token: token id 96 is outside 0..95."),
    "previous-below": ({"previous_token": -2}, "slot 0, previous_token: token id -2 is outside 0..95."),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_a_bad_chunk_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make_step([Chunk(1, [3], 0, [7]), dataclasses.replace(ONE, **changes)], TINY)


@pytest.mark.parametrize(("start", "previous"), [(4, -1), (0, 3)])
def test_the_token_shift_needs_the_token_before_start(start, previous):
    chunk = dataclasses.replace(ONE, start=start, previous_token=previous)
    sentence = rf"slot 0: previous_token={previous} at start={start} must be the token before start"
    with pytest.raises(ValueError, match=sentence):
        make_step([chunk], SHIFTED)
    make_step([chunk], TINY)  # without a token shift nobody reads it
    make_step([ONE, Chunk(1, [2], 4, [1], previous_token=3)], SHIFTED)


def test_one_sequence_per_slot():
    with pytest.raises(ValueError, match=r"slots=\[0, 0\] must be distinct: one sequence per slot and step"):
        make_step([ONE, ONE], TINY)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"rows": 3}, "rows=3 is smaller than the 4 that this step needs"),
        ({"seqs": 1}, "seqs=1 is smaller than the 2 that this step needs"),
        ({"pages": 1}, "pages=1 is smaller than the 2 that this step needs"),
    ],
)
def test_a_bucket_that_is_too_small_is_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_step([ONE, Chunk(1, [1, 2, 3], 0, [1, 2])], TINY, **sizes)


def test_token_ids_are_named_with_their_place():
    check_token_ids([0, 95], TINY, "prompt")
    with pytest.raises(ValueError, match=r"^prompt: token id 96 is outside 0\.\.95\.$"):
        check_token_ids([0, 96], TINY, "prompt")


def test_block_tables_are_never_wider_than_the_longest_context():
    longest = TINY.max_position_embeddings // TINY.page_size
    cfg = TINY.replace(max_position_embeddings=TINY.max_position_embeddings - 3 * TINY.page_size)
    step = make_step([Chunk(0, [1], cfg.max_position_embeddings - 1, range(longest - 3))], cfg)
    assert step.block_tables["global"].shape == (1, longest - 3)
