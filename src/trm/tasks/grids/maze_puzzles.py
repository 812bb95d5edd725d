"""Many mazes at a time: generate them, measure distances, and find the path that is the label.

A row of a maze is one machine word with one bit per cell, and the mazes lie along the last axis. One step of
a flood fill in thousands of mazes is therefore a few operations on words. Speed matters because random walls
seldom leave a long path: of mazes like those of Maze-Hard, a few in ten thousand do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from trm.arrays import BoolArray, IntArray

Words: TypeAlias = NDArray[np.unsignedinteger]  # uint32 or uint64, (rows, mazes), bit c for column c
Mazes: TypeAlias = tuple[BoolArray, IntArray, IntArray]  # walls (n, size, size), starts (n, 2), goals (n, 2)

LARGEST = 40
# Share of walls, drawn for every maze. Fewer walls leave straight paths, and more leave no path.
_MIN_DENSITY, _MAX_DENSITY = 0.3, 0.5
# Down, left, right, up: of several shortest paths, the label takes at every cell the first of these.
MOVES = ((1, 0), (0, -1), (0, 1), (-1, 0))
_MAZES_PER_BATCH = 8192
_CHECK_EVERY_MOVES = 4
_MIN_ACTIVE_SHARE = 0.75  # of mazes; below it the finished ones are removed from the arrays
_MAX_FRUITLESS_BATCHES = 3000  # batches in a row without a maze, after which generation gives up
_MAX_COUNTED_GOALS = 64  # a maze with this many possible goals is always taken


def generate(size: int, least_distance: int, count: int, seed: list[int]) -> Mazes:
    """Return mazes whose start and goal are at least this many moves apart.

    The distribution is as if start and goal had been drawn anywhere until they were far enough apart: the
    probability that a maze is taken grows with the number of its possible goals, up to a limit that few mazes
    reach.
    """
    if size > LARGEST:
        raise DataError(f"Mazes have at most {LARGEST}x{LARGEST} cells; {size}x{size} were requested")
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, size, least_distance])))
    batches = list(_batches(size, least_distance, count, rng))
    walls, starts, goals = (np.concatenate(part)[:count] for part in zip(*batches, strict=True))
    return walls, starts, goals


def _batches(size: int, least_distance: int, count: int, rng: np.random.Generator) -> Iterator[Mazes]:
    total = 0
    fruitless = 0
    while total < count:
        walls, starts, far = _with_far_cells(size, least_distance, rng)
        num_far = far.sum((1, 2))
        chosen = rng.random(len(walls)) * min(_MAX_COUNTED_GOALS, size * size) < num_far
        num_chosen = int(chosen.sum())
        if num_chosen:
            yield walls[chosen], starts[chosen], _draw_cells(far[chosen], rng)
        total += num_chosen
        fruitless = 0 if num_chosen else fruitless + 1
        if fruitless == _MAX_FRUITLESS_BATCHES:
            raise DataError(
                f"No {size}x{size} maze was found whose shortest path has {least_distance + 1} cells or more",
                hint="Request a shorter path or a larger maze.",
            )


def _with_far_cells(
    size: int, least_distance: int, rng: np.random.Generator
) -> tuple[BoolArray, IntArray, BoolArray]:
    """Return walls and starts of mazes that have cells this far from the start, and these cells."""
    starts = rng.integers(0, size, (_MAZES_PER_BATCH, 2))
    open_cells = _random_open(size, rng)
    reached = _to_words(starts, size)
    open_cells |= reached
    active = np.arange(_MAZES_PER_BATCH)
    edge = reached.copy()
    for distance in range(1, least_distance):
        edge = _flood(edge, open_cells, reached)
        if distance % _CHECK_EVERY_MOVES == 0:  # a flood that has ended reaches no cell that is far enough
            moving = np.asarray(edge.any(0))
            if moving.sum() < _MIN_ACTIVE_SHARE * moving.size:
                edge = edge[:, moving]
                reached = reached[:, moving]
                open_cells = open_cells[:, moving]
                active = active[moving]
    before = reached.copy()
    while edge.any():
        edge = _flood(edge, open_cells, reached)
    far = _to_cells(reached & ~before, size)
    has_far = far.any((1, 2))
    return ~_to_cells(open_cells[:, has_far], size), starts[active][has_far], far[has_far]


def _word_type(size: int) -> type[np.unsignedinteger]:
    return np.uint32 if size <= 32 else np.uint64


def _random_open(size: int, rng: np.random.Generator) -> Words:
    """Draw which cells are open. All cells of a maze have the same probability, a multiple of 1/64.

    One random word per binary digit of the probability decides all cells of a row together.
    """
    dtype = _word_type(size)
    lowest = round(64 * (1 - _MAX_DENSITY))
    highest = round(64 * (1 - _MIN_DENSITY))
    chances = rng.integers(lowest, highest + 1, _MAZES_PER_BATCH)
    words = np.zeros((size, _MAZES_PER_BATCH), dtype)
    for digit in range(6):
        draws = rng.integers(0, np.iinfo(dtype).max, words.shape, dtype, endpoint=True)
        words = np.where(chances >> digit & 1, words | draws, words & draws)
    return np.asarray(words & dtype((1 << size) - 1))


def _flood(edge: Words, open_cells: Words, reached: Words) -> Words:
    """Move one cell forward: add the new edge to `reached` in place, and return it."""
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
    """Return words (rows, mazes) with one cell per maze, from its row and column (mazes, 2)."""
    words = np.zeros((size, len(cells)), _word_type(size))
    words[cells[:, 0], np.arange(len(cells))] = words.dtype.type(1) << cells[:, 1].astype(words.dtype)
    return words


def _as_words(cells: BoolArray) -> Words:
    """(mazes, rows, columns) -> (rows, mazes)."""
    dtype = _word_type(cells.shape[2])
    bits = dtype(1) << np.arange(cells.shape[2], dtype=dtype)
    return np.ascontiguousarray((cells * bits).sum(-1, dtype=dtype).T)


def _to_cells(words: Words, size: int) -> BoolArray:
    """(rows, mazes) -> (mazes, rows, columns)."""
    bits = np.arange(size, dtype=words.dtype)
    return np.asarray(((words.T[:, :, None] >> bits) & words.dtype.type(1)).astype(bool))


def _marked(cells: IntArray, shape: tuple[int, ...]) -> BoolArray:
    marks = np.zeros(shape, dtype=bool)
    marks[np.arange(len(cells)), cells[:, 0], cells[:, 1]] = True
    return marks


def _draw_cells(marks: BoolArray, rng: np.random.Generator) -> IntArray:
    """Draw one of the marked cells of every maze."""
    flat = marks.reshape(len(marks), -1)
    chosen = np.where(flat, rng.random(flat.shape), -1.0).argmax(1)
    return np.stack(np.divmod(chosen, marks.shape[2]), axis=1)


def distances(walls: BoolArray, starts: IntArray) -> IntArray:
    """Return the moves from the start to every cell, -1 where no path leads."""
    size = walls.shape[1]
    open_cells = _as_words(~walls)
    edge = _to_words(starts, size)
    reached = edge.copy()
    found = np.full(walls.shape, -1, dtype=np.int64)
    distance = 0
    while edge.any():
        found[_to_cells(edge, size)] = distance
        edge = _flood(edge, open_cells, reached)
        distance += 1
    return found


def labelled_paths(walls: BoolArray, starts: IntArray, goals: IntArray) -> BoolArray:
    """Return the cells of one shortest path per maze, without its ends.

    It is the path that a breadth-first search from the start finds with the neighbours in the order down,
    left, right, up. That is the first of all shortest paths in the order of their moves, so no search is
    needed: walk from the start, always with the first move that comes nearer to the goal.
    """
    to_goal = np.pad(distances(walls, goals), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    mazes = np.arange(len(walls))
    here = starts.copy()
    remaining = to_goal[mazes, here[:, 0] + 1, here[:, 1] + 1]
    blocked = np.flatnonzero(remaining < 0)
    if len(blocked):
        raise DataError(f"No path leads from start to goal in maze {int(blocked[0]) + 1}")
    on_path = np.zeros(walls.shape, dtype=bool)
    while (walking := remaining > 1).any():
        beside = here[:, None, :] + np.array(MOVES)  # (mazes, moves, 2)
        distance_beside = to_goal[mazes[:, None], beside[..., 0] + 1, beside[..., 1] + 1]
        nearer = distance_beside == remaining[:, None] - 1
        there = beside[mazes, nearer.argmax(1)]
        here = np.where(walking[:, None], there, here)
        on_path[mazes[walking], here[walking, 0], here[walking, 1]] = True
        remaining = remaining - walking
    return on_path


def is_shortest_path(walls: BoolArray, starts: IntArray, goals: IntArray, on_path: BoolArray) -> BoolArray:
    """Return which mazes have a shortest path marked; any of the shortest paths is right.

    As many open cells as a shortest path has, which connect start and goal, must be one.
    """
    ends = _marked(starts, walls.shape) | _marked(goals, walls.shape)
    mazes = np.arange(len(walls))
    shortest = distances(walls, starts)[mazes, goals[:, 0], goals[:, 1]]
    along = distances(~(on_path | ends), starts)[mazes, goals[:, 0], goals[:, 1]]
    right_number = (on_path & ~ends).sum((1, 2)) == shortest - 1
    is_open = ~(on_path & walls).any((1, 2))
    return np.asarray(right_number & (along == shortest) & is_open)
