"""N-gram hashes: constants of the release, rows against Python integers, and look-back that ends where it must."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax.config import ModelConfig
from dsflash_jax.ops.ngram_hash import (
    EXCLUDED,
    NgramHash,
    hash_multipliers,
    hash_primes,
    is_prime,
    stand_in_hash,
    stand_in_token_map,
)
from dsflash_jax.ops.token_map import build_token_map, normalised
from tests.oracles import engram

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ModelConfig.from_json(ROOT / "configs" / "v41_flash.json")
SMALL = ModelConfig.from_json(ROOT / "configs" / "tiny.json").replace(
    engram_layer_ids=(1, 3), engram_num_embeddings=(252, 410), engram_max_ngram_size=4, engram_vocab_size=30,
    engram_n_heads=2, engram_head_dim=32, engram_pad_token_id=5, engram_compressed_vocab_size=48,
)  # fmt: skip
HASH = stand_in_hash(SMALL)
TOKENS = st.lists(st.integers(0, SMALL.vocab_size - 1), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def recorded():
    with np.load(ROOT / "tests" / "golden" / "units_engram.npz") as archive:
        return {name: archive[name] for name in archive.files}


def oracle_rows(tokens, dead=()):
    return engram.row_numbers(tokens, dead, HASH.token_map, HASH.multipliers, HASH.primes, HASH.pad)


@pytest.mark.smoke
def test_the_released_constants_are_reproduced(recorded):
    """48 primes, tables of 384,006,168 and 384,016,682 rows, and eight 47-bit multipliers, from the shipped config."""
    released = stand_in_hash(RELEASED)
    assert np.array_equal(released.primes, recorded["engram/released/primes"]) and released.primes.size == 48
    assert released.primes.sum((1, 2)).tolist() == [384_006_168, 384_016_682]
    assert np.array_equal(released.multipliers, recorded["engram/released/multipliers"])
    assert len(set(released.primes.reshape(-1).tolist())) == 48, "no prime serves twice"


def test_no_hash_of_the_released_size_leaves_63_bits_or_its_columns():
    """The largest compressed id times the largest factor; Python integers do not wrap, NumPy's would."""
    released = stand_in_hash(RELEASED)
    assert int(released.token_map.max()) * int(released.multipliers.max()) < 2**63
    tokens = np.random.default_rng(0).integers(0, RELEASED.vocab_size, 50).tolist() + [RELEASED.vocab_size - 1] * 4
    rows = released.rows(tokens)
    expected = engram.row_numbers(
        tokens, (), released.token_map, released.multipliers, released.primes, released.pad
    )  # fmt: skip
    assert rows.dtype == np.int32 and rows.tolist() == expected
    ends = np.append(released.offsets[:, 1:], released.primes.sum((1, 2))[:, None], axis=1)
    assert np.all(rows >= released.offsets) and np.all(rows < ends)


