"""The state of a run: its curriculum, and what its batches contain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import plan_of, run_config, sudoku_dataset

from macbook_optimization.dataset_files import BUILD_FILE
from macbook_optimization.errors import DataError
from trm.backends.base import SingleProcess
from trm.batch import IGNORE_LABEL
from trm.config import CurriculumConfig
from trm.feed import Feed, with_hints
from trm.slots import Slots
from trm.tasks.dataset import DIFFICULTY, open_split
from trm.tasks.registry import load_task
from trm.training.state import Curriculum, TrainingState


def state_of(config, split, task=None):
    feed = Feed(config, task or load_task("sudoku"), split)
    world = SingleProcess(config.training.effective_batch_size)
    return TrainingState(config, plan_of(config), feed, world, lambda: None)


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_hints_contain_up_to_half_of_the_answer_and_nothing_else(seed, share):
    rng = np.random.default_rng(seed)
    inputs = np.zeros((40, 30), dtype=np.int64)
    labels = rng.integers(1, 9, (40, 30))
    labels[:, :5] = IGNORE_LABEL
    draws = rng.random((40, 32))
    hinted = with_hints(inputs, labels, draws, share)
    changed = hinted != inputs
    assert (hinted[changed] == labels[changed]).all()
    assert not changed[:, :5].any()
    assert not changed[draws[:, 0] >= share].any()
    assert not changed[draws[:, 2:] >= 0.5].any()


def test_the_requested_share_of_examples_gets_hints_in_a_quarter_of_their_cells():
    inputs = np.zeros((4000, 50), dtype=np.int64)
    labels = np.ones((4000, 50), dtype=np.int64)
    hinted = with_hints(inputs, labels, np.random.default_rng(0).random((4000, 52)), share=0.3)
    assert hinted.any(1).mean() == pytest.approx(0.3, abs=0.03)
    assert hinted[hinted.any(1)].mean() == pytest.approx(0.25, abs=0.02)


def test_a_batch_has_the_hints_and_the_noise_that_its_recipe_requests(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")

    def batch(step, **changes):
        state = state_of(run_config(dataset, **changes), open_split(dataset, "train"))
        return state.feed.batch(state.slots.refilled(), step)

    plain = batch(1)
    changed = batch(6, training__hints={0: 0.0, 5: 1.0}, training__noise=0.5)
    np.testing.assert_array_equal(plain.labels, changed.labels)
    assert (changed.inputs != plain.inputs).any()
    assert ((changed.inputs == plain.inputs) | (changed.inputs == plain.labels)).all()
    np.testing.assert_array_equal(batch(5, training__hints={0: 0.0, 5: 1.0}).inputs, plain.inputs)
    assert plain.noise_seeds is None
    assert len(set(changed.noise_seeds)) == len(changed.inputs)


def test_a_curriculum_takes_the_easiest_examples_and_widens_when_they_are_answered(tmp_path):
    file = tmp_path / "puzzles.csv"
    easy = open_split(sudoku_dataset(tmp_path / "set", train=60), "train")
    task = load_task("sudoku")
    ratings = np.random.default_rng(0).permutation(60)
    lines = [
        f"{task.text(row.astype(np.int64))},{rating}"
        for row, rating in zip(easy.inputs, ratings, strict=True)
    ]
    file.write_text("\n".join(["question,rating", *lines]))
    task.build({"size": 4, "from": str(file), "test": 10}, tmp_path / "rated", lambda *progress: None)
    split = open_split(tmp_path / "rated", "train")
    rated = split.difficulties()
    assert set(rated) < set(ratings)

    settings = CurriculumConfig(share=0.2, threshold=0.5, widen=2, every_steps=3)
    config = run_config(tmp_path / "rated", training__curriculum=settings.model_dump())
    order = state_of(config, split, task).feed.order
    for stage, hardest in ((0, 10), (1, 20), (2, 40), (3, 50)):
        slots = Slots.new(6)
        taken = []
        for _ in range(30):
            slots = slots.all_halted().refilled(stage)
            taken.append(order.examples(slots)[0])
        assert sorted(set(np.concatenate(taken))) == sorted(np.argsort(rated)[:hardest])


def test_a_curriculum_considers_several_steps_and_stops_at_the_whole_dataset():
    settings = CurriculumConfig(share=0.5, threshold=0.5, widen=2, every_steps=2)
    now = Curriculum()
    answered = ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1])
    for step, right in enumerate(answered, start=1):
        now = now.after(sum(right), len(right), step, settings)
        assert now.stage == (step >= 4)
    assert now == Curriculum(stage=1)


def test_a_dataset_without_difficulties_has_no_curriculum(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")
    for file in (dataset / "train" / DIFFICULTY, dataset / BUILD_FILE):  # which the reference does not write
        file.unlink()
    config = run_config(dataset, training__curriculum={})
    with pytest.raises(DataError, match="has no difficulty ratings"):
        state_of(config, open_split(dataset, "train"))
