"""Many Sudoku puzzles at a time: solve them, generate them, and recognise symmetric copies.

A cell is a 16-bit mask of the digits that are still possible, and the puzzles lie along the last axis, so one
NumPy operation advances thousands of puzzles. The other axes are bands, rows in a band, stacks and columns in
a stack: a row, a column or a box is then everything along two of the axes, for every size.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from trm.arrays import BoolArray, IntArray, WordArray

GridArray: TypeAlias = NDArray[np.int8 | np.uint8]  # (puzzles, size, size), 0 for a blank
MaskArray: TypeAlias = NDArray[np.uint16]  # (bands, rows in a band, stacks, columns in a stack, puzzles)
States: TypeAlias = tuple[MaskArray, IntArray]  # search states, and which puzzle each belongs to


def box_shape(size: int) -> tuple[int, int]:
    """Return rows and columns of a box: as square as possible, and never higher than wide."""
    rows = max(rows for rows in range(1, math.isqrt(size) + 1) if size % rows == 0)
    return rows, size // rows


BOX_SHAPES = {size: box_shape(size) for size in (4, 6, 9)}
BLANKS: dict[int, dict[str, int]] = {
    4: {"easy": 6, "medium": 8, "hard": 10},
    6: {"easy": 16, "medium": 20, "hard": 22},
    9: {"easy": 36, "medium": 45, "hard": 50},
}

# With more blanks no puzzle has one solution: proved for 4 and 9 (OEIS A198297), reported for 6, not checked
# here.
MOST_BLANKS = {4: 12, 6: 28, 9: 64}

_CELLS = (0, 1, 2, 3)
_UNITS = ((2, 3), (0, 1), (1, 3))  # the axes along which the cells of a row, a column, a box lie
_STATES_PER_CHUNK = 2048  # propagated together: 512 took twice as long, 4096 was not faster
_GRIDS_PER_BATCH = 4096  # whose digits are removed together
_NUM_CHOICES = np.array([mask.bit_count() if mask.bit_count() > 1 else 99 for mask in range(512)], np.uint8)
# Axes of a row, a column, a box, a band and a stack, with the salt of their hash: rows count as columns do.
_NEIGHBOURHOODS = {(2, 3): 1, (0, 1): 1, (1, 3): 2, (1, 2, 3): 3, (0, 1, 3): 3}


def contradiction(grid: GridArray) -> str | None:
    """Return the first rule that the digits of one grid break, in words, or None."""
    size = len(grid)
    box_rows, box_columns = BOX_SHAPES[size]
    units = [(f"row {row + 1}", grid[row]) for row in range(size)]
    units += [(f"column {column + 1}", grid[:, column]) for column in range(size)]
    for row, column in product(range(0, size, box_rows), range(0, size, box_columns)):
        box = grid[row : row + box_rows, column : column + box_columns]
        units.append((f"the box at row {row + 1}, column {column + 1}", box))
    for name, cells in units:
        repeated = np.flatnonzero(np.bincount(cells[cells > 0]) > 1)
        if repeated.size:
            return f"{name} has two {repeated[0]}s"
    return None


def count_solutions(grids: GridArray, limit: int = 2) -> IntArray:
    return _search(_to_masks(grids), limit, _random_numbers(0))[1]


def solve(grids: GridArray) -> tuple[GridArray, IntArray]:
    """Return a solution of each grid (all 0 if there is none), and their number: 0, 1, or 2 for several."""
    solutions, counts = _search(_to_masks(grids), 2, _random_numbers(0))
    return _to_grids(solutions), counts


def generate(size: int, blanks: int, count: int, seed: int, *, first: int = 0) -> tuple[GridArray, GridArray]:
    """Return `count` puzzles with one solution and exactly `blanks` blanks, and their solutions.

    The result depends on the arguments only; for one seed, each value of `first` draws different puzzles.
    """
    if blanks > MOST_BLANKS[size]:
        raise _too_many_blanks(
            size, blanks, f"With more than {MOST_BLANKS[size]}, no puzzle has only one solution."
        )
    rng = _random_numbers(seed, size, blanks, first)
    puzzles = solutions = np.zeros((0, size, size), np.uint8)
    fruitless = False
    while len(puzzles) < count:
        batch = _GRIDS_PER_BATCH if fruitless else min(max(count - len(puzzles), 64), _GRIDS_PER_BATCH)
        complete, _ = _search(_to_masks(np.zeros((batch, size, size), np.uint8)), 1, rng)
        emptied, reached = _remove_digits(complete, blanks, rng)
        fruitless = not reached.any()
        if fruitless and batch == _GRIDS_PER_BATCH:
            raise _too_many_blanks(size, blanks, f"Not one of {batch:,} grids has such a puzzle.")
        puzzles = np.concatenate([puzzles, _to_grids(emptied.compress(reached, -1))])
        solutions = np.concatenate([solutions, _to_grids(complete.compress(reached, -1))])
    return puzzles[:count], solutions[:count]


def fingerprints(puzzles: GridArray, solutions: GridArray) -> WordArray:
    """Return a number per puzzle that no symmetry of Sudoku changes.

    The symmetries rename the digits, reorder the bands, the stacks, the rows of a band or the columns of a
    stack, and exchange rows and columns. Copies always have equal numbers, so different numbers prove that
    two puzzles are not copies; equal numbers make it very likely that they are.

    The method is Weisfeiler-Leman: colour the cells as given or blank, then repeatedly mix each colour with
    the sums of the colours around it. Sums do not depend on order, rows count as columns do, and digits are
    used only to find the cells of the solution that hold the same one.
    """
    masks = _to_masks(puzzles)
    colours = (masks & (masks - 1) == 0).astype(np.uint64)
    digits_in_rows = solutions.transpose(1, 2, 0).astype(np.int64) - 1
    columns_of_digits = digits_in_rows.argsort(1)
    for _ in range(4):  # measured: 2 are too few, 3 distinguish as many puzzles as 8 do
        of_digits = np.take_along_axis(colours.reshape(digits_in_rows.shape), columns_of_digits, 1)
        totals = _mix(of_digits.sum(0, keepdims=True), 0)
        mixed = np.take_along_axis(totals, digits_in_rows, 1).reshape(colours.shape)
        for axes, kind in _NEIGHBOURHOODS.items():
            mixed += _mix(colours.sum(axes, keepdims=True), kind)
        colours = _mix(_mix(colours, 4) + mixed, 5)
    hashes: WordArray = colours.sum(_CELLS)
    return hashes


def _too_many_blanks(size: int, blanks: int, reason: str) -> DataError:
    return DataError(
        f"Cannot generate {size}x{size} puzzles with {blanks} blanks. {reason}",
        hint=f"Request fewer blanks; {BLANKS[size]['hard']} is fast.",
    )


def _random_numbers(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _to_masks(grids: GridArray) -> MaskArray:
    size = grids.shape[-1]
    rows, columns = BOX_SHAPES[size]
    masks = np.array([2**size - 1, *(1 << digit for digit in range(size))], np.uint16)
    shape = size // rows, rows, size // columns, columns, len(grids)
    return masks[np.ascontiguousarray(grids.transpose(1, 2, 0))].reshape(shape)


def _to_grids(masks: MaskArray) -> GridArray:
    """Return digits for cells with one candidate, and blanks for all others."""
    size = _size(masks)
    digits = np.zeros(2**size, np.uint8)
    digits[1 << np.arange(size)] = np.arange(1, size + 1)
    return np.ascontiguousarray(digits[masks].reshape(size, size, masks.shape[-1]).transpose(2, 0, 1))


def _size(cells: NDArray[np.generic]) -> int:
    return len(cells) * len(cells[0])


def _search(masks: MaskArray, limit: int, rng: np.random.Generator) -> States:
    """Return one solution of each puzzle, and how many it has, counted up to `limit`.

    The search is depth first: only a chunk of the newest states is processed at a time, which bounds memory.
    """
    counts = np.zeros(masks.shape[-1], np.int64)
    solutions = np.zeros_like(masks)
    parts = (slice(start, start + _STATES_PER_CHUNK) for start in range(0, len(counts), _STATES_PER_CHUNK))
    stack = [(masks[..., part], np.arange(len(counts))[part]) for part in parts]
    while stack:
        before, owners = _pop(stack, counts < limit)
        masks, possible = _propagate(before)
        unchanged = possible & (masks == before).all(_CELLS)
        solved = unchanged & (masks & (masks - 1) == 0).all(_CELLS)
        stuck = unchanged & ~solved
        unfinished = possible & ~solved
        np.add.at(counts, owners[solved], 1)
        solutions[..., owners[solved]] = masks.compress(solved, -1)
        if unfinished.any():
            stack.append((_guess(masks, np.flatnonzero(stuck), rng), owners[stuck]))
            stack.append((masks.compress(unfinished, -1), owners[unfinished]))
    return solutions, np.minimum(counts, limit)


def _pop(stack: list[States], is_unfinished: BoolArray) -> States:
    """Return up to a chunk of the newest states, without those of puzzles that are finished."""
    blocks = [stack.pop()]
    while stack and sum(len(owners) for _, owners in [*blocks, stack[-1]]) <= _STATES_PER_CHUNK:
        blocks.append(stack.pop())
    masks, owners = (np.concatenate(parts, -1) for parts in zip(*blocks, strict=True))
    # masks[..., unfinished] would put each puzzle's cells together in memory, which made the solver 5 times
    # slower.
    unfinished = is_unfinished[owners]
    return masks.compress(unfinished, -1), owners[unfinished]


def _propagate(masks: MaskArray) -> tuple[MaskArray, BoolArray]:
    """Apply one round of naked and hidden singles; return the masks and which states are still possible.

    Once every cell is decided the second result is exact: such a grid repeats no digit in any unit.
    """
    decided = masks * (masks & (masks - 1) == 0)
    seen = np.zeros_like(masks)
    only_here = np.zeros_like(masks)
    possible = np.ones(masks.shape[-1], np.bool_)
    for unit in _UNITS:
        digits = np.bitwise_or.reduce(decided, unit, keepdims=True)
        # The sum of some bits exceeds their union exactly when two cells hold the same digit.
        possible &= (decided.sum(unit, np.uint16, keepdims=True) == digits).all(_CELLS)
        seen |= digits
    masks = masks & ~seen | decided
    for unit in _UNITS:
        once, twice = _once_and_twice(masks, unit)
        possible &= (once == 2 ** _size(masks) - 1).all(_CELLS)
        only_here |= once & ~twice
    forced = masks & only_here
    return masks * (forced == 0) | forced, possible & masks.all(_CELLS)


def _once_and_twice(masks: MaskArray, unit: tuple[int, int]) -> tuple[MaskArray, MaskArray]:
    """Return the digits that are possible in at least one cell of each unit, and in at least two."""
    cells = np.moveaxis(masks, unit, (0, 1))
    once = np.zeros_like(cells[0, 0])
    twice = np.zeros_like(cells[0, 0])
    for index in np.ndindex(cells.shape[:2]):
        twice |= once & cells[index]
        once |= cells[index]
    return np.expand_dims(once, unit), np.expand_dims(twice, unit)


def _guess(masks: MaskArray, stuck: IntArray, rng: np.random.Generator) -> MaskArray:
    """Write a guess into a cell of each stuck state with the fewest candidates; return the alternatives.

    The cell (among equals) and the digit are random, which makes complete grids varied and leaves no order of
    guesses that a puzzle could defeat. On the hardest puzzles it is also faster than the first of each.
    """
    size = _size(masks)
    states = np.arange(len(stuck))
    cells = masks.reshape(size**2, masks.shape[-1])
    others = cells.take(stuck, 1)
    where = (_NUM_CHOICES[others] + rng.random(others.shape, np.float32)).argmin(0)
    bits = 1 << np.arange(size, dtype=np.uint16)
    is_candidate = others[where, states] & bits[:, None] > 0
    digits = bits[(is_candidate * (1 - rng.random(is_candidate.shape, np.float32))).argmax(0)]
    cells[where, stuck] = digits
    others[where, states] ^= digits
    return others.reshape(*masks.shape[:-1], len(stuck))


def _remove_digits(complete: MaskArray, blanks: int, rng: np.random.Generator) -> tuple[MaskArray, BoolArray]:
    """Blank cells in random order while the solution stays unique; return which grids reached `blanks`.

    One pass is enough: a cell that must stay now must also stay later, when there are fewer givens.
    """
    every_digit = 2 ** _size(complete) - 1
    num_cells = _size(complete) ** 2
    cells = complete.reshape(num_cells, complete.shape[-1]).copy()
    num_blanks = np.zeros(complete.shape[-1], np.int64)
    for step, where in enumerate(rng.random(cells.shape).argsort(0)):
        tried = np.flatnonzero((num_blanks < blanks) & (num_blanks + num_cells - step >= blanks))
        others = cells.take(tried, 1)
        others[where[tried], np.arange(len(tried))] ^= every_digit
        _, counts = _search(others.reshape(*complete.shape[:-1], len(tried)), 1, rng)
        blanked = tried[counts == 0]
        cells[where[blanked], blanked] = every_digit
        num_blanks[blanked] += 1
    return cells.reshape(complete.shape), num_blanks == blanks


def _mix(values: WordArray, salt: int) -> WordArray:
    """Apply the finaliser of SplitMix64: every bit of the result depends on every bit of the value."""
    values = values + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
