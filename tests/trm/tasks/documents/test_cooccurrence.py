"""Vectors of words from co-occurrence, against the same computation with dense matrices and plain loops."""

from collections import Counter

import numpy as np
import pytest
from tiny_mail import WORDS, email_dataset

from trm.tasks.base import DataSpec
from trm.tasks.dataset import open_split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.documents import cooccurrence
from trm.tasks.documents.cooccurrence import MIN_PAIRS, WINDOW, word_vectors
from trm.tasks.documents.email import TASK
from trm.tasks.documents.tokens import SEP_TOKEN, MailTokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return email_dataset(tmp_path_factory.mktemp("email") / "set")


def dense_vectors(split, width):
    pairs = Counter()
    for row in split.batch(np.arange(len(split))).inputs.tolist():
        for here, word in enumerate(row):
            for neighbour in (*row[max(0, here - WINDOW) : here], *row[here + 1 : here + 1 + WINDOW]):
                if min(word, neighbour) > SEP_TOKEN:
                    pairs[word, neighbour] += 1
    together = np.zeros((split.spec.vocab_size,) * 2)
    for (word, neighbour), count in pairs.items():
        together[word, neighbour] = count
    sums = together.sum(1)
    expected = np.outer(sums, sums**0.75 / (sums**0.75).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        information = np.maximum(0, np.log(together / expected))
    known = sums >= MIN_PAIRS
    information = np.where(known[:, None] & known, np.nan_to_num(information), 0)
    left, values, _ = np.linalg.svd(information)
    vectors = (left * np.sqrt(values))[:, :width]
    tokens = np.flatnonzero(information.any(1))
    vectors = vectors[tokens] - vectors[tokens].mean(0)
    return tokens, vectors / np.linalg.norm(vectors, axis=1)[:, None]


@pytest.mark.parametrize("width", [4, 320])
def test_vectors_are_those_of_a_dense_computation_up_to_a_rotation(dataset, width):
    split = open_split(dataset, "train")
    tokens, vectors = TASK.word_vectors(split, width)
    expected_tokens, expected = dense_vectors(split, width)
    np.testing.assert_array_equal(tokens, expected_tokens)
    assert vectors.shape == (len(tokens), width)
    np.testing.assert_allclose(vectors @ vectors.T, expected @ expected.T, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_words_of_one_category_are_similar(dataset):
    tokens, vectors = TASK.word_vectors(open_split(dataset, "train"), 8)
    tokenizer = MailTokenizer.load(dataset / "tokenizer.json").tokenizer
    row_of = {tokenizer.id_to_token(int(token)): row for row, token in enumerate(tokens)}
    spam, work = ([row_of[f"\u2581{word}"] for word in WORDS[name]] for name in ("spam", "work"))
    similar = vectors @ vectors.T
    assert similar[np.ix_(spam, spam)].mean() > similar[np.ix_(spam, work)].mean() + 0.3


def test_marks_and_rare_tokens_have_no_vector(dataset, monkeypatch):
    split = open_split(dataset, "train")
    tokens, _ = TASK.word_vectors(split, 8)
    assert tokens.min() > SEP_TOKEN
    counts = np.bincount(split.batch(np.arange(len(split))).inputs.ravel(), minlength=300)
    assert (counts[tokens] >= MIN_PAIRS / (2 * WINDOW)).all()
    monkeypatch.setattr(cooccurrence, "MIN_PAIRS", 2 * WINDOW * 80)
    frequent, _ = TASK.word_vectors(split, 8)
    assert 0 < len(frequent) < len(tokens)
    assert (counts[frequent] >= 80).all()


def test_a_large_split_is_read_in_parts_and_only_as_far_as_memory_is_bounded(dataset, monkeypatch):
    split = open_split(dataset, "train")
    tokens, vectors = TASK.word_vectors(split, 8)
    monkeypatch.setattr(cooccurrence, "_TOKENS_AT_A_TIME", 3 * 48)
    in_parts = TASK.word_vectors(split, 8)
    np.testing.assert_array_equal(in_parts[0], tokens)
    np.testing.assert_array_equal(in_parts[1], vectors)
    monkeypatch.setattr(cooccurrence, "_MAX_TOKENS", 1000)
    rows = np.concatenate(list(cooccurrence._chunks(split)))
    assert 600 < split.lengths[rows].sum() < 1400
    assert rows[0] == 0
    assert rows[-1] > 100
    assert not np.array_equal(TASK.word_vectors(split, 8)[1], vectors)


@pytest.mark.parametrize("length", [1, 2])
def test_rows_without_neighbours_give_no_vectors(tmp_path, length):
    with DatasetWriter(tmp_path / "set", {"task": "email"}) as writer:
        split = writer.split("train", DataSpec(length, 9, 2), -100)
        rows = np.full((3, length), 2)
        split.add_examples(rows, np.zeros_like(rows), lengths=np.full(3, length))
    tokens, vectors = word_vectors(open_split(tmp_path / "set", "train"), 4, first_word=4)
    assert len(tokens) == 0
    assert vectors.shape == (0, 4)
