"""Mazes: how they are generated, labelled, read and verified."""

import csv
import lzma
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from example_batches import answers_of, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError, DataError
from trm.tasks.base import DataSpec, Drawable, GridLayout, Interactive
from trm.tasks.dataset import open_split
from trm.tasks.grids import maze_puzzles as mazes
from trm.tasks.grids.maze import TASK

SHARED = Path(__file__).parents[4] / ".." / "shared" / "data" / "maze_hard.csv.xz"
FIVE = DataSpec(25, 6, 6)
MAZE = "S.#..\n..#..\n.....\n##.#.\n....G"


def quiet(what, done, total):
    pass


def read(text):
    return TASK.read(text.encode(), FIVE).tokens


def read_answer(text):
    return TASK.parse_grid(text, 5).astype(np.int64).reshape(-1) + 1


def searched(walls, start, goal):
    """Breadth first from the start, one maze and one cell at a time: down, left, right, up."""
    parents, queue = {start: None}, deque([start])
    while queue:
        row, column = here = queue.popleft()
        for down, right in ((1, 0), (0, -1), (0, 1), (-1, 0)):
            there = row + down, column + right
            inside = 0 <= there[0] < len(walls) and 0 <= there[1] < len(walls)
            if inside and not walls[there] and there not in parents:
                parents[there] = here
                queue.append(there)
    path = []
    here = goal
    while here is not None:
        path.append(here)
        here = parents.get(here)
    return path[::-1] if path[-1] == start else None, parents


@pytest.mark.slow
@settings(max_examples=20)
@given(size=st.integers(3, 25), least=st.integers(1, 12), seed=st.integers(0, 1000))
def test_generated_mazes_have_a_path_that_is_long_enough_and_labelled_as_a_search_finds_it(size, least, seed):
    least = min(least, size)
    walls, starts, goals = mazes.generate(size, least, 3, [seed])
    labels = mazes.labelled_paths(walls, starts, goals)
    distances = mazes.distances(walls, starts)
    for i in range(3):
        start, goal = tuple(starts[i].tolist()), tuple(goals[i].tolist())
        path, parents = searched(walls[i], start, goal)
        assert len(path) - 1 >= least
        assert {tuple(cell) for cell in np.argwhere(labels[i]).tolist()} == set(path[1:-1])
        assert distances[i][goal] == len(path) - 1
        assert (distances[i] >= 0).sum() == len(parents)
    assert mazes.is_shortest_path(walls, starts, goals, labels).all()


def test_another_seed_gives_other_mazes_and_the_same_seed_the_same():
    first, again, other = (mazes.generate(12, 14, 5, [seed])[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_path_that_no_maze_has_is_refused(monkeypatch):
    monkeypatch.setattr(mazes, "_MAX_FRUITLESS_BATCHES", 2)
    with pytest.raises(DataError, match="No 5x5 maze was found whose shortest path has 24 cells or more"):
        mazes.generate(5, 23, 1, [0])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("S.#..\no.#..\nooo..\n##o#.\n..ooG", None),
        ("So#..\n.o#..\n.oo..\n##o#.\n..ooG", None),
        ("S.#..\no.#..\nooooo\n##.#o\n....G", None),
        ("S.#..\no.#..\nooo..\n##o#.\n.oooG", "8 cells are marked; a shortest path has 7"),
        ("S.#..\no.#..\noo.o.\n##o#.\n..ooG", "the marked cells do not lead from S to G"),
        ("S.#..\no.o..\nooo..\n##o#.\n..ooG", "the maze was changed at row 2, column 3"),
        ("..#..\no.#..\nooo..\n##o#.\n..ooG", "the maze was changed at row 1, column 1"),
    ],
)
def test_any_shortest_path_is_right_and_nothing_else(answer, problem):
    assert TASK.verify(read(MAZE), read_answer(answer)) == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MAZE.replace("S", "."), "there are 0 S; a maze has one"),
        (MAZE.replace("#..\n", "#.G\n", 1), "there are 2 G"),
        (MAZE.replace("S.", "So"), "a path is already marked"),
        (MAZE.replace("....G", "...#G").replace("#.\n", "##\n"), "no path leads from S to G"),
        (MAZE[:-1], "25 cells; this one has 25|not a valid maze"),
        (MAZE + "..\n", "cells"),
        (MAZE.replace("S", "x"), "'x' is not allowed"),
    ],
)
def test_an_invalid_maze_is_refused_with_its_reason(text, message):
    with pytest.raises(DataError, match=message):
        read(text)


