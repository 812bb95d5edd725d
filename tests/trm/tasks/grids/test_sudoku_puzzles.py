"""Sudoku puzzles, checked against a plain recursive solver and symmetries written out by hand."""

import lzma
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import DataError
from trm.tasks.grids import sudoku_puzzles
from trm.tasks.grids.sudoku_puzzles import (
    BLANKS,
    BOX_SHAPES,
    contradiction,
    count_solutions,
    fingerprints,
    generate,
    solve,
)

REAL_PUZZLES = Path(__file__).parents[4] / ".." / "shared" / "data" / "sudoku.csv.xz"
LEVELS = [(size, blanks) for size, levels in BLANKS.items() for blanks in levels.values()]
sizes = st.sampled_from(sorted(BOX_SHAPES))
seeds = st.integers(0, 2**32)


def plain_count(grid, limit):
    """Solutions of one grid, counted by trying every digit in the blank cell with the fewest options."""
    options = {}
    for row, column in np.argwhere(grid == 0):
        seen = set(peers(grid, row, column))
        options[row, column] = [digit for digit in range(1, len(grid) + 1) if digit not in seen]
    if not options:
        return 1
    cell = min(options, key=lambda each: len(options[each]))
    found = 0
    for digit in options[cell]:
        if found < limit:
            grid[cell] = digit
            found += plain_count(grid, limit - found)
    grid[cell] = 0
    return found


def peers(grid, row, column):
    rows, columns = BOX_SHAPES[len(grid)]
    top, left = row - row % rows, column - column % columns
    box = grid[top : top + rows, left : left + columns]
    return [*grid[row].tolist(), *grid[:, column].tolist(), *box.ravel().tolist()]


def obeys_the_rules(grid):
    """Among the cells of a row, a column and a box, a digit occurs only where they cross: three times."""
    return all(peers(grid, *cell).count(grid[*cell]) == 3 for cell in np.argwhere(grid > 0))


def pattern_grid(size):
    """A complete grid without search: each row is the row above, moved on by the width of a box or by one."""
    rows, columns = BOX_SHAPES[size]
    row, column = np.indices((size, size))
    return ((row % rows) * columns + row // rows + column) % size + 1


def shuffled_lines(size, width, rng):
    """The rows in another order that keeps every band of `width` rows together."""
    bands = np.arange(size).reshape(-1, width)
    return np.concatenate([rng.permutation(band) for band in rng.permutation(bands)])


def symmetric_copy(puzzle, solution, rng):
    size = len(puzzle)
    box_rows, box_columns = BOX_SHAPES[size]
    where = np.ix_(shuffled_lines(size, box_rows, rng), shuffled_lines(size, box_columns, rng))
    names = np.concatenate([[0], rng.permutation(size) + 1]).astype(np.uint8)
    pair = [names[puzzle][where], names[solution][where]]
    return [grid.T for grid in pair] if box_rows == box_columns and rng.random() < 0.5 else pair


def real_puzzles(source, count):
    if not REAL_PUZZLES.exists():
        pytest.skip(f"needs the real puzzles in {REAL_PUZZLES}")
    with lzma.open(REAL_PUZZLES, "rt", encoding="ascii") as lines:
        rows = islice((line.replace(".", "0").split(",") for line in lines if line.startswith(source)), count)
        grids = [[list(question), list(answer)] for _, question, answer, _ in rows]
    return np.array(grids, np.uint8).reshape(count, 2, 9, 9).swapaxes(0, 1)


@pytest.mark.parametrize(("size", "blanks"), LEVELS)
def test_a_generated_puzzle_has_exactly_one_solution(size, blanks):
    puzzles, solutions = generate(size, blanks, 10, seed=1)
    assert [plain_count(puzzle.copy(), limit=2) for puzzle in puzzles] == [1] * 10
    assert all(obeys_the_rules(solution) for solution in solutions)


@settings(max_examples=8, deadline=None)
@given(size=sizes, share=st.floats(0, 0.62), count=st.integers(0, 70), seed=seeds)
def test_a_generated_puzzle_has_the_requested_blanks_and_agrees_with_its_solution(size, share, count, seed):
    blanks = int(share * size**2)
    puzzles, solutions = generate(size, blanks, count, seed)
    assert puzzles.shape == solutions.shape == (count, size, size)
    assert ((puzzles == 0).sum((1, 2)) == blanks).all()
    assert (solutions > 0).all()
    assert (puzzles == solutions * (puzzles > 0)).all()


def test_the_same_request_gives_the_same_puzzles_and_any_other_gives_others():
    puzzles, solutions = generate(6, 20, 50, seed=3, first=100)
    again, solutions_again = generate(6, 20, 50, seed=3, first=100)
    np.testing.assert_array_equal(again, puzzles)
    np.testing.assert_array_equal(solutions_again, solutions)
    for other in (generate(6, 20, 50, seed=4, first=100), generate(6, 20, 50, seed=3, first=150)):
        assert not np.isin(fingerprints(*other), fingerprints(puzzles, solutions)).any()


def test_rare_puzzles_are_searched_for_until_there_are_enough():
    puzzles, _ = generate(6, 26, 40, seed=1)
    assert ((puzzles == 0).sum((1, 2)) == 26).all()
    assert (count_solutions(puzzles) == 1).all()


@pytest.mark.parametrize(("size", "blanks"), [(9, 65), (9, 81), (6, 29), (4, 13)])
def test_more_blanks_than_a_puzzle_can_have_are_refused(size, blanks):
    with pytest.raises(DataError, match=f"{blanks} blanks. With more than") as refusal:
        generate(size, blanks, 1, seed=1)
    assert str(BLANKS[size]["hard"]) in refusal.value.hint


def test_a_search_that_finds_not_one_puzzle_gives_up(monkeypatch):
    monkeypatch.setattr(sudoku_puzzles, "_GRIDS_PER_BATCH", 64)  # with 4,096 it takes five seconds
    with pytest.raises(DataError, match="Not one of 64 grids"):
        generate(9, 64, 1, seed=1)


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from([4, 6]), share=st.floats(0, 1), num_wrong=st.integers(0, 2), seed=seeds)
def test_the_solver_counts_as_many_solutions_as_a_plain_one(size, share, num_wrong, seed):
    rng = np.random.default_rng(seed)
    grids = np.where(rng.random((8, size, size)) < share, 0, pattern_grid(size)).astype(np.int8)
    for _ in range(num_wrong):
        row, column = rng.integers(size, size=(2, 8))
        grids[np.arange(8), row, column] = rng.integers(1, size + 1, size=8)
    expected = [plain_count(grid.copy(), limit=5) if obeys_the_rules(grid) else 0 for grid in grids]
    solutions, counts = solve(grids)
    assert count_solutions(grids, limit=5).tolist() == expected
    assert counts.tolist() == np.minimum(expected, 2).tolist()
    for grid, solution, count in zip(grids, solutions, counts, strict=True):
        assert (solution > 0).all() == (count > 0)
        if count:
            assert obeys_the_rules(solution)
            assert (solution == grid)[grid > 0].all()


