"""Task rows: what is asked, what answers it, and that a step's rows depend on (seed, step) alone."""

import sys

import numpy as np
import pytest

from dsflash_jax.training.corpus import build_corpus
from dsflash_jax.training.data import HELD_OUT_STREAM, TaskMix, make_batch, row_constants, split_batch, text_batch
from dsflash_jax.training.vocabulary import DOCUMENT_BORDER, FIRST_KEY, FIRST_VALUE, TEXT_TOKENS

TEXT = np.random.default_rng(0).integers(32, 127, 20_000).astype(np.uint8)
RECALL = TaskMix(rows=64, context=128, window=16, recall=1.0)


def asked(batch):
    return [(int(row), int(at)) for row, at in zip(*np.nonzero(batch.answer_mask), strict=True)]


def test_targets_are_the_next_tokens():
    batch = make_batch(TaskMix(rows=8, context=64, window=8, recall=0.5, needle=0.25, copy=0.25), TEXT, seed=1, step=2)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.tokens.dtype == np.int32 and batch.tokens.shape == (8, 64)


def test_every_recall_answer_is_the_value_after_the_last_occurrence_of_its_key():
    batch = make_batch(RECALL, TEXT, seed=3, step=0)
    for row, at in asked(batch):
        earlier = np.flatnonzero(batch.tokens[row, :at] == batch.tokens[row, at])
        assert batch.lag[row, at] == at - earlier[-1]
        assert batch.targets[row, at] == batch.tokens[row, earlier[-1] + 1] >= FIRST_VALUE


def test_only_repeated_keys_are_asked_and_all_of_them():
    batch = make_batch(RECALL, TEXT, seed=4, step=0)
    for row in range(8):
        seen, repeats = set(), []
        for at, token in enumerate(batch.tokens[row]):
            if FIRST_KEY <= token < FIRST_VALUE:
                repeats += [at] if token in seen else []
                seen.add(token)
        assert np.flatnonzero(batch.answer_mask[row]).tolist() == repeats
        assert len(seen) == RECALL.pairs


def test_pairs_of_a_row_are_all_aligned_or_all_split_and_both_occur():
    batch = make_batch(RECALL, TEXT, seed=5, step=0)
    for row, at in asked(batch):
        assert batch.aligned[row, at] == (at % 2 == 0) == (batch.lag[row, at] % 2 == at % 2)
    share = batch.aligned[:, 0].mean()
    assert 0.25 < share < 0.75


def test_near_rows_ask_most_keys_again_inside_the_window():
    batch = make_batch(TaskMix(rows=64, context=128, window=16, recall=0.0, near=1.0), TEXT, seed=6, step=0)
    lag = batch.lag[batch.answer_mask]
    assert (lag < 16).mean() > 0.85 and len(lag) / 64 > 15


def test_lags_reach_from_the_window_to_the_whole_row():
    lag = make_batch(RECALL, TEXT, seed=6, step=0).lag
    lag = lag[lag > 0]
    assert 5 < (lag < 16).sum() / 64 and 5 < ((lag >= 16) & (lag <= 32)).sum() / 64  # answers per row
    assert 0.5 < (lag > 62).sum() / 64
    assert lag.max() > 110


def test_needle_is_asked_once_at_the_end_and_its_source_is_far():
    batch = make_batch(TaskMix(rows=16, context=64, window=8, recall=0, needle=1), TEXT, seed=7, step=0)
    assert [at for _, at in asked(batch)] == [63] * 16
    for row, at in asked(batch):
        source = at - batch.lag[row, at]
        assert batch.lag[row, at] >= 32
        assert batch.tokens[row, source] == batch.tokens[row, at]
        assert batch.tokens[row, source + 1] == batch.targets[row, at]
        assert batch.aligned[row, at] == (source % 2 == 0)


def test_copy_answers_equal_the_tokens_one_lag_back():
    batch = make_batch(TaskMix(rows=32, context=64, window=8, recall=0, copy=1), TEXT, seed=8, step=0)
    assert batch.answer_mask.sum(axis=1).tolist() == [7] * 32
    for row, at in asked(batch):
        assert batch.targets[row, at] == batch.tokens[row, at - batch.lag[row, at] + 1] >= TEXT_TOKENS


