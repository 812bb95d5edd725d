"""Two paths are added only where that helps, and the linear one decides alone only where it may."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.mail.calibration import log_softmax, softmax
from trm.mail.mixing import Mixture, fit_mixture


def noisy(labels, noise, seed, num_categories=3):
    """Return log-probabilities of a predictor that sees the labels through noise."""
    rng = np.random.default_rng(seed)
    scores = noise * rng.normal(size=(len(labels), num_categories))
    scores[np.arange(len(labels)), labels] += 1.0
    return log_softmax(scores, 0.3)


LABELS = np.random.default_rng(0).integers(0, 3, 600)
EQUAL = np.ones(600)


def test_two_independent_predictors_are_better_together():
    linear, recursive = noisy(LABELS, 0.6, 1), noisy(LABELS, 0.6, 2)
    mixture = fit_mixture(linear, recursive, LABELS, EQUAL)
    assert mixture.gate > 0
    fresh = np.random.default_rng(5).integers(0, 3, 4000)
    linear, recursive = noisy(fresh, 0.6, 6), noisy(fresh, 0.6, 7)
    alone = (linear.argmax(1) == fresh).mean()
    assert (mixture.together(linear, recursive).argmax(1) == fresh).mean() > alone + 0.02


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_learned_nothing_is_left_out(seed):
    noise = np.random.default_rng(seed).normal(size=(600, 3))
    mixture = fit_mixture(noisy(LABELS, 0.6, 1), log_softmax(noise, 1.0), LABELS, EQUAL)
    assert mixture.gate == 0
    assert len(mixture.needs_recursion(np.full((4, 3), 1 / 3))) == 0


def test_the_linear_path_decides_alone_only_where_both_agree():
    linear, recursive = noisy(LABELS, 0.6, 1), noisy(LABELS, 0.6, 2)
    mixture = fit_mixture(linear, recursive, LABELS, EQUAL)
    needs = mixture.needs_recursion(np.exp(linear))
    alone = np.setdiff1d(np.arange(len(LABELS)), needs)
    assert 0 < len(alone) < len(LABELS)
    together = mixture.together(linear, recursive)
    assert (together.argmax(1)[alone] == linear.argmax(1)[alone]).all()


def test_a_mixture_worked_by_hand():
    """With a gate of 2: 0.8 * 0.5**2 against 0.2 * 0.5**2, and 0.8 * 0.1**2 against 0.2 * 0.9**2."""
    linear = np.log([[0.8, 0.2], [0.8, 0.2]])
    recursive = np.log([[0.5, 0.5], [0.1, 0.9]])
    found = Mixture(gate=2.0).together(linear, recursive)
    assert found[0] == pytest.approx([0.8, 0.2])
    assert found[1] == pytest.approx([0.008 / 0.170, 0.162 / 0.170])


@given(st.floats(0.1, 4), st.floats(0.2, 5), st.floats(0.2, 5), st.integers(0, 2**16))
def test_mixed_probabilities_add_up_to_one(gate, one, other, seed):
    rng = np.random.default_rng(seed)
    linear, recursive = (log_softmax(3 * rng.normal(size=(7, 4)), 1.0) for _ in range(2))
    found = Mixture(gate, one, other).together(linear, recursive)
    np.testing.assert_allclose(found.sum(1), 1)
    np.testing.assert_allclose(Mixture(0.0, one, 1.0).together(linear, recursive), softmax(linear, 1.0))
