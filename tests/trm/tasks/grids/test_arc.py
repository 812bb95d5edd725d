"""ARC: files, canvases, augmentations with their inverses, and votes."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from example_batches import answers_of, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError, DataError
from trm.batch import IGNORE_LABEL
from trm.tasks.base import DataSpec, Drawable, GridLayout, Interactive, Submittable
from trm.tasks.dataset import open_split
from trm.tasks.grids.arc import TASK
from trm.tasks.grids.arc_puzzles import Augmentation, crop, dihedral_transform, read_puzzles

SHARED = Path(__file__).parents[4] / ".." / "shared" / "data" / "arc.tar.xz"
SPEC = DataSpec(900, 12, 12)

grids = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).integers(
        0, 10, np.random.default_rng(seed).integers(1, 31, 2), dtype=np.uint8
    )
)
augmentations = st.builds(
    Augmentation, st.integers(0, 7), st.permutations(range(1, 10)).map(lambda rest: (0, *rest))
)


def quiet(what, done, total):
    pass


def task_file(directory, name, seed, tests=1, answered=True, size=5):
    """Each answer is its question with two colours swapped."""
    rng = np.random.default_rng(seed)

    def pair(with_answer):
        question = rng.integers(0, 10, (size, size + 1))
        answer = np.where(question == 1, 2, np.where(question == 2, 1, question))
        return {"input": question.tolist()} | ({"output": answer.tolist()} if with_answer else {})

    directory.mkdir(parents=True, exist_ok=True)
    content = {"train": [pair(True) for _ in range(3)], "test": [pair(answered) for _ in range(tests)]}
    (directory / f"{name}.json").write_text(json.dumps(content))
    return content


def read(text):
    return TASK.read(text.encode(), SPEC).tokens


def tokens_of(grid):
    return read(json.dumps(grid.tolist()))


@given(grids)
def test_a_grid_comes_back_from_its_canvas(grid):
    tokens = tokens_of(grid)
    np.testing.assert_array_equal(crop(tokens), grid)
    assert TASK.text(tokens) == json.dumps(grid.tolist(), separators=(",", ":"))
    canvas, (rows, columns) = tokens.reshape(30, 30), grid.shape
    assert (canvas == 1).sum() == (columns if rows < 30 else 0) + (rows if columns < 30 else 0)
    assert (canvas[rows + 1 :] == 0).all()


@given(grids, augmentations)
def test_every_augmentation_has_an_inverse_and_a_name(grid, augmentation):
    np.testing.assert_array_equal(augmentation.invert(augmentation.apply(grid)), grid)
    np.testing.assert_array_equal(augmentation.apply(augmentation.invert(grid)), grid)
    assert Augmentation.from_name(augmentation.name_of("abc")) == ("abc", augmentation)


def test_the_eight_transforms_differ_and_are_numbered_as_in_the_reference_implementation():
    grid = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8)
    results = [dihedral_transform(grid, transform) for transform in range(8)]
    assert len({(result.shape, result.tobytes()) for result in results}) == 8
    assert results[1].tolist() == [[3, 6], [2, 5], [1, 4]]
    assert results[4].tolist() == [[3, 2, 1], [6, 5, 4]]
    assert results[5].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert results[6].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert results[7].tolist() == [[6, 3], [5, 2], [4, 1]]


@settings(max_examples=25)
@given(grids, grids, st.integers(0, 2**32))
def test_moving_a_pair_on_its_canvas_loses_nothing(question, answer, seed):
    draws = np.random.default_rng(seed).random((4, TASK.num_draws))
    inputs, labels = (np.repeat(tokens_of(grid)[None], 4, 0) for grid in (question, answer))
    labels[labels == 0] = IGNORE_LABEL
    moved = TASK.augment(batch_of(inputs, labels), draws)
    for tokens, grid in ((moved.inputs, question), (moved.labels, answer)):
        for row in tokens:
            canvas = row.reshape(30, 30)
            coloured = np.argwhere(canvas >= 2)
            (top, left), (bottom, right) = coloured.min(0), coloured.max(0) + 1
            np.testing.assert_array_equal(canvas[top:bottom, left:right] - 2, grid)
    assert set(np.unique(moved.inputs)) <= set(range(12))
    assert not (moved.labels == 0).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0, 10]]", "colours are 0 to 9"),
        ("[[0, 1], [2]]", "rows of equally many colours"),
        ("[]", "1 to 30 rows"),
        ("[[" + "0," * 30 + "0]]", "1 to 30 rows"),
        ("[[0", "not a grid"),
        ("01 2x", "rows of equally many colours"),
        ("", "1 to 30 rows"),
    ],
)
def test_an_invalid_grid_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        read(text)


def test_a_grid_may_be_typed_as_rows_of_digits():
    np.testing.assert_array_equal(read("01 23"), read("[[0,1],[2,3]]"))


def test_a_dataset_has_an_identifier_for_every_task_and_augmentation(tmp_path):
    for seed in range(3):
        task_file(tmp_path / "learn", f"learn{seed}", seed, tests=2)
    test_task = task_file(tmp_path / "ask", "ask", 9, tests=2)
    options = {"train": [str(tmp_path / "learn")], "test": [str(tmp_path / "ask")], "augmentations": 4}
    TASK.build(options, tmp_path / "set", quiet)
    train, test = (open_split(tmp_path / "set", name) for name in ("train", "test"))
    assert TASK.complete(train.spec) == TASK.spec(options)
    assert train.spec.num_puzzle_identifiers == 1 + 4 * 5
    assert len(train) == 3 * 5 * 5 + 5 * 3  # whole training tasks, and the demonstrations of the test task
    assert len(test) == 5 * 2
    assert (np.diff(train.group_indices) == 5).all()
    names = json.loads((tmp_path / "set" / "identifiers.json").read_text())
    assert len(set(names)) == 21
    batch = test.batch(np.arange(10))
    for row in range(10):
        name, augmentation = Augmentation.from_name(names[batch.puzzle_identifiers[row]])
        assert name == "ask"
        question = augmentation.invert(crop(batch.inputs[row])).tolist()
        answer = augmentation.invert(crop(batch.labels[row])).tolist()
        assert {"input": question, "output": answer} in test_task["test"]


def test_the_same_options_build_the_same_arc_dataset(tmp_path):
    task_file(tmp_path / "ask", "ask", 0)
    for name in ("one", "two"):
        TASK.build({"test": [str(tmp_path / "ask")], "augmentations": 6}, tmp_path / name, quiet)
    one, two = (open_split(tmp_path / name, "train") for name in ("one", "two"))
    np.testing.assert_array_equal(one.inputs, two.inputs)


def test_a_grid_with_few_different_augmentations_has_few(tmp_path):
    (tmp_path / "black.json").write_text(
        json.dumps({"train": [{"input": [[0]], "output": [[0]]}], "test": [{"input": [[0]]}]})
    )
    TASK.build({"test": [str(tmp_path / "black.json")], "augmentations": 10}, tmp_path / "set", quiet)
    assert open_split(tmp_path / "set", "train").spec.num_puzzle_identifiers == 2


def test_tasks_in_both_splits_are_refused_dropped_or_allowed(tmp_path):
    for name in ("learn", "ask"):
        task_file(tmp_path / name, name, 3)
    task_file(tmp_path / "learn", "other", 4)
    options = {"train": [str(tmp_path / "learn")], "test": [str(tmp_path / "ask")], "augmentations": 1}
    message = r"1 of the 2 training tasks are also test tasks: learn \(as ask\)"
    with pytest.raises(DataError, match=message) as refused:
        TASK.build(options, tmp_path / "set", quiet)
    assert "--overlap drop" in refused.value.hint
    for how, expected in (("drop", ["other", "ask"]), ("allow", ["learn", "other", "ask"])):
        TASK.build({**options, "overlap": how}, tmp_path / how, quiet)
        names = json.loads((tmp_path / how / "identifiers.json").read_text())
        assert [name for name in names[1:] if "|||" not in name] == expected


def test_files_of_a_competition_are_read_with_their_solutions(tmp_path):
    task = task_file(tmp_path / "one", "abc", 0, tests=2)
    answers = [pair.pop("output") for pair in task["test"]]
    (tmp_path / "arc_challenges.json").write_text(json.dumps({"abc": task}))
    (unknown,) = read_puzzles(tmp_path / "arc_challenges.json")
    assert [answer for _, answer in unknown.tests] == [None, None]
    (tmp_path / "arc_solutions.json").write_text(json.dumps({"abc": answers}))
    (known,) = read_puzzles(tmp_path / "arc_challenges.json")
    assert [answer.tolist() for _, answer in known.tests] == answers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is not an ARC task"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"train": [], "test": [{"output": [[1]]}]}', "does not have the format of ARC tasks"),
        ('{"train": [{"input": [[1]]}], "test": []}', "does not have the format of ARC tasks"),
        ('{"train": [{"input": [[11]], "output": [[1]]}], "test": []}', "colours are 0 to 9"),
        ('{"abc": {"train": 3, "test": 4}}', "task abc does not have the format"),
        ('{"abc": {"train": [], "test": []}, "abc": {}}', "the key 'abc' is given twice"),
        ('{"a|||b": {"train": [], "test": []}}', r"must not contain \|\|\|"),
    ],
)
def test_a_file_that_is_not_a_task_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "wrong.json"
    file.write_text(content)
    with pytest.raises(DataError, match=message) as refused:
        TASK.build({"test": [str(file)]}, tmp_path / "set", quiet)
    assert "wrong.json" in str(refused.value)
    assert not (tmp_path / "set").exists()


def test_missing_files_and_wrong_options_are_refused(tmp_path):
    with pytest.raises(DataError, match="Cannot read"):
        TASK.build({"test": [str(tmp_path / "none.json")]}, tmp_path / "set", quiet)
    with pytest.raises(DataError, match="There is no task in"):
        TASK.build({"test": [str(tmp_path)]}, tmp_path / "set", quiet)
    with pytest.raises(ConfigError, match="test"):
        TASK.build({"test": []}, tmp_path / "set", quiet)


@pytest.fixture
def voting(tmp_path):
    """A scorer, and the batch of all test examples: two tests of one task in five augmentations."""
    task_file(tmp_path / "ask", "ask", 5, tests=2)
    TASK.build({"test": [str(tmp_path / "ask")], "augmentations": 4}, tmp_path / "set", quiet)
    split = open_split(tmp_path / "set", "test")
    return TASK.scorer(split), split.batch(np.arange(len(split)))


def passes(scorer):
    scalars = scorer.metrics().scalars
    return scalars["pass@1"], scalars["pass@2"]


def test_right_answers_of_every_augmentation_win(voting):
    votes, batch = voting
    assert isinstance(votes, Submittable)
    votes.add(batch, answers_of(batch.labels))
    assert votes.metrics().scalars == {
        "exact_accuracy": 1.0,
        "token_accuracy": 1.0,
        "halt_accuracy": 1.0,
        "pass@1": 1.0,
        "pass@2": 1.0,
    }
    assert TASK.primary_metric in votes.metrics().scalars
    submission = votes.submission()
    expected = [answer.tolist() for _, answer in votes.puzzles["ask"].tests]
    assert [test["attempt_1"] for test in submission["ask"]] == expected


def test_the_majority_counts(voting):
    votes, batch = voting
    answers = batch.labels.copy()
    answers[:6] = tokens_of(np.array([[0]]))  # black stays black: three of five agree on something wrong
    votes.add(batch, answers_of(answers))
    assert passes(votes) == (0.0, 1.0)
    assert votes.metrics().scalars["exact_accuracy"] == 0.4


def test_among_equally_many_votes_the_more_confident_answer_comes_first(voting):
    votes, batch = voting
    wrong = np.repeat(tokens_of(np.array([[0]]))[None], 2, 0)  # black stays black under every augmentation
    votes.add(batch[:2], answers_of(wrong, [3.0, 3.0]))
    votes.add(batch[2:4], answers_of(batch.labels[2:4], [1.0, 1.0]))
    assert passes(votes) == (0.0, 1.0)
    votes.add(batch[4:6], answers_of(batch.labels[4:6], [-9.0, -9.0]))
    assert passes(votes) == (1.0, 1.0)


def test_votes_and_confidence_decide_as_worked_out_by_hand(tmp_path):
    """One test in five augmentations; the answers below are those after mapping back.

        augmentation  answer  halt logit
        0             A           2.0
        1             B           5.0
        2             A          -1.0
        3             B          -4.5
        4             C           9.0

    A and B have two votes each, C has one. The mean halt logit is (2.0 - 1.0) / 2 = 0.5 for A and
    (5.0 - 4.5) / 2 = 0.25 for B, so A is the first attempt and B, which is right, the second. C is the most
    confident, but alone.
    """
    a, b, c = [[1, 1], [0, 2]], [[2, 0], [1, 1]], [[3]]
    pair = {"input": [[1, 2], [3, 4]], "output": b}
    (tmp_path / "task.json").write_text(json.dumps({"train": [pair], "test": [pair]}))
    TASK.build({"test": [str(tmp_path / "task.json")], "augmentations": 4}, tmp_path / "set", quiet)
    split = open_split(tmp_path / "set", "test")
    votes = TASK.scorer(split)
    batch = split.batch(np.arange(5))
    augmentations = [Augmentation.from_name(votes.names[each])[1] for each in batch.puzzle_identifiers]
    answers = [
        tokens_of(augmentation.apply(np.array(grid, dtype=np.uint8)))
        for augmentation, grid in zip(augmentations, (a, b, a, b, c), strict=True)
    ]
    votes.add(batch, answers_of(np.stack(answers), [2.0, 5.0, -1.0, -4.5, 9.0]))
    assert votes.submission() == {"task": [{"attempt_1": a, "attempt_2": b}]}
    assert passes(votes) == (0.0, 1.0)
    assert votes.metrics().scalars["exact_accuracy"] == 0.4
    assert votes.unanswered() == 0


def test_a_submission_without_an_answer_to_every_test_is_refused(voting):
    votes, batch = voting
    assert passes(votes) == (0.0, 0.0)
    votes.add(batch[:1], answers_of(batch.labels[:1]))
    with pytest.raises(DataError, match="1 of 2 tests were not evaluated"):
        votes.submission()
    assert passes(votes) == (1.0, 1.0), "of the tests that were evaluated"


def test_an_answer_that_is_not_a_grid_has_no_vote(voting):
    votes, batch = voting
    answers = batch.labels.copy()
    answers[:8] = 0  # four of five augmentations
    votes.add(batch, answers_of(answers))
    assert passes(votes) == (1.0, 1.0)
    for test, (_, answer) in zip(votes.submission()["ask"], votes.puzzles["ask"].tests, strict=True):
        assert test == {"attempt_1": answer.tolist(), "attempt_2": answer.tolist()}


def test_tests_to_which_no_answer_is_a_grid_are_counted(voting):
    votes, batch = voting
    answers = batch.labels.copy()
    answers[::2] = 0  # the first test in every augmentation
    votes.add(batch, answers_of(answers))
    assert votes.unanswered() == 1
    assert passes(votes) == (0.5, 0.5)
    assert votes.submission()["ask"][0] == {"attempt_1": [[0]], "attempt_2": [[0]]}


def test_the_first_example_of_every_test_is_found(voting, tmp_path):
    votes, _ = voting
    split = open_split(tmp_path / "set", "test")
    assert votes.first_places(split, np.arange(10)) == [0, 1]
    assert votes.first_places(split, np.array([8, 6, 3])) == [0, 2]
    assert votes.first_places(split, np.array([8, 6])) == [0, None]


@pytest.mark.parametrize("names", [[], ["<blank>", "ask|||x"], 3, {"a": "b"}])
def test_puzzle_identifiers_without_a_valid_name_are_an_error(voting, tmp_path, names):
    (tmp_path / "set" / "identifiers.json").write_text(json.dumps(names))
    _, batch = voting
    with pytest.raises(DataError, match="Puzzle identifier 1 has no valid name"):
        TASK.scorer(open_split(tmp_path / "set", "test")).add(batch, answers_of(batch.labels))


def test_two_test_tasks_of_one_name_are_refused(tmp_path):
    for directory, seed in (("one", 1), ("two", 2)):
        task_file(tmp_path / directory, "same", seed)
    options = {"test": [str(tmp_path / "one"), str(tmp_path / "two")], "augmentations": 1}
    with pytest.raises(DataError, match="Several test tasks are named same"):
        TASK.build(options, tmp_path / "set", quiet)


def test_a_dataset_without_its_test_tasks_cannot_be_scored(voting, tmp_path):
    (tmp_path / "set" / "test_puzzles.json").unlink()
    with pytest.raises(DataError, match="Cannot read the test tasks"):
        TASK.scorer(open_split(tmp_path / "set", "test"))


def test_an_answer_without_a_colour_at_its_beginning_is_not_a_grid():
    assert TASK.verify(tokens_of(np.array([[1]])), np.zeros(900, dtype=np.int64)) == (
        "the answer is not a grid: its first cell has no colour"
    )
    assert TASK.verify(tokens_of(np.array([[1]])), tokens_of(np.array([[4]]))) is None


def test_arc_grids_can_be_typed_and_drawn():
    assert isinstance(TASK, Interactive)
    assert isinstance(TASK, Drawable)
    assert TASK.complete(SPEC).layout == GridLayout(30, 30)
    with pytest.raises(DataError, match="900 cells and 12 tokens; this one has 81 cells, 12 input tokens"):
        TASK.complete(DataSpec(81, 12, 12))


def test_a_picture_marks_cells_that_differ_or_that_only_one_of_answer_and_label_has():
    answer, label = tokens_of(np.array([[1, 2], [3, 4]])), tokens_of(np.array([[1, 3, 5]]))
    wrong = [[tile.wrong for tile in row] for row in TASK.picture(answer, answer, label).tiles]
    assert wrong == [[False, True, True], [True, True, False]]
    assert not any(tile.wrong for row in TASK.picture(answer, answer, None).tiles for tile in row)


def test_solutions_that_are_not_a_json_object_are_refused(tmp_path):
    task = task_file(tmp_path / "one", "abc", 0)
    (tmp_path / "arc_challenges.json").write_text(json.dumps({"abc": task}))
    (tmp_path / "arc_solutions.json").write_text("[1]")
    with pytest.raises(DataError, match=r"arc_solutions\.json does not hold solutions"):
        read_puzzles(tmp_path / "arc_challenges.json")


def test_changes_are_starred():
    before, after = tokens_of(np.array([[1, 2], [3, 4]])), tokens_of(np.array([[1, 2], [3, 5]]))
    assert TASK.show(before, after, before, color=False) == "1 2 \n3 5*"
    larger = tokens_of(np.array([[1, 2, 3]]))
    assert TASK.show(before, larger, before, color=False) == "1*2*3*"
    assert TASK.legend("1*2*3*", changes=True, color=False) == "digits are colours; changes are starred"
    assert TASK.legend("1 2 3 ", changes=False, color=True) == ""


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_file(), reason="needs the shared data")
def test_the_real_tasks_are_read_and_their_overlap_is_found(tmp_path):
    with tarfile.open(SHARED) as archive:
        archive.extractall(tmp_path, filter="data")
    counts = {
        path: len(read_puzzles(tmp_path / "arc" / path)) for path in ("ARC-AGI-1/training", "ConceptARC")
    }
    assert counts == {"ARC-AGI-1/training": 400, "ConceptARC": 160}
    options = {
        "train": [str(tmp_path / "arc/ARC-AGI-2/training")],
        "test": [str(tmp_path / "arc/ARC-AGI-1/evaluation")],
    }
    with pytest.raises(DataError, match=r"37\d of the 1000 training tasks"):
        TASK.build(options, tmp_path / "set", quiet)
    options["train"] = [str(tmp_path / "arc/ARC-AGI-1/training")]
    with pytest.raises(DataError, match=r"1 of the 400 training tasks .* 40853293 \(as 070dd51e\)"):
        TASK.build(options, tmp_path / "set", quiet)


def test_an_answer_is_compared_with_its_label_if_there_is_one():
    question, right = tokens_of(np.array([[1, 2]])), tokens_of(np.array([[3, 4], [5, 6]]))
    assert TASK.verify(question, right) is None
    assert TASK.verify(question, right, right) is None
    assert "a different answer" in TASK.verify(question, tokens_of(np.array([[3, 4]])), right)
    assert "not a grid" in TASK.verify(question, np.ones(900, dtype=np.int64), right)