def test_rows_divide_as_the_mix_says_and_only_text_rows_train_text():
    mix = TaskMix(rows=16, context=64, window=8, recall=0.5, needle=0.125, copy=0.125)
    batch = make_batch(mix, TEXT, seed=9, step=0)
    assert mix.row_counts() == (8, 0, 2, 2, 4)
    assert batch.text_mask.any(axis=1).tolist() == [False] * 12 + [True] * 4
    assert batch.answer_mask.any(axis=1).tolist() == [True] * 12 + [False] * 4
    assert batch.tokens[12:].max() < TEXT_TOKENS


def test_same_step_gives_same_rows_and_another_step_seed_or_stream_others():
    def tokens(seed, step, **stream):
        return make_batch(RECALL, TEXT, seed, step, **stream).tokens

    np.testing.assert_array_equal(tokens(1, 7), tokens(1, 7))
    for other in (tokens(1, 8), tokens(2, 7), tokens(1, 7, stream=HELD_OUT_STREAM)):
        assert (tokens(1, 7) != other).mean() > 0.3


def test_text_rows_spread_over_the_whole_text_without_overlap():
    numbers = np.arange(1000)
    batch = text_batch(numbers, rows=4, context=50)
    assert batch.tokens[:, 0].tolist() == [0, 249, 498, 747]
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    assert batch.text_mask.all() and not batch.answer_mask.any()
    with pytest.raises(ValueError, match="rows=20 of context=50 do not fit: there are 1000 tokens"):
        text_batch(numbers, 20, 50)


def test_a_batch_splits_into_equal_parts_in_order():
    batch = make_batch(RECALL, TEXT, 0, 0)
    parts = split_batch(batch, 16)
    assert len(parts) == 4
    np.testing.assert_array_equal(np.concatenate([part.lag for part in parts]), batch.lag)
    with pytest.raises(ValueError, match="rows=24 must divide the 64 rows"):
        split_batch(batch, 24)


@pytest.mark.parametrize(("change", "message"), [
    ({"context": 16}, "context=16 is too short: 8 pairs need at least 32"),
    ({"pairs": 33}, "pairs=33 must lie between 1 and the number of keys, 32"),
    ({"recall": 0.8, "needle": 0.4}, "exceeds 1"),
    ({"rows": 0}, "rows=0 must be at least 1"),
    ({"text_slots": -0.1}, "text_slots=-0.1 must lie between 0 and 1"),
])
def test_a_mix_that_cannot_be_made_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        TaskMix(**{"rows": 4, "context": 64, "window": 8, "recall": 0.75, **change})


def test_text_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match="has 10 tokens: a row of context=128 needs 129"):
        make_batch(RECALL, TEXT[:10], seed=0, step=0)


def test_making_rows_takes_no_step_per_row():
    """Counted, not timed: a busy machine changes nothing. Rows must be cheap beside a training step."""
    few, many = (_calls(TaskMix(rows=rows, context=128, window=16, recall=0.75)) for rows in (16, 256))
    assert many == few


def _calls(mix):
    calls = []
    make_batch(mix, TEXT, 0, 0)  # what happens only once is done
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event.endswith("call") else None)
    try:
        make_batch(mix, TEXT, 0, 1)
    finally:
        sys.setprofile(None)
    return len(calls)


def test_rows_are_one_stream_across_document_borders():
    """B19, decided in docs/decisions.md: a row runs on behind a border, which is a token to predict like any other.

    There is no mask per document, so a group of two, a window or a selection may hold tokens of two documents.
    """
    corpus = build_corpus((f"file{i}.py", bytes([97 + i % 26]) * (11 + i)) for i in range(60))
    text = TaskMix(rows=8, context=64, window=8, recall=0.0)
    for batch in (make_batch(text, corpus.train, seed=3, step=0), text_batch(corpus.train, rows=8, context=64)):
        assert batch.text_mask.all() and not batch.answer_mask.any()
        borders = batch.tokens == DOCUMENT_BORDER
        assert borders.any(axis=1).all(), "documents are shorter than a row: every row holds a border"
        pooled = borders[:, 0::2]  # a border that opens a group of two: its partner is of the next document
        assert pooled.any() and (batch.tokens[:, 1::2][pooled] != DOCUMENT_BORDER).all()
        assert (batch.targets == DOCUMENT_BORDER).any()
    assert not {"document", "document_id", "segment"} & set(batch._fields)


def test_the_constants_that_shape_rows_are_named_for_the_record():
    """A study writes them into its manifest; other values make other rows under equal settings."""
    assert row_constants() == {"lag_shares": [0.6, 0.4], "near_pairs": 3, "copy_span": 8}
