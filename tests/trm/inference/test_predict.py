"""Questions become batches, and predictions do not depend on padding."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny import make_learner, model_config, run_config

from macbook_optimization.errors import DataError
from trm.batch import PAD_TOKEN
from trm.config import InferenceConfig
from trm.inference.predict import batch_of, open_test_set, question_of_test_set, until_converged
from trm.inference.search import Search
from trm.tasks.base import DataSpec, Question
from trm.tasks.dataset import open_split
from trm.tasks.dataset_writer import DatasetWriter

SPEC = DataSpec(max_len=6, vocab_size=7, num_outputs=7)


def test_full_questions_have_no_lengths_and_shorter_ones_are_padded():
    full = [Question(np.arange(1, 7)), Question(np.arange(6))]
    assert batch_of(full, 6).lengths is None
    mixed = batch_of([Question(np.array([3, 4])), Question(np.arange(1, 7), identifier=5)], 6)
    np.testing.assert_array_equal(mixed.lengths, [2, 6])
    np.testing.assert_array_equal(mixed.inputs[0], [3, 4] + [PAD_TOKEN] * 4)
    np.testing.assert_array_equal(mixed.puzzle_identifiers, [0, 5])


def test_a_short_question_is_answered_the_same_alone_and_beside_a_longer_one():
    search = Search(make_learner(model_config(), spec=SPEC).predictor(), InferenceConfig(depth=3), SPEC)
    short, long = Question(np.array([3, 4])), Question(np.array([1, 2, 3, 4, 5, 6]))
    alone = search.answer(batch_of([short], 6))
    together = search.answer(batch_of([short, long], 6))
    np.testing.assert_array_equal(alone.tokens[:, 0, :2], together.tokens[:, 0, :2])


def test_a_test_example_is_a_question_without_its_padding(tmp_path):
    rows = np.array([[1, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    with DatasetWriter(tmp_path / "set", {}) as writer:
        writer.split("test", SPEC, 0).add_examples(rows, rows, lengths=np.array([3, 6]))
    question = question_of_test_set(open_split(tmp_path / "set", "test"), 0)
    np.testing.assert_array_equal(question.tokens, [1, 2, 3])
    np.testing.assert_array_equal(question.label, [1, 2, 3])


def test_an_explicit_depth_is_the_exact_number_of_steps_whatever_the_recipe_stops_at():
    recipe = InferenceConfig(depth=8, converged_after=3, halt=True)
    exact = recipe.model_copy(update=until_converged(recipe, 5))
    assert (exact.depth, exact.converged_after, exact.halt) == (5, None, False)
    by_default = recipe.model_copy(update=until_converged(recipe, None))
    assert (by_default.depth, by_default.converged_after, by_default.halt) == (32, 3, True)


def test_a_dataset_that_is_there_but_damaged_keeps_its_own_hint(tmp_path):
    rows = np.array([[1, 2, 3, 4, 5, 6]])
    with DatasetWriter(tmp_path / "set", {}) as writer:
        writer.split("test", SPEC, 0).add_examples(rows, rows)
    (tmp_path / "set" / "test" / "all__labels.npy").write_bytes(b"")
    model = SimpleNamespace(config=run_config(tmp_path / "elsewhere"))
    for path, hint in ((tmp_path / "set", "Build the dataset again"), (None, "where the run was trained")):
        with pytest.raises(DataError) as refused:
            open_test_set(model, path)
        assert hint in refused.value.hint