def test_a_maze_may_be_typed_with_spaces_in_one_line_or_several():
    expected = read(MAZE)
    rows = MAZE.split("\n")
    for text in ("".join(rows), "".join(rows).replace(".", " "), MAZE.replace(".", " ") + "\n"):
        np.testing.assert_array_equal(read(text), expected)
    stripped = "\n".join(row.replace(".", " ").rstrip() for row in rows)
    np.testing.assert_array_equal(read(stripped), expected)
    assert TASK.text(expected) == "".join(rows)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_a_rotated_maze_has_a_label_of_its_own(seed):
    rng = np.random.default_rng(seed)
    questions, answers = TASK.generate(TASK.Options(size=7, min_path=6, seed=seed % 100), 4, 0)
    tokens = [grids.reshape(4, -1).astype(np.int64) + 1 for grids in (questions, answers)]
    batch = TASK.augment(batch_of(*tokens), rng.random((4, 1)))
    inputs, labels = batch.inputs, batch.labels
    grids = (inputs - 1).reshape(4, 7, 7).astype(np.int8)
    np.testing.assert_array_equal(TASK.solve(grids)[0].reshape(4, -1) + 1, labels)
    for question, answer in zip(inputs, labels, strict=True):
        assert TASK.verify(question, answer) is None
    np.testing.assert_array_equal(
        TASK.fingerprints(grids, grids), TASK.fingerprints(questions, answers), "it is the same maze"
    )


def test_augmentation_reaches_all_eight_orientations():
    questions, answers = TASK.generate(TASK.Options(size=7, min_path=6), 1, 0)
    tokens = [np.repeat(grids.reshape(1, -1).astype(np.int64) + 1, 200, 0) for grids in (questions, answers)]
    inputs = TASK.augment(batch_of(*tokens), np.random.default_rng(0).random((200, 1))).inputs
    assert len({row.tobytes() for row in inputs}) == 8


def test_the_splits_of_a_dataset_share_no_maze(tmp_path):
    TASK.build({"size": 6, "min_path": 7, "train": 300, "test": 60}, tmp_path / "set", quiet)
    splits = [open_split(tmp_path / "set", name) for name in ("train", "test")]
    assert TASK.complete(splits[0].spec) == TASK.spec({"size": 6})
    assert [len(split) for split in splits] == [300, 60]
    marks = [TASK.fingerprints(split.inputs.reshape(-1, 6, 6), split.labels) for split in splits]
    assert not set(marks[0]) & set(marks[1])
    for split in splits:
        batch = split.batch(np.arange(len(split)))
        assert all(TASK.verify(q, a) is None for q, a in zip(batch.inputs, batch.labels, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 41},
        {"size": 2},
        {"min_path": 1},
        {"size": 4, "min_path": 17},
        {"train_min_path": 101},
        {"train_min_path": 3, "from": "file"},
    ],
)
def test_sizes_and_paths_that_make_no_sense_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError):
        TASK.build(wrong, tmp_path / "set", quiet)


def test_mazes_are_read_from_a_file_and_wrong_answers_refused(tmp_path):
    file = tmp_path / "mazes.csv"
    rows = ["".join(MAZE.split("\n"))]
    right = "S.#..o.#..ooo..##o#...ooG"  # another shortest path than the label
    other = "S.......................G"
    file.write_text(f"question,answer\n{rows[0]},{right}\n{other},\n")
    TASK.build({"size": 5, "from": str(file), "test": 1}, tmp_path / "read", quiet)
    file.write_text(f"question,answer\n{rows[0]},{right.replace('oG', '.G')}\n{other},\n")
    with pytest.raises(DataError, match="line 2: the stated answer is wrong: 6 cells are marked"):
        TASK.build({"size": 5, "from": str(file), "test": 1}, tmp_path / "set", quiet)


