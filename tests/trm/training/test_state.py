"""What one step learns from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import plan_of, run_config, sudoku_dataset

from trm.tasks import load_task
from trm.tasks.base import IGNORE_LABEL, open_split
from trm.training.state import TrainingState, with_hints


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_hints_give_away_up_to_half_of_the_answer_and_nothing_else(seed, share):
    rng = np.random.default_rng(seed)
    inputs, labels = np.zeros((40, 30), dtype=np.int64), rng.integers(1, 9, (40, 30))
    labels[:, :5] = IGNORE_LABEL
    draws = rng.random((40, 32))
    hinted = with_hints(inputs, labels, draws, share)
    given_away = hinted != inputs
    assert (hinted[given_away] == labels[given_away]).all()
    assert not given_away[:, :5].any()
    assert not given_away[draws[:, 0] >= share].any()
    assert not given_away[draws[:, 2:] >= 0.5].any()


def test_as_many_examples_get_hints_as_are_to_and_a_quarter_of_their_cells():
    inputs, labels = np.zeros((4000, 50), dtype=np.int64), np.ones((4000, 50), dtype=np.int64)
    hinted = with_hints(inputs, labels, np.random.default_rng(0).random((4000, 52)), share=0.3)
    assert hinted.any(1).mean() == pytest.approx(0.3, abs=0.03)
    assert hinted[hinted.any(1)].mean() == pytest.approx(0.25, abs=0.02)


def test_a_batch_has_the_hints_and_the_noise_that_its_recipe_asks_for(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")

    def batch(step, **changes):
        config = run_config(dataset, **changes)
        state = TrainingState(
            config, plan_of(config), load_task("sudoku"), open_split(dataset, "train"), lambda: None
        )
        return state.batch(state.slots.refilled(), step)

    plain, again = batch(1), batch(6, training__hints={0: 0.0, 5: 1.0}, training__noise=0.5)
    np.testing.assert_array_equal(plain.labels, again.labels)
    assert (again.inputs != plain.inputs).any()
    assert ((again.inputs == plain.inputs) | (again.inputs == plain.labels)).all()
    np.testing.assert_array_equal(batch(5, training__hints={0: 0.0, 5: 1.0}).inputs, plain.inputs)
    assert plain.noise_seeds is None
    assert len(set(again.noise_seeds)) == len(again.inputs)
