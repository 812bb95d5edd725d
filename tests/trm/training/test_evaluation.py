"""Evaluations with a limit: which examples are taken, what is said about them, and what they are worth."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from arc_tasks import arc_dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import run_config, sudoku_dataset

from trm.backends.base import StepOutput
from trm.batch import Batch
from trm.config import InferenceConfig
from trm.inference.search import Search
from trm.tasks.base import DataSpec
from trm.tasks.dataset import Split, open_split
from trm.tasks.grids.arc import TASK as ARC
from trm.tasks.grids.arc_puzzles import canvas_of
from trm.tasks.grids.sudoku import TASK as SUDOKU
from trm.training.evaluation import evaluate, evaluation_settings

NUM_TESTS = [1] * 15 + [2] * 4 + [3]  # of 20 tasks: 26 tests
SPEC = DataSpec(900, 12, 12)
WRONG = [[0, 0], [0, 0]]  # in every augmentation: black stays black


@pytest.fixture(scope="module")
def arc(tmp_path_factory):
    """20 tasks in 100 augmentations and as they are."""
    return open_split(arc_dataset(tmp_path_factory.mktemp("arc"), NUM_TESTS, 100), "test")


@dataclass
class Oracle:
    """A predictor that has the labels, and gets every third row wrong."""

    batches: list[Batch] = field(default_factory=list)

    def begin(self, batch, noise=0.0, noise_seed=0):
        self.batches.append(batch)

    def advance(self, rows, inputs, *, probabilities=False):
        tokens = np.maximum(self.batches[-1].labels[rows], 0)
        tokens[::3] = canvas_of(np.array(WRONG, dtype=np.uint8)).reshape(-1)
        return StepOutput(tokens, np.ones(len(rows), dtype=np.float32), None)


def examined(split, limit, depth=1, progress=lambda done, total, facts: None):
    """Return the evaluation, the scorer, and the number of examples per task."""
    oracle = Oracle()
    scorer = ARC.scorer(split)
    search = Search(oracle, InferenceConfig(depth=depth), SPEC)
    found = evaluate(search, split, scorer, 32, limit, progress)
    names = [scorer.names[i].split("|||")[0] for batch in oracle.batches for i in batch.puzzle_identifiers]
    return found, scorer, Counter(names)


def test_a_limit_is_spread_over_all_tasks(arc):
    assert len(arc) == 26 * 101
    found, scorer, per_task = examined(arc, 100)
    assert found.examples == 100
    assert (found.tasks_evaluated, found.tasks_total) == (20, 20)
    assert sorted(per_task) == sorted(scorer.puzzles)
    votes = [sum(map(len, answers.values())) for answers in scorer.votes.values()]
    assert len(votes) == 26, "every test of every task has votes"
    assert (min(votes), max(votes)) == (3, 4)
    row = found.row(7, 1.0).to_json()
    assert (row["examples"], row["tasks_evaluated"], row["tasks_total"]) == (100, 20, 20)
    assert found.coverage == ", 20 of 20 tasks"


def test_a_limit_below_the_number_of_tasks_takes_as_many_tasks(arc):
    found, _, per_task = examined(arc, 12)
    assert set(per_task.values()) == {1}
    assert found.coverage == ", 12 of 20 tasks"


def test_the_submission_of_a_limited_evaluation_has_two_real_attempts_for_every_test(arc):
    _, scorer, _ = examined(arc, 100)
    submission = scorer.submission()
    assert [len(submission[f"task{number:02d}"]) for number in range(20)] == NUM_TESTS
    for name, tests in submission.items():
        answers = [answer.tolist() for _, answer in scorer.puzzles[name].tests]
        for attempts, answer in zip(tests, answers, strict=True):
            assert set(attempts) == {"attempt_1", "attempt_2"}
            assert answer in attempts.values(), "two of three votes are right"
            assert all(attempt in (answer, WRONG) for attempt in attempts.values())
    assert scorer.unanswered() == 0


def test_without_a_limit_every_example_is_evaluated_in_its_order(arc):
    found, scorer, per_task = examined(arc, None)
    assert found.examples == len(arc)
    assert per_task["task19"] == 3 * 101
    assert all(sum(map(len, answers.values())) == 101 for answers in scorer.votes.values())
    more, _, _ = examined(arc, 10 * len(arc))
    assert more.metrics == found.metrics


def test_a_split_of_single_examples_is_evaluated_from_the_front(tmp_path):
    split = open_split(sudoku_dataset(tmp_path / "set"), "test")
    np.testing.assert_array_equal(split.evaluation_order(), np.arange(12))
    search = Search(Oracle(), InferenceConfig(depth=1), split.spec)
    search.predictor.advance = lambda rows, inputs, *, probabilities=False: StepOutput(
        inputs, np.ones(len(rows), dtype=np.float32), None
    )
    found = evaluate(search, split, SUDOKU.scorer(split), 4, 5)
    assert (found.examples, found.tasks_total, found.coverage) == (5, None, "")
    assert "tasks_total" not in found.row(1, 1.0).to_json()
    np.testing.assert_array_equal(
        np.concatenate([batch.inputs for batch in search.predictor.batches]), split.batch(np.arange(5)).inputs
    )


def split_of(puzzles_of_groups):
    """A split with these groups, each a list of the numbers of examples of its puzzles."""
    sizes = [size for group in puzzles_of_groups for size in group]
    total = sum(sizes)
    return Split(
        spec=SPEC, ignore_label=None, inputs=None, labels=None, puzzle_identifiers=None,
        puzzle_indices=np.cumsum([0, *sizes]),
        group_indices=np.cumsum([0, *map(len, puzzles_of_groups)]),
        lengths=None, directory=None, reader=range(total), digests={},
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=8).map(
        lambda groups: [[tests] * puzzles for puzzles, tests in groups]
    ),
    st.integers(1, 60),
)
def test_every_group_and_every_test_of_it_gets_its_share(groups, limit):
    split = split_of(groups)
    order = split.evaluation_order()
    assert sorted(order) == list(range(len(split)))
    chosen = order[:limit]
    counts = Counter(split.groups(chosen).tolist())
    assert len(counts) == min(limit, split.num_groups), "as many groups as possible"
    starts = split.puzzle_indices[split.group_indices]
    votes = Counter()
    for example in chosen.tolist():
        group = int(split.groups(np.array([example]))[0])
        votes[group, (example - starts[group]) % groups[group][0]] += 1
    for group, puzzles in enumerate(groups):
        of_group = [votes[group, test] for test in range(puzzles[0])]
        assert max(of_group) - min(of_group) <= 1
        for other, others in enumerate(groups):
            for test in range(others[0]):
                complete = votes[other, test] == len(others)
                assert complete or max(of_group) - votes[other, test] <= 1


def test_metrics_of_another_choice_of_examples_are_not_comparable(arc, tmp_path):
    """Earlier versions took the first examples, which were all of one task."""
    config = run_config(tmp_path, evaluation__examples=100)
    assert evaluation_settings(config, arc)["spread_over_tasks"]
    everything = run_config(tmp_path, evaluation__examples=None)
    assert "spread_over_tasks" not in evaluation_settings(everything, arc)
    simple = open_split(sudoku_dataset(tmp_path / "set"), "test")
    few = run_config(tmp_path, evaluation__examples=5)
    assert evaluation_settings(few, simple) == {
        **few.inference.model_dump(),
        "examples": 5,
        "data": dict(simple.digests),
    }


def test_progress_is_reported_after_every_step_and_may_stop_the_evaluation(arc):
    seen = []

    def progress(done, total, facts):
        seen.append((done, total, facts))
        if len(seen) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examined(arc, 40, depth=4, progress=progress)
    assert seen == [
        *((0, 40, f"step {step}/4") for step in range(1, 5)),
        (32, 40, ""),
        *((32, 40, f"step {step}/4") for step in range(1, 3)),
    ]