def test_primes_are_prime():
    by_division = [n for n in range(2, 3000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert [n for n in range(-3, 3000) if is_prime(n)] == by_division
    strong_pseudoprimes = (3215031751, 3474749660383, 341550071728321, 3825123056546413051)
    assert not any(map(is_prime, strong_pseudoprimes)), "each fools all witnesses up to 7, 13, 17 and 23"
    assert is_prime(2**61 - 1) and not is_prime((2**31 - 1) ** 2)


def test_every_size_starts_anew_and_takes_primes_that_nobody_has():
    assert hash_primes(2, 2, 2, 100).tolist() == [[[101, 103], [107, 109]], [[113, 127], [131, 137]]]
    assert hash_primes(3, 3, 3, 30).tolist() == engram.primes(3, 3, 3, 30)
    assert hash_primes(1, 1, 1, 101).tolist() == [[[101]]], "the start itself may be taken"


def test_multipliers_are_odd_and_follow_the_layer_number():
    first, other = hash_multipliers([1, 14], 4, 99092)
    assert np.all(first % 2 == 1) and np.all(other % 2 == 1)
    assert hash_multipliers([14], 4, 99092)[0].tolist() == other.tolist(), "whatever layers stand before it"


@pytest.mark.smoke
@given(TOKENS, st.data())
def test_rows_equal_the_oracles_in_python_integers(tokens, data):
    dead = data.draw(st.sets(st.integers(0, len(tokens) - 1)))
    masked = [EXCLUDED if i in dead else token for i, token in enumerate(tokens)]
    assert HASH.rows(masked).tolist() == oracle_rows(tokens, dead)


@given(TOKENS, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_chunks_equal_one_shot(tokens, sizes):
    """B75: whatever the cut, with no more than the look-back before each chunk."""
    whole, at, parts = HASH.rows(tokens), 0, []
    for size in [*sizes, len(tokens)]:
        parts.append(HASH.rows(tokens[at : at + size], tokens[max(0, at - HASH.lookback) : at]))
        at = min(at + size, len(tokens))
    assert np.array_equal(np.concatenate(parts), whole)


def test_placeholders_in_the_history_hash_as_pad():
    """B74: [-1, 5, 6] before a token is [pad, 5, 6], not the last id of the vocabulary."""
    tokens, pad = [9], SMALL.engram_pad_token_id
    assert np.array_equal(HASH.rows(tokens, [EXCLUDED, 5, 6]), HASH.rows(tokens, [pad, 5, 6]))
    assert not np.array_equal(HASH.rows(tokens, [EXCLUDED, 5, 6]), HASH.rows(tokens, [SMALL.vocab_size - 1, 5, 6]))


def test_look_back_ends_at_an_excluded_token_and_does_not_resume_behind_it():
    seen = HASH.rows([7], [1, EXCLUDED, 3])
    assert np.array_equal(seen, HASH.rows([7], [2, EXCLUDED, 3])), "what stands before it does not matter"
    assert np.array_equal(seen, HASH.rows([7], [3])), "as if the sequence began behind it"


@pytest.mark.parametrize("count", [0, 1, 13])
def test_shapes_are_the_same_for_any_number_of_tokens_and_any_call(count):
    """B79: [T, layers, sizes x heads]."""
    for _ in range(2):
        assert HASH.rows([3] * count).shape == (count, 2, 6)


def test_awkward_strings_map_as_recorded(recorded):
    strings = json.loads(str(recorded["engram/tok_strings_json"]))
    assert np.array_equal(build_token_map(strings), recorded["engram/tok_map"])


def test_undecodable_tokens_are_told_apart_by_their_names():
    decoded = ["a", "\ufffd", "\ufffd", "A"]
    assert build_token_map(decoded).tolist() == [0, 1, 2, 0]
    assert build_token_map(decoded, ["a", "<0xE4>", "<0xE5>", "A"]).tolist() == [0, 1, 2, 0]
    assert build_token_map(decoded, ["a", "<0xE4>", "<0xE4>", "A"]).tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="raw has 1 names, must have one for each of 4 decoded texts"):
        build_token_map(decoded, ["a"])


@pytest.mark.parametrize(("text", "normal"), [("  x\t\ny ", "x y"), ("\r\n", " "), ("ΣΑΣ", "σασ"), ("\x1fx", "\x1fx")])
def test_text_is_normalised(text, normal):
    assert normalised(text) == normal


def test_the_stand_in_halves_as_the_recorded_models_do():
    assert np.array_equal(stand_in_token_map(128, 64), np.arange(128) // 2)
    assert np.unique(stand_in_token_map(96, 48)).tolist() == list(range(48))


@pytest.mark.parametrize(
    ("changes", "token_map", "sentence"),
    [
        (
            {"engram_num_embeddings": (252, 411)},
            HASH.token_map,
            r"engram_num_embeddings=\[252, 411\] must be \[252, 410\], the sums",
        ),
        ({}, np.zeros(95, int), r"token_map of type int64\[95\] must hold one whole number for each of vocab_size=96"),
        ({}, np.zeros(96), r"token_map of type float64\[96\] must hold one whole number"),
        ({}, np.full(96, 48), r"token_map: compressed id 48 must lie in 0..47, below engram_compressed_vocab_size=48"),
        ({}, None, r"token_map of type object\[\] must hold one whole number"),
        ({}, np.full(96, -1), r"token_map: compressed id -1 must lie in 0..47"),
        ({"engram_layer_ids": ()}, HASH.token_map, r"engram_layer_ids=\[\] has no layer to hash n-grams for"),
    ],
)
def test_constants_that_do_not_fit_are_refused(changes, token_map, sentence):
    with pytest.raises(ValueError, match=sentence):
        NgramHash.of(SMALL.replace(**changes), token_map)


def test_a_map_of_its_own_changes_the_rows():
    other = NgramHash.of(SMALL, np.roll(HASH.token_map, 1))
    assert not np.array_equal(other.rows([1, 2, 3]), HASH.rows([1, 2, 3]))
    assert (
        dataclasses.replace(other, token_map=HASH.token_map, pad=HASH.pad).rows([1]).tolist() == HASH.rows([1]).tolist()
    )
