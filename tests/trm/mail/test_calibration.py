"""Probabilities mean what they say, and an error budget is a point on a measured curve."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.mail.calibration import (
    ErrorCurve,
    expected_calibration_error,
    fit_error_curve,
    fit_temperature,
    softmax,
)


def test_the_temperature_of_overconfident_scores_is_found():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20_000, 3))
    probabilities = softmax(logits, 1.0)
    labels = np.array([rng.choice(3, p=row) for row in probabilities])
    assert fit_temperature((5 * logits).astype(np.float32), labels) == pytest.approx(5, rel=0.1)


def test_scores_without_a_mistake_do_not_promise_that_there_will_be_none():
    """Of 99 right answers, one more might have been wrong: the confidence is 99 %, not 100 %."""
    scores = np.tile([3.0, 0.0], (99, 1)).astype(np.float32)
    labels = np.zeros(99, dtype=np.int64)
    assert softmax(scores, fit_temperature(scores, labels)).max() == pytest.approx(0.99, abs=2e-3)


def test_calibrated_probabilities_have_a_small_calibration_error():
    probabilities = np.tile([0.8, 0.2], (1000, 1))
    labels = np.repeat([0, 1], [800, 200])
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0, abs=1e-9)
    assert expected_calibration_error(np.tile([1.0, 0.0], (1000, 1)), labels) == pytest.approx(0.2)


def test_a_threshold_keeps_the_error_budget_by_hand():
    """Ten answers, most confident first; the third and the ninth are wrong. One error is always added."""
    confidence = np.linspace(0.99, 0.54, 10)
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    labels = np.array([0, 0, 1, 0, 0, 0, 0, 0, 1, 0])
    curve = fit_error_curve(probabilities, labels)
    # after 8 answers: (1 + 1) / (8 + 1) = 0.222; after 10: (2 + 1) / 11 = 0.273; after 2: 1/3
    assert curve.threshold(0.23) == pytest.approx(confidence[7])
    assert curve.threshold(0.28) == pytest.approx(confidence[9])
    assert curve.threshold(0.1) > 1  # no confidence keeps it, so every answer is unsure


@given(
    st.lists(st.tuples(st.floats(0.5, 1.0), st.booleans()), min_size=1, max_size=300), st.floats(0.01, 0.5)
)
def test_decided_answers_never_exceed_the_budget_on_the_data_they_come_from(answers, budget):
    confidence = np.array([each for each, _ in answers])
    wrong = np.array([each for _, each in answers])
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    labels = np.where(wrong, 1, 0)
    labels[confidence == 0.5] = np.where(wrong, 1, 0)[confidence == 0.5]
    curve = fit_error_curve(probabilities, labels)
    decided = confidence >= curve.threshold(budget)
    assert not decided.any() or wrong[decided].mean() <= budget


def test_equal_confidences_are_decided_together():
    probabilities = np.tile([0.9, 0.1], (4, 1))
    curve = fit_error_curve(probabilities, np.array([0, 0, 0, 1]))
    assert curve == ErrorCurve((0.9,), (0.4,), (1.0,))
