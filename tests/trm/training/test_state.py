"""What one step learns from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import plan_of, run_config, sudoku_dataset

from macbook_optimization.dataset_files import BUILD
from macbook_optimization.errors import DataError
from trm.config import CurriculumConfig
from trm.tasks import load_task
from trm.tasks.base import DIFFICULTY, IGNORE_LABEL, open_split
from trm.training.state import Curriculum, TrainingState, with_hints


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


def test_a_curriculum_takes_the_easiest_examples_and_widens_when_they_are_answered(tmp_path):
    file = tmp_path / "puzzles.csv"
    easy = open_split(sudoku_dataset(tmp_path / "set", train=60), "train")
    task, ratings = load_task("sudoku"), np.random.default_rng(0).permutation(60)
    lines = [f"{task.decode(row)},{rating}" for row, rating in zip(easy.inputs, ratings, strict=True)]
    file.write_text("\n".join(["question,rating", *lines]))
    task.build({"size": 4, "from": str(file), "test": 10}, tmp_path / "rated", lambda *told: None)
    split = open_split(tmp_path / "rated", "train")
    rated = split.difficulties()
    assert set(rated) < set(ratings)

    settings = CurriculumConfig(share=0.2, threshold=0.5, widen=2, every_steps=3)
    config = run_config(tmp_path / "rated", training__curriculum=settings.model_dump())
    state = TrainingState(config, plan_of(config), task, split, lambda: None)
    for stage, hardest in ((0, 10), (1, 20), (2, 40), (3, 50)):
        taken = [state.order.examples(np.full(6, k), stage)[0] for k in range(30)]
        assert sorted(set(np.concatenate(taken))) == sorted(np.argsort(rated)[:hardest])


def test_a_curriculum_looks_back_over_some_steps_and_stops_at_the_whole_set():
    settings = CurriculumConfig(share=0.5, threshold=0.5, widen=2, every_steps=2)
    now = Curriculum()
    answered = ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1])
    for step, right in enumerate(answered, start=1):
        now = now.after(np.array(right, dtype=bool), step, settings)
        assert now.stage == (step >= 4)
    assert now == Curriculum(stage=1)


def test_a_set_without_difficulties_has_no_curriculum(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")
    for file in (dataset / "train" / DIFFICULTY, dataset / BUILD):  # as the public code would write it
        file.unlink()
    config = run_config(dataset, training__curriculum={})
    split = open_split(dataset, "train")
    with pytest.raises(DataError, match="does not say how difficult"):
        TrainingState(config, plan_of(config), load_task("sudoku"), split, lambda: None)
