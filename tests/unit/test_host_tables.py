"""Tables on the host: every row read once, the same bytes with and without reading ahead."""

import numpy as np
import pytest

from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.host_tables import HostTables
from tests.model import running

CFG = running.remembering()
DRAWS = np.random.default_rng(0)
TABLES = [
    (DRAWS.integers(0, 256, (rows, 32), np.uint8), DRAWS.integers(0, 256, (rows, 1), np.uint8))
    for rows in CFG.engram_num_embeddings
]
TOKENS = [5, 6, 5, 6, 5, 6, 7]


class Counting:
    """An array that remembers which rows were asked for, like a memory map whose reads can be seen."""

    def __init__(self, array, broken=False):
        self.array, self.asked, self.broken = array, [], broken
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows):
        if self.broken:
            raise OSError("the disk is gone")
        self.asked += rows.tolist()
        return self.array[rows]


def step_of(tokens=TOKENS):
    return make_step([Chunk(0, tokens, 0, [0])], CFG, rows=8, ngram_hash=running.hash_of(CFG))


def assert_same_bytes(fetched, step):
    """Every row number stands for the bytes of its table."""
    for layer, table in enumerate(TABLES):
        whole, old, new = np.concatenate(table, axis=1), step.ngrams.index[:, layer], fetched.ngrams.index[:, layer]
        assert np.array_equal(old < 0, new < 0)
        assert np.array_equal(fetched.ngrams.fetched[layer][new[new >= 0]], whole[old[old >= 0]])


@pytest.mark.smoke
def test_a_row_is_read_once_whatever_the_number_of_tokens_that_hash_to_it():
    counted = [tuple(map(Counting, table)) for table in TABLES]
    step = step_of()
    fetched = HostTables(CFG, counted).fetch(step)
    assert_same_bytes(fetched, step)
    for layer, (weight, scale) in enumerate(counted):
        distinct = np.unique(step.ngrams.index[:, layer][step.ngrams.index[:, layer] >= 0]).tolist()
        assert weight.asked == scale.asked == distinct, "ascending, none twice, none that nobody wants"
        assert len(distinct) < np.sum(step.ngrams.index[:, layer] >= 0)


def test_reading_ahead_gives_the_same_bytes_and_reads_nothing_twice():
    plain = HostTables(CFG, TABLES).fetch(step_of())
    for ahead in (TOKENS, TOKENS[:3], [9, 10, 11], [5]):  # all of it, a part, other rows, fewer rows
        counted = [tuple(map(Counting, table)) for table in TABLES]
        tables, step = HostTables(CFG, counted), step_of()
        tables.prefetch(step_of(ahead).ngrams.index)
        fetched = tables.fetch(step)
        assert np.array_equal(fetched.ngrams.fetched, plain.ngrams.fetched)
        assert np.array_equal(fetched.ngrams.index, plain.ngrams.index)
        assert len(counted[0][0].asked) == len(set(counted[0][0].asked))
        assert_same_bytes(tables.fetch(step), step)  # what was read ahead serves one fetch only
        tables.close()


def test_what_reading_ahead_meets_is_raised_by_the_fetch():
    tables = HostTables(CFG, [tuple(Counting(part, broken=True) for part in table) for table in TABLES])
    tables.prefetch(step_of().ngrams.index)
    with pytest.raises(OSError, match="the disk is gone"):
        tables.fetch(step_of())


def test_tables_may_be_memory_maps(tmp_path):
    mapped = []
    for layer, table in enumerate(TABLES):
        for part, array in zip(("weight", "scale"), table, strict=True):
            np.save(tmp_path / f"{layer}.{part}.npy", array)
        paths = [tmp_path / f"{layer}.{part}.npy" for part in ("weight", "scale")]
        mapped.append(tuple(np.load(path, mmap_mode="r") for path in paths))
    assert_same_bytes(HostTables(CFG, mapped).fetch(step_of()), step_of())


def test_sizes_follow_from_the_rows_of_a_step_alone():
    """A step of 8 rows compiles once, full of repeats or nearly empty."""
    tables = HostTables(CFG, TABLES)
    sizes = {tables.fetch(step_of(tokens)).ngrams.fetched.shape for tokens in ([1], [1] * 8, list(range(8)))}
    assert sizes == {(2, 48, 33)}


def test_a_step_without_a_row_fetches_none():
    step = make_step([Chunk(0, [1, 2], 0, [0], alive=[False, False])], CFG, ngram_hash=running.hash_of(CFG))
    fetched = HostTables(CFG, TABLES).fetch(step)
    assert np.all(fetched.ngrams.index == -1) and fetched.ngrams.fetched.shape == (2, 12, 33)


def test_tables_of_another_shape_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"layers\.1\.engram\.embed\.scale of type uint8\[410, 2\] must be uint8\[410, 1\]"
    ):
        HostTables(CFG, [TABLES[0], (TABLES[1][0], np.zeros((410, 2), np.uint8))])
    with pytest.raises(ValueError, match=r"tables: 1 given, must be one for each of engram_layer_ids=\[0, 1\]"):
        HostTables(CFG, TABLES[:1])
