"""Metrics of a classifier."""

import numpy as np
import pytest

from trm.batch import IGNORE_LABEL, Batch
from trm.tasks.base import AnswerBatch
from trm.tasks.metrics import Classification, category_scores


def scored(labels, answers, *, num_categories=3, probabilities=None):
    scorer = Classification(num_categories, needs_probabilities=probabilities is not None)
    given = np.full((len(labels), 4), IGNORE_LABEL)
    given[:, 0] = labels
    tokens = np.full((len(labels), 4), 7)  # whatever is answered elsewhere does not count
    tokens[:, 0] = answers
    zeros = np.zeros(len(labels), dtype=np.int64)
    batch = Batch(zeros, np.ones_like(given), given, zeros, zeros == 0)
    margins = np.zeros(len(labels), dtype=np.float32)
    scorer.add(batch, AnswerBatch(tokens, margins, zeros, probabilities))
    return scorer


def test_precision_recall_and_f1_are_those_of_each_category():
    metrics = scored([0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 0, 2]).metrics()
    assert metrics.scalars["accuracy"] == pytest.approx(4 / 6)
    assert metrics.tables["confusion"] == [[2, 1, 0], [1, 1, 0], [0, 0, 1]]
    np.testing.assert_allclose(
        metrics.tables["categories"], [[2 / 3, 2 / 3, 2 / 3, 3], [0.5, 0.5, 0.5, 2], [1, 1, 1, 1]]
    )
    assert metrics.scalars["macro_f1"] == pytest.approx((2 / 3 + 0.5 + 1) / 3)


def test_a_category_without_examples_is_left_out_of_the_mean():
    metrics = scored([0, 0, 1], [0, 2, 1]).metrics()
    assert metrics.scalars["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)
    assert np.isfinite(metrics.tables["categories"]).all()
    assert category_scores(np.zeros((2, 2), dtype=np.int64)).tolist() == [[0, 0, 0, 0]] * 2


def test_probabilities_are_kept_on_request():
    probabilities = np.random.default_rng(0).random((2, 4, 3)).astype(np.float32)
    scorer = scored([2, 1], [0, 1], probabilities=probabilities)
    np.testing.assert_array_equal(scorer.probabilities[0], probabilities[:, 0])
    np.testing.assert_array_equal(scorer.labels[0], [2, 1])
    assert not scored([2, 1], [0, 1]).probabilities
