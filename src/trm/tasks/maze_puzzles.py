"""Mazes by the thousand: make them, measure their distances, and find the path that counts as the answer.

A row of a maze is a word with one bit a cell, and the mazes lie along the last axis, so that a flood moves
one cell forward in thousands of mazes with a few operations on words. Random walls seldom leave a long way:
of mazes like those of Maze-Hard a few in ten thousand do, which is why making them has to be this fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Words = NDArray[Any]  # uint32 or uint64, (rows, mazes), bit c for column c

LARGEST = 40
# Of walls, drawn anew for every maze; fewer leave straight ways, and more leave none.
_DENSITIES = (0.3, 0.5)
# Down, left, right, up: of several shortest paths, the label takes at every cell the first of these.
MOVES = ((1, 0), (0, -1), (0, 1), (-1, 0))
_BATCH = 8192
_LOOK_EVERY = 4
_FRUITLESS = 3000  # batches in a row without a maze: there are none to be found
_FAR_CELLS = 64  # a maze with so many or more goals to choose from is always taken


def generate(
    size: int, least_distance: int, count: int, seed: list[int]
) -> tuple[BoolArray, IntArray, IntArray]:
    """Walls (count, size, size), and the cells (count, 2) of start and goal, at least so many moves apart.

    As if start and goal had been drawn anywhere until they were far enough apart: a maze is taken the more
    likely, the more goals it has (up to a limit that few mazes reach).
    """
    if size > LARGEST:
        raise DataError(f"Mazes have at most {LARGEST}x{LARGEST} cells; {size} were asked for")
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, size, least_distance])))
    found = list(_found(size, least_distance, count, rng))
    walls, starts, goals = (np.concatenate(part)[:count] for part in zip(*found, strict=True))
    return walls, starts, goals


def _found(
    size: int, least_distance: int, count: int, rng: np.random.Generator
) -> Iterator[tuple[BoolArray, IntArray, IntArray]]:
    total = fruitless = 0
    while total < count:
        walls, starts, far = _with_far_cells(size, least_distance, rng)
        num_far = far.sum((1, 2))
        chosen = rng.random(len(walls)) * min(_FAR_CELLS, size * size) < num_far
        walls, starts, far = walls[chosen], starts[chosen], far[chosen]
        if len(walls):
            yield walls, starts, _drawn_cells(far, rng)
        total += len(walls)
        fruitless = 0 if len(walls) else fruitless + 1
        if fruitless == _FRUITLESS:
            raise DataError(
                f"No {size}x{size} maze was found whose shortest path has {least_distance + 1} cells or more",
                hint="Ask for a shorter path or a larger maze.",
            )


def _with_far_cells(
    size: int, least_distance: int, rng: np.random.Generator
) -> tuple[BoolArray, IntArray, BoolArray]:
    """Mazes in which some cells are so far from the start, and which ones."""
    starts = rng.integers(0, size, (_BATCH, 2))
    open_cells, reached = _random_open(size, rng), _to_words(starts, size)
    open_cells |= reached
    going_on, edge = np.arange(_BATCH), reached.copy()
    for distance in range(1, least_distance):
        edge = _flood(edge, open_cells, reached)
        if distance % _LOOK_EVERY == 0:  # where nothing moves any more, no cell is far enough
            alive = np.asarray(edge.any(0))
            if alive.sum() < 0.75 * alive.size:
                edge, reached, open_cells = edge[:, alive], reached[:, alive], open_cells[:, alive]
                going_on = going_on[alive]
    before = reached.copy()
    while edge.any():
        edge = _flood(edge, open_cells, reached)
    far = _to_cells(reached & ~before, size)
    some = far.any((1, 2))
    return ~_to_cells(open_cells[:, some], size), starts[going_on][some], far[some]


def _word_type(size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if size <= 32 else np.uint64


def _random_open(size: int, rng: np.random.Generator) -> Words:
    """Each cell is open with the same chance in one maze, drawn in steps of 1/64: one random word for every
    digit of it decides all cells of a row at once."""
    kind = _word_type(size)
    lowest, highest = (round(64 * (1 - density)) for density in reversed(_DENSITIES))
    chances = rng.integers(lowest, highest + 1, _BATCH)
    words = np.zeros((size, _BATCH), kind)
    for digit in range(6):
        draws = rng.integers(0, np.iinfo(kind).max, words.shape, kind, endpoint=True)
        words = np.where(chances >> digit & 1, words | draws, words & draws)
    return np.asarray(words & kind((1 << size) - 1))


def _flood(edge: Words, open_cells: Words, reached: Words) -> Words:
    """One move forward: the new edge, which is put into `reached`."""
    one = edge.dtype.type(1)
    beside: Words = edge << one
    beside |= edge >> one
    beside[1:] |= edge[:-1]
    beside[:-1] |= edge[1:]
    beside &= open_cells
    beside &= ~reached
    reached |= beside
    return beside


def _to_words(cells: IntArray, size: int) -> Words:
    """(rows, mazes) with the one cell of every maze."""
    words = np.zeros((size, len(cells)), _word_type(size))
    words[cells[:, 0], np.arange(len(cells))] = words.dtype.type(1) << cells[:, 1].astype(words.dtype)
    return words


def _as_words(cells: BoolArray) -> Words:
    """(mazes, rows, columns) -> (rows, mazes)."""
    kind = _word_type(cells.shape[2])
    bits = kind(1) << np.arange(cells.shape[2], dtype=kind)
    return np.ascontiguousarray((cells * bits).sum(-1, dtype=kind).T)


def _to_cells(words: Words, size: int) -> BoolArray:
    bits = np.arange(size, dtype=words.dtype)
    return np.asarray(((words.T[:, :, None] >> bits) & words.dtype.type(1)).astype(bool))


def _marked(cells: IntArray, shape: tuple[int, ...]) -> BoolArray:
    marks = np.zeros(shape, dtype=bool)
    marks[np.arange(len(cells)), cells[:, 0], cells[:, 1]] = True
    return marks


def _drawn_cells(marks: BoolArray, rng: np.random.Generator) -> IntArray:
    """One of the marked cells of every maze."""
    flat = marks.reshape(len(marks), -1)
    chosen = np.where(flat, rng.random(flat.shape), -1.0).argmax(1)
    return np.stack(np.divmod(chosen, marks.shape[2]), axis=1)


def distances(walls: BoolArray, starts: IntArray) -> IntArray:
    """Moves from the start to every cell, -1 where no way leads."""
    size = walls.shape[1]
    open_cells, edge = _as_words(~walls), _to_words(starts, size)
    reached = edge.copy()
    found = np.full(walls.shape, -1, dtype=np.int64)
    distance = 0
    while edge.any():
        found[_to_cells(edge, size)] = distance
        edge = _flood(edge, open_cells, reached)
        distance += 1
    return found


def labelled_paths(walls: BoolArray, starts: IntArray, goals: IntArray) -> BoolArray:
    """The cells of one shortest path, without its ends: the one that a breadth-first search from the start
    finds if it looks down, left, right and up in this order. It is the first of all shortest paths in the
    order of their moves, so it can be walked: always the first move that comes nearer to the goal."""
    to_goal = np.pad(distances(walls, goals), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    mazes = np.arange(len(walls))
    here = starts.copy()
    left = to_goal[mazes, here[:, 0] + 1, here[:, 1] + 1]
    if (left < 0).any():
        raise DataError(f"No way leads from start to goal in maze {int(np.flatnonzero(left < 0)[0]) + 1}")
    on_path = np.zeros(walls.shape, dtype=bool)
    while (walking := left > 1).any():
        beside = here[:, None, :] + np.array(MOVES)  # (mazes, moves, 2)
        nearer = to_goal[mazes[:, None], beside[..., 0] + 1, beside[..., 1] + 1] == left[:, None] - 1
        there = beside[mazes, nearer.argmax(1)]
        here = np.where(walking[:, None], there, here)
        on_path[mazes[walking], here[walking, 0], here[walking, 1]] = True
        left = left - walking
    return on_path


def is_shortest_path(walls: BoolArray, starts: IntArray, goals: IntArray, on_path: BoolArray) -> BoolArray:
    """Any of the shortest paths will do: so many open cells that lead from start to goal must be one."""
    ends = _marked(starts, walls.shape) | _marked(goals, walls.shape)
    mazes = np.arange(len(walls))
    shortest = distances(walls, starts)[mazes, goals[:, 0], goals[:, 1]]
    along = distances(~(on_path | ends), starts)[mazes, goals[:, 0], goals[:, 1]]
    as_many = (on_path & ~ends).sum((1, 2)) == shortest - 1
    return np.asarray(as_many & (along == shortest) & ~(on_path & walls).any((1, 2)))
