"""What counts as an exact answer, in training and in evaluation."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import SPEC, make_batch, make_learner, training_config

from trm.backends.base import StepSettings
from trm.tasks.base import AnswerBatch
from trm.tasks.metrics import ExactMatch


def test_a_row_without_labels_is_not_exact_in_training_and_in_evaluation():
    """An answer that nothing contradicts is not an answer that was checked."""
    batch = make_batch()
    batch.labels[2] = -100
    batch = replace(batch, fresh=np.ones(len(batch), dtype=bool))
    learner = make_learner(training=training_config(supervision="terminal"))
    exact = learner.step(batch, StepSettings(1, 2, 0.0, 0.0), lambda done: 6).exact
    assert not exact[2]
    scorer = ExactMatch()
    right = np.where(batch.labels == -100, 0, batch.labels)
    scorer.add(batch, AnswerBatch(right, np.ones(6, dtype=np.float32), np.ones(6, dtype=np.int64)))
    assert scorer.metrics().scalars["exact_accuracy"] == pytest.approx(5 / 6)
    assert scorer.metrics().scalars["halt_accuracy"] == pytest.approx(5 / 6)


def test_training_and_evaluation_count_the_same_rows_as_exact():
    """The labels are the model's own answers, of which some are then changed."""
    learner = make_learner(training=training_config(supervision="terminal", ema=False))
    batch = replace(make_batch(), fresh=np.ones(6, dtype=bool))
    predictor = learner.predictor()
    predictor.begin(batch)
    output = predictor.advance(np.arange(6), batch.inputs)
    labels = output.tokens.copy()
    labels[1, 2] = (labels[1, 2] + 1) % SPEC.num_outputs  # wrong
    labels[2, :3] = -100  # one label is enough
    labels[3] = -100  # none
    batch = replace(batch, labels=labels)
    result = learner.step(batch, StepSettings(1, 1, 0.0, 0.0), lambda done: 6)
    assert result.exact.tolist() == [True, False, True, False, True, True]
    scorer = ExactMatch()
    scorer.add(batch, AnswerBatch(output.tokens, output.halt_logits, np.ones(6, dtype=np.int64)))
    assert scorer.exact == result.exact.sum()
    assert scorer.metrics().scalars["token_accuracy"] == pytest.approx(result.token_accuracy)