def test_the_solver_finds_every_complete_grid_of_size_four():
    # There are 288: 4! first rows, and 12 grids for each of them.
    empty = np.zeros((3, 4, 4), np.uint8)
    assert count_solutions(empty, limit=1000).tolist() == [288] * 3
    assert count_solutions(empty, limit=7).tolist() == [7] * 3


def test_many_empty_grids_do_not_fill_the_memory():
    solutions, counts = solve(np.zeros((1000, 9, 9), np.uint8))
    assert (counts == 2).all()
    assert all(obeys_the_rules(solution) for solution in solutions[:20])


def test_solving_nothing_finds_nothing():
    solutions, counts = solve(np.zeros((0, 9, 9), np.uint8))
    assert solutions.shape == (0, 9, 9)
    assert counts.shape == (0,)


@pytest.mark.parametrize("source", ["sudoku_extreme_train1k", "forum_hardest_1905_11+"])
def test_the_hardest_published_puzzles_are_solved(source):
    questions, answers = real_puzzles(source, 500)
    solutions, counts = solve(questions)
    assert (counts == 1).all()
    np.testing.assert_array_equal(solutions, answers)


@pytest.mark.parametrize(("size", "blanks"), LEVELS)
def test_symmetric_copies_have_the_same_fingerprint(size, blanks):
    rng = np.random.default_rng(size + blanks)
    puzzles, solutions = generate(size, blanks, 50, seed=2)
    for _ in range(10):
        copies = [symmetric_copy(*pair, rng) for pair in zip(puzzles, solutions, strict=True)]
        copied = [np.stack(grids) for grids in zip(*copies, strict=True)]
        np.testing.assert_array_equal(fingerprints(*copied), fingerprints(puzzles, solutions))


@pytest.mark.parametrize(("size", "blanks"), [(6, 16), (6, 22), (9, 3), (9, 36)])
def test_random_puzzles_have_different_fingerprints(size, blanks):
    assert len(np.unique(fingerprints(*generate(size, blanks, 2000, seed=1)))) == 2000


def test_puzzles_with_the_same_blanks_but_other_digits_have_different_fingerprints():
    puzzles, solutions = generate(9, 0, 200, seed=1)
    puzzles[:, 0, 0] = 0
    assert len(np.unique(fingerprints(puzzles, solutions))) == 200


@pytest.mark.parametrize(
    ("size", "cells", "message"),
    [
        (9, {(2, 0): 5, (2, 8): 5}, "row 3 has two 5s"),
        (9, {(0, 0): 2, (8, 0): 2}, "column 1 has two 2s"),
        (9, {(0, 3): 6, (2, 5): 6}, "the box at row 1, column 4 has two 6s"),
        (6, {(2, 3): 6, (3, 5): 6}, "the box at row 3, column 4 has two 6s"),
        (6, {(1, 0): 6, (2, 2): 6}, None),
        (4, {(0, 0): 1, (1, 1): 1}, "the box at row 1, column 1 has two 1s"),
        (4, {}, None),
    ],
)
def test_a_broken_rule_is_named_where_it_is_broken(size, cells, message):
    grid = np.zeros((size, size), np.int8)
    for cell, digit in cells.items():
        grid[cell] = digit
    assert contradiction(grid) == message


@given(size=sizes, share=st.floats(0, 1), seed=seeds)
def test_a_contradiction_is_reported_exactly_when_a_rule_is_broken(size, share, seed):
    rng = np.random.default_rng(seed)
    grid = np.where(rng.random((size, size)) < share, 0, pattern_grid(size)).astype(np.uint8)
    grid[tuple(rng.integers(size, size=2))] = rng.integers(1, size + 1)
    assert (contradiction(grid) is None) == obeys_the_rules(grid)
