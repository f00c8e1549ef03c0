"""The corpus: split by file, deterministic, hashed, and mapped to 128 text tokens."""

import numpy as np
import pytest

from dsflash_jax.training.corpus import build_corpus, is_held_out, python_corpus
from dsflash_jax.training.vocabulary import NON_ASCII, TEXT_TOKENS, decode_tokens, encode_text


def documents(count=40):
    return [(f"folder/file{i}.py", f"x{i} = {i}\n".encode()) for i in range(count)]


def test_any_character_outside_ascii_is_one_substitute_token():
    assert encode_text("aé€😀b").tolist() == [ord("a"), NON_ASCII, NON_ASCII, NON_ASCII, ord("b")]


def test_ascii_text_survives_encoding_and_decoding():
    text = "def f(x):\n\treturn x + 1\n"
    assert decode_tokens(encode_text(text)) == text


def test_order_of_documents_does_not_matter_and_content_does():
    one, other = build_corpus(documents()), build_corpus(reversed(documents()))
    assert one.sha256 == other.sha256
    np.testing.assert_array_equal(one.train, other.train)
    assert build_corpus([*documents()[:-1], (documents()[-1][0], b"changed")]).sha256 != one.sha256


def test_no_document_is_on_both_sides():
    corpus = build_corpus(documents())
    held_out = decode_tokens(corpus.held_out)
    names = {name: content.decode() for name, content in documents()}
    assert all((content in held_out) == is_held_out(name) for name, content in names.items())
    assert corpus.train_documents + corpus.held_out_documents == len(names)


def test_a_copy_of_a_document_is_dropped():
    copies = [(f"zz/copy{i}.py", content) for i, (_, content) in enumerate(documents())]
    assert build_corpus([*documents(), *copies]).train.size == build_corpus(documents()).train.size


def test_one_sided_corpus_is_refused():
    with pytest.raises(ValueError, match="1 training and 0 held-out|0 training and 1 held-out"):
        build_corpus([("only.py", b"x")])


def test_corpus_of_this_interpreter_is_real_text_of_text_tokens():
    corpus = python_corpus()
    assert corpus.sha256 == python_corpus().sha256
    assert corpus.train.size > 2_000_000 and corpus.held_out.size > 100_000
    assert corpus.train.max() < TEXT_TOKENS
    assert "def __init__(self" in decode_tokens(corpus.held_out)
    assert 0.03 < corpus.held_out.size / corpus.train.size < 0.3


def test_unknown_split_is_named():
    with pytest.raises(ValueError, match="corpus split='test' is unknown"):
        build_corpus(documents()).split("test")
