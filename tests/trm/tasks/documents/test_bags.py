"""TF-IDF rows, checked against a computation by hand."""

import tracemalloc
from collections import Counter

import numpy as np

from trm.tasks.documents.bags import Corpus

DOCUMENTS = [Counter("aab"), Counter("bc"), Counter(), Counter("zb")]


def fitted(min_documents=1, limit=100, rows=range(4)):
    """Return a vocabulary of some of the documents, and the corpus of all."""
    corpus = Corpus()
    for document in DOCUMENTS:
        corpus.add(document)
    return corpus.vocabulary(np.array(rows), min_documents, limit), corpus


def dense(bags):
    rows = np.zeros((len(bags), bags.num_columns))
    for number in range(len(bags)):
        at = slice(bags.starts[number], bags.starts[number + 1])
        rows[number, bags.indices[at]] = bags.weights[at]
    return rows


def test_rows_are_log_counts_times_idf_at_unit_length():
    vocabulary, corpus = fitted()
    assert list(vocabulary.columns) == ["a", "b", "c", "z"]
    idf = np.log(5 / (1 + np.array([1, 3, 1, 1]))) + 1
    np.testing.assert_allclose(vocabulary.idf, idf, rtol=1e-6)
    first = np.array([(1 + np.log(2)) * idf[0], idf[1], 0, 0])
    rows = dense(vocabulary.bags(DOCUMENTS))
    np.testing.assert_allclose(rows[0], first / np.linalg.norm(first), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 0, 1], rtol=1e-5)
    np.testing.assert_array_equal(dense(corpus.bags(vocabulary, np.arange(4))), rows)


def test_rare_ngrams_are_left_out_and_frequent_ones_kept_at_the_limit():
    assert list(fitted(min_documents=2)[0].columns) == ["b"]
    assert list(fitted(limit=2)[0].columns) == ["a", "b"]


def test_documents_that_are_held_out_do_not_shape_the_vocabulary():
    vocabulary, corpus = fitted(rows=[0, 1])
    assert list(vocabulary.columns) == ["a", "b", "c"]
    np.testing.assert_allclose(vocabulary.idf[1], np.log(3 / 3) + 1)
    assert (dense(corpus.bags(vocabulary, np.array([3]))) == [[0, 1, 0]]).all()


def test_a_corpus_that_is_too_large_forgets_ngrams_of_one_document():
    corpus = Corpus(max_names=4)
    for document in (Counter("ab"), Counter("ac"), Counter("de"), Counter("ad")):
        corpus.add(document)
    assert "a" in corpus.vocabulary(np.arange(4), 2).columns
    assert "b" not in corpus.vocabulary(np.arange(4), 1).columns


def test_forgotten_ngrams_take_no_memory():
    corpus = Corpus(max_names=1000)
    tracemalloc.start()
    for number in range(100):
        corpus.add(Counter(["the", *(f"{number} {other}" for other in range(500))]))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 6 bytes per n-gram of a document, and what Python needs for 100 documents and 1,000 to 1,500 names.
    assert taken < 6 * 100 * 501 + 500_000
    assert corpus.vocabulary(np.arange(100), 2).columns == {"the": 0}


def test_scores_and_chosen_rows_equal_the_dense_computation():
    bags = fitted()[0].bags(DOCUMENTS)
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    bias = np.array([0.5, -1], dtype=np.float32)
    np.testing.assert_allclose(bags.scores(table, bias), dense(bags) @ table + bias, rtol=1e-5)
    chosen = np.array([3, 2, 0, 0])
    np.testing.assert_allclose(dense(bags.rows(chosen)), dense(bags)[chosen])
