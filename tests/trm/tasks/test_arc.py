"""ARC: files, canvases, turns and colours with their inverses, and votes."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError, DataError
from trm.tasks.arc import TASK, Votes
from trm.tasks.arc_puzzles import Augmentation, crop, read_puzzles, turned
from trm.tasks.base import IGNORE_LABEL, TaskShape, open_split

SHARED = Path(__file__).parents[3] / ".." / "shared" / "data" / "arc.tar.xz"
SHAPE = TaskShape(900, 12, 12, 1)

grids = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).integers(
        0, 10, np.random.default_rng(seed).integers(1, 31, 2), dtype=np.uint8
    )
)
ways = st.builds(Augmentation, st.integers(0, 7), st.permutations(range(1, 10)).map(lambda rest: (0, *rest)))


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


def encoded(grid):
    return TASK.encode(json.dumps(grid.tolist()), SHAPE)


@given(grids)
def test_a_grid_comes_back_from_its_canvas(grid):
    tokens = encoded(grid)
    np.testing.assert_array_equal(crop(tokens), grid)
    assert TASK.decode(tokens) == json.dumps(grid.tolist(), separators=(",", ":"))
    canvas, (rows, columns) = tokens.reshape(30, 30), grid.shape
    assert (canvas == 1).sum() == (columns if rows < 30 else 0) + (rows if columns < 30 else 0)
    assert (canvas[rows + 1 :] == 0).all()


@given(grids, ways)
def test_every_augmentation_has_an_inverse_and_a_name(grid, way):
    np.testing.assert_array_equal(way.invert(way.apply(grid)), grid)
    np.testing.assert_array_equal(way.apply(way.invert(grid)), grid)
    assert Augmentation.of_name(way.name_of("abc")) == ("abc", way)


def test_the_eight_turns_are_different_and_numbered_as_in_the_public_code():
    grid = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8)
    assert len({(turned(grid, turn).shape, turned(grid, turn).tobytes()) for turn in range(8)}) == 8
    assert turned(grid, 1).tolist() == [[3, 6], [2, 5], [1, 4]]
    assert turned(grid, 4).tolist() == [[3, 2, 1], [6, 5, 4]]
    assert turned(grid, 5).tolist() == [[4, 5, 6], [1, 2, 3]]
    assert turned(grid, 6).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert turned(grid, 7).tolist() == [[6, 3], [5, 2], [4, 1]]


@settings(max_examples=25)
@given(grids, grids, st.integers(0, 2**32))
def test_moving_a_pair_on_its_canvas_loses_nothing(question, answer, seed):
    draws = np.random.default_rng(seed).random((4, TASK.num_draws))
    inputs, labels = (np.repeat(encoded(grid)[None], 4, 0) for grid in (question, answer))
    labels[labels == 0] = IGNORE_LABEL
    moved = TASK.augment(inputs, labels, draws)
    for tokens, grid in zip(moved, (question, answer), strict=True):
        for row in tokens:
            canvas = row.reshape(30, 30)
            coloured = np.argwhere(canvas >= 2)
            (top, left), (bottom, right) = coloured.min(0), coloured.max(0) + 1
            np.testing.assert_array_equal(canvas[top:bottom, left:right] - 2, grid)
    assert set(np.unique(moved[0])) <= set(range(12))
    assert not (moved[1] == 0).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0, 10]]", "colours are 0 to 9"),
        ("[[0, 1], [2]]", "rows of equally many colours"),
        ("[]", "1 to 30 rows"),
        ("[[" + "0," * 30 + "0]]", "1 to 30 rows"),
        ("[[0", "no grid"),
        ("01 2x", "rows of equally many colours"),
        ("", "1 to 30 rows"),
    ],
)
def test_what_is_no_grid_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        TASK.encode(text, SHAPE)


def test_a_grid_may_be_typed_as_rows_of_digits():
    np.testing.assert_array_equal(TASK.encode("01 23", SHAPE), TASK.encode("[[0,1],[2,3]]", SHAPE))


def test_a_set_has_an_identifier_for_every_task_and_augmentation(tmp_path):
    for seed in range(3):
        task_file(tmp_path / "learn", f"learn{seed}", seed, tests=2)
    asked = task_file(tmp_path / "ask", "ask", 9, tests=2)
    options = {"train": [str(tmp_path / "learn")], "test": [str(tmp_path / "ask")], "augmentations": 4}
    TASK.build(options, tmp_path / "set", quiet)
    train, test = (open_split(tmp_path / "set", name) for name in ("train", "test"))
    TASK.check(train.shape)
    assert train.shape == TASK.shape(options)
    assert train.shape.num_puzzle_identifiers == 1 + 4 * 5
    assert len(train) == 3 * 5 * 5 + 5 * 3  # whole tasks to learn from, and the demonstrations of the other
    assert len(test) == 5 * 2
    assert (np.diff(train.group_indices) == 5).all()
    names = json.loads((tmp_path / "set" / "identifiers.json").read_text())
    assert len(set(names)) == 21
    inputs, labels = test.rows(np.arange(10))
    for tokens, label, identifier in zip(inputs, labels, test.identifiers(np.arange(10)), strict=True):
        name, way = Augmentation.of_name(names[identifier])
        assert name == "ask"
        question, answer = way.invert(crop(tokens)).tolist(), way.invert(crop(label)).tolist()
        assert {"input": question, "output": answer} in asked["test"]


def test_the_same_options_build_the_same_set(tmp_path):
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
    assert open_split(tmp_path / "set", "train").shape.num_puzzle_identifiers == 2


def test_tasks_on_both_sides_are_refused_dropped_or_allowed(tmp_path):
    for name in ("learn", "ask"):
        task_file(tmp_path / name, name, 3)
    task_file(tmp_path / "learn", "other", 4)
    options = {"train": [str(tmp_path / "learn")], "test": [str(tmp_path / "ask")], "augmentations": 1}
    message = r"1 of the 2 tasks to learn from are also among those to be asked about: learn \(as ask\)"
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
        ("[]", "is no ARC task"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"train": [], "test": [{"output": [[1]]}]}', "not written as ARC tasks are"),
        ('{"train": [{"input": [[1]]}], "test": []}', "not written as ARC tasks are"),
        ('{"train": [{"input": [[11]], "output": [[1]]}], "test": []}', "colours are 0 to 9"),
        ('{"abc": {"train": 3, "test": 4}}', "task abc is not written"),
        ('{"a|||b": {"train": [], "test": []}}', "cannot be called"),
    ],
)
def test_a_file_that_is_no_task_is_refused_by_name(tmp_path, content, message):
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
    task_file(tmp_path / "ask", "ask", 5, tests=2)
    TASK.build({"test": [str(tmp_path / "ask")], "augmentations": 4}, tmp_path / "set", quiet)
    split = open_split(tmp_path / "set", "test")
    inputs, labels = split.rows(np.arange(len(split)))
    return Votes(tmp_path / "set"), inputs, labels, split.identifiers(np.arange(len(split)))


def test_right_answers_of_every_augmentation_win(voting):
    votes, inputs, labels, identifiers = voting
    votes.see(inputs, identifiers, labels, np.zeros(len(inputs)))
    assert votes.scores() == {"pass@1": 1.0, "pass@2": 1.0}
    submission = votes.submission()
    expected = [answer.tolist() for _, answer in votes.puzzles["ask"].tests]
    assert [test["attempt_1"] for test in submission["ask"]] == expected


def test_the_majority_counts(voting):
    votes, inputs, labels, identifiers = voting
    answers = labels.copy()
    answers[:6] = encoded(np.array([[0]]))  # black stays black: three of five agree on something wrong
    votes.see(inputs, identifiers, answers, np.zeros(len(inputs)))
    assert votes.scores() == {"pass@1": 0.0, "pass@2": 1.0}


def test_of_equally_many_votes_the_more_believed_answer_comes_first(voting):
    votes, inputs, labels, identifiers = voting
    wrong = np.repeat(encoded(np.array([[0]]))[None], 2, 0)  # black stays black under every augmentation
    votes.see(inputs[:2], identifiers[:2], wrong, np.array([3.0, 3.0]))
    votes.see(inputs[2:4], identifiers[2:4], labels[2:4], np.array([1.0, 1.0]))
    assert votes.scores() == {"pass@1": 0.0, "pass@2": 1.0}
    votes.see(inputs[4:6], identifiers[4:6], labels[4:6], np.array([-9.0, -9.0]))
    assert votes.scores() == {"pass@1": 1.0, "pass@2": 1.0}


def test_a_submission_has_two_attempts_even_where_nothing_was_asked(voting):
    votes, *_ = voting
    assert votes.submission()["ask"] == [{"attempt_1": [[0]], "attempt_2": [[0]]}] * 2
    assert votes.scores() == {"pass@1": 0.0, "pass@2": 0.0}


def test_an_answer_without_a_colour_at_its_beginning_is_no_grid():
    assert TASK.judge(encoded(np.array([[1]])), np.zeros(900, dtype=np.int64)) == (
        "the answer is no grid: its first cell has no colour"
    )
    assert TASK.judge(encoded(np.array([[1]])), encoded(np.array([[4]]))) is None


def test_changes_are_starred():
    before, after = encoded(np.array([[1, 2], [3, 4]])), encoded(np.array([[1, 2], [3, 5]]))
    assert TASK.show(before, after, before, color=False) == "1 2 \n3 5*"
    larger = encoded(np.array([[1, 2, 3]]))
    assert TASK.show(before, larger, before, color=False) == "1*2*3*"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_file(), reason="needs the shared data")
def test_the_real_tasks_are_read_and_their_overlap_is_seen(tmp_path):
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
    with pytest.raises(DataError, match=r"37\d of the 1000 tasks"):
        TASK.build(options, tmp_path / "set", quiet)
    options["train"] = [str(tmp_path / "arc/ARC-AGI-1/training")]
    with pytest.raises(DataError, match=r"1 of the 400 tasks .* 40853293 \(as 070dd51e\)"):
        TASK.build(options, tmp_path / "set", quiet)


def test_an_answer_is_judged_by_its_author_if_by_anybody():
    question, right = encoded(np.array([[1, 2]])), encoded(np.array([[3, 4], [5, 6]]))
    assert TASK.judge(question, right) is None
    assert TASK.judge(question, right, right) is None
    assert "another answer" in TASK.judge(question, encoded(np.array([[3, 4]])), right)
    assert "no grid" in TASK.judge(question, np.ones(900, dtype=np.int64), right)