@pytest.mark.skipif(not SHARED.is_file(), reason="needs the shared data")
def test_labels_are_those_of_maze_hard():
    with lzma.open(SHARED, "rt") as file:
        rows = list(csv.DictReader(file))
    questions = np.stack([TASK.parse(row["q"], 30) for row in rows[::10]])
    answers = np.stack([TASK.parse_grid(row["a"], 30) for row in rows[::10]])
    np.testing.assert_array_equal(TASK.solve(questions)[0], answers)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_file(), reason="needs the shared data")
def test_maze_hard_is_imported(tmp_path):
    options = {"size": 30, "from": str(SHARED), "source": "train", "test_source": "test", "test": 500}
    TASK.build(options, tmp_path / "set", quiet)
    splits = [open_split(tmp_path / "set", name) for name in ("train", "test")]
    assert [len(split) for split in splits] == [1000, 500]
    assert splits[0].spec == DataSpec(900, 6, 6)


def test_the_test_split_may_be_the_larger_one(tmp_path):
    TASK.build({"size": 6, "min_path": 3, "train": 20, "test": 200}, tmp_path / "set", quiet)
    assert [len(open_split(tmp_path / "set", name)) for name in ("train", "test")] == [20, 200]


def test_training_mazes_may_be_easier_and_are_not_test_mazes(tmp_path):
    """There are so few 3x3 mazes that splits generated independently would share many."""
    options = {"size": 3, "min_path": 4, "train_min_path": 2, "train": 400, "test": 60}
    TASK.build(options, tmp_path / "set", quiet)
    train, test = (open_split(tmp_path / "set", name) for name in ("train", "test"))
    assert train.difficulties().min() == 0
    assert test.difficulties().min() == 2
    marks = [TASK.fingerprints((s.inputs - 1).reshape(-1, 3, 3), s.labels) for s in (train, test)]
    assert not np.isin(marks[1], marks[0]).any()


def test_a_maze_can_be_typed_and_drawn_and_has_no_boxes():
    assert isinstance(TASK, Interactive)
    assert isinstance(TASK, Drawable)
    assert TASK.spec({"size": 5}).layout == GridLayout(5, 5)


def test_any_shortest_path_scores_as_valid_and_only_the_label_as_exact():
    label = read_answer("S.#..\no.#..\nooo..\n##o#.\n..ooG")
    other = read_answer("So#..\n.o#..\n.oo..\n##o#.\n..ooG")
    wrong = read(MAZE)
    scorer = TASK.scorer(None)
    scorer.add(batch_of([read(MAZE)] * 3, [label] * 3), answers_of([label, other, wrong], [1.0, 1.0, -1.0]))
    scorer.add(batch_of([read(MAZE)], [label]), answers_of([label], [1.0]))
    assert TASK.primary_metric == "valid_accuracy"
    assert scorer.metrics().scalars == {
        "exact_accuracy": 0.5,
        "valid_accuracy": 0.75,
        "token_accuracy": pytest.approx((100 - 4 - 7) / 100),
        "halt_accuracy": 0.75,
    }


def test_a_scorer_without_answers_reports_zeros():
    assert set(TASK.scorer(None).metrics().scalars.values()) == {0.0}


def test_the_legend_explains_what_is_shown():
    right = read_answer("S.#..\no.#..\nooo..\n##o#.\n..ooG")
    wrong = read_answer("S.#..\no.#..\nooo..\n#.o#.\n..ooG")
    plain = "# is a wall; o is the path from S to G"
    shown = TASK.show(read(MAZE), right, None, color=False)
    assert TASK.legend(shown, changes=False, color=False) == plain
    shown = TASK.show(read(MAZE), wrong, right, color=False)
    assert "!" in shown
    marks = f"{plain}; ! is a cell where the answer changes the maze; changes are starred"
    assert TASK.legend(shown, changes=True, color=False) == marks
