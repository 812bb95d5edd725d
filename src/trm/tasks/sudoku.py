"""Sudoku as a task: puzzles generated or read from a file, their symmetries, and grids a person can read.

Tokens are those of the public code: 0 padding, 1 blank, d + 1 for digit d. Train and test never share a
puzzle, not even a symmetric copy: `fingerprints` are equal for all copies of a puzzle, and decide the side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from macbook_optimization.errors import DataError
from trm.config import Count, CountOrZero, Section, parse_section
from trm.tasks import sudoku_puzzles as puzzles
from trm.tasks.base import IntArray, Progress, SplitArrays, TaskShape, write_dataset
from trm.tasks.grids import Row, read_rows

Grids = puzzles.GridArray
_CHUNK = 1000
_FRUITLESS_CHUNKS = 20  # so many in a row without a new puzzle: there are no more to be found


class BuildOptions(Section):
    size: Literal[4, 6, 9] = 9
    difficulty: Literal["easy", "medium", "hard"] = "hard"
    blanks: Count | None = None  # instead of a named difficulty
    train_blanks: Count | None = None  # of training puzzles, if they are to be harder or easier
    train: Count | None = None  # default 2,000; from a file, all that are not in the test set
    test: Count = 256
    seed: CountOrZero = 0
    file: Path | None = Field(None, alias="from")
    source: str | None = None  # of the file's rows, those with this `source`
    test_source: str | None = None  # test puzzles from these rows instead

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.file is None and (self.source or self.test_source):
            raise ValueError("source and test_source choose rows of a file, so they need `from`")
        if self.file is not None and self.train_blanks:
            raise ValueError("train_blanks is for generated puzzles, not for those `from` a file")
        return self

    @property
    def num_blanks(self) -> int:
        return self.blanks or puzzles.BLANKS[self.size][self.difficulty]


@dataclass(frozen=True, slots=True)
class Symmetry:
    """One symmetry a puzzle: transpose, then take rows and columns in this order, then rename digits."""

    transpose: NDArray[np.bool_]  # (B,)
    rows: IntArray  # (B, n)
    columns: IntArray  # (B, n)
    digits: IntArray  # (B, n + 2): the new token of every token

    def apply(self, grids: IntArray) -> IntArray:
        swapped = np.where(self.transpose[:, None, None], grids.transpose(0, 2, 1), grids)
        moved = np.take_along_axis(swapped, self.rows[:, :, None], axis=1)
        moved = np.take_along_axis(moved, self.columns[:, None, :], axis=2)
        flat = moved.reshape(len(moved), -1)
        renamed = np.take_along_axis(self.digits, np.maximum(flat, 0), axis=1)
        return np.where(flat < 0, flat, renamed).reshape(grids.shape)  # ignored labels stay ignored

    def inverse(self) -> Symmetry:
        rows, columns = np.argsort(self.rows, axis=1), np.argsort(self.columns, axis=1)
        across = self.transpose[:, None]
        return Symmetry(
            transpose=self.transpose,
            rows=np.where(across, columns, rows),
            columns=np.where(across, rows, columns),
            digits=np.argsort(self.digits, axis=1),
        )


def draw_symmetry(size: int, draws: NDArray[np.float64]) -> Symmetry:
    """The symmetry that a row of numbers from [0, 1) stands for; every one is equally likely."""
    box_rows, box_columns = puzzles.BOX_SHAPES[size]
    bands, in_band, stacks, in_stack, digits, flip = np.split(
        draws[:, : 5 * 9 + 1], [9, 18, 27, 36, 45], axis=1
    )
    names = np.argsort(digits[:, :size], axis=1) + 2
    fixed = np.broadcast_to(np.arange(2), (len(draws), 2))
    return Symmetry(
        transpose=(flip[:, 0] < 0.5) & (box_rows == box_columns),
        rows=_block_order(bands[:, : size // box_rows], in_band[:, :size], box_rows),
        columns=_block_order(stacks[:, : size // box_columns], in_stack[:, :size], box_columns),
        digits=np.concatenate((fixed, names), axis=1),
    )


def _block_order(blocks: NDArray[np.float64], lines: NDArray[np.float64], block_size: int) -> IntArray:
    """Lines in an order that keeps blocks together: by the block's rank, and inside it by the line's draw."""
    ranks = np.argsort(np.argsort(blocks, axis=1), axis=1)
    return np.argsort(np.repeat(ranks, block_size, axis=1) + lines, axis=1)


class SudokuTask:
    name = "sudoku"
    num_draws = 46

    def shape(self, options: Mapping[str, Any]) -> TaskShape:
        size = parse_section(BuildOptions, options, "data.build").size
        return TaskShape(size * size, size + 2, size + 2, 1)

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress) -> None:
        asked = parse_section(BuildOptions, options, "data.build")
        pairs = _from_file(asked, progress) if asked.file else _generated(asked, progress)
        shape = self.shape(options)
        splits = {
            name: SplitArrays(_tokens(questions), _tokens(answers), shape)
            for name, (questions, answers) in pairs.items()
        }
        made_by = {"task": self.name, "options": asked.model_dump(mode="json", by_alias=True)}
        write_dataset(directory, splits, made_by)

    def check(self, shape: TaskShape) -> None:
        size = _size_of(shape.seq_len)
        if (shape.vocab_size, shape.output_vocab_size) != (size + 2, size + 2):
            raise DataError(f"A {size}x{size} Sudoku has {size + 2} tokens; this set has {shape.vocab_size}")

    def augment(
        self, inputs: IntArray, labels: IntArray, draws: NDArray[np.float64]
    ) -> tuple[IntArray, IntArray]:
        size = _size_of(inputs.shape[1])
        symmetry = draw_symmetry(size, draws)
        grids = (array.reshape(-1, size, size) for array in (inputs, labels))
        question, answer = (symmetry.apply(grid).reshape(inputs.shape) for grid in grids)
        return question, answer

    def encode(self, text: str, shape: TaskShape) -> IntArray:
        grid = parse_puzzle(text, _size_of(shape.seq_len))
        return (grid.astype(np.int64) + 1).reshape(-1)

    def decode(self, tokens: IntArray) -> str:
        return "".join(str(token - 1) if token > 1 else "." for token in tokens)

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        size = _size_of(len(question))
        box_rows, box_columns = puzzles.BOX_SHAPES[size]
        cells = [
            _cell(
                int(question[i]) - 1, int(answer[i]) - 1, before is not None and before[i] != answer[i], color
            )
            for i in range(size * size)
        ]
        rule = "+".join(["-" * (3 * box_columns + 1)] * (size // box_columns))
        lines = []
        for row in range(size):
            if row and row % box_rows == 0:
                lines.append(rule)
            line = cells[row * size : (row + 1) * size]
            stacks = [line[i : i + box_columns] for i in range(0, size, box_columns)]
            lines.append(" |".join("".join(stack) for stack in stacks))
        return "\n".join(lines)

    def legend(self, changes: bool, color: bool) -> str:
        given, changed = ("bold", "green") if color else ("in brackets", "starred")
        return f"given digits are {given}" + (f", changes {changed}" if changes else "")

    def judge(self, question: IntArray, answer: IntArray) -> str | None:
        size = _size_of(len(question))
        changed = np.flatnonzero((question > 1) & (question != answer))
        if len(changed):
            row, column = divmod(int(changed[0]), size)
            return f"the given digit at row {row + 1}, column {column + 1} was changed"
        empty = np.flatnonzero(answer < 2)
        if len(empty):
            row, column = divmod(int(empty[0]), size)
            return f"row {row + 1}, column {column + 1} is empty"
        return puzzles.contradiction((answer - 1).reshape(size, size).astype(np.int8))


TASK = SudokuTask()


def _cell(given: int, digit: int, changed: bool, color: bool) -> str:
    symbol = str(digit) if digit > 0 else "."
    if given > 0 and given != digit:  # an answer that does not even keep what was given
        return f"!{symbol} "
    if color:
        style = "\033[1m" if given > 0 else "\033[32m" if changed else ""
        return f" {style}{symbol}\033[0m " if style else f" {symbol} "
    return f"[{symbol}]" if given > 0 else f" {symbol}*" if changed else f" {symbol} "


def parse_puzzle(text: str, size: int) -> Grids:
    """A puzzle as people write it: one character a cell, `.` or `0` for blanks, white space ignored."""
    cells = "".join(text.split())
    if len(cells) != size * size:
        raise DataError(
            f"A {size}x{size} puzzle has {size * size} cells; this one has {len(cells)}",
            hint="Write one character a cell, row by row, with . or 0 for blanks.",
        )
    wrong = sorted(set(cells) - set(".0123456789"[: size + 2]))
    if wrong:
        raise DataError(
            f"{', '.join(map(repr, wrong))} cannot stand in a {size}x{size} puzzle",
            hint=f"Use the digits 1 to {size}, and . or 0 for blanks.",
        )
    grid = np.array([0 if c == "." else int(c) for c in cells], dtype=np.int8).reshape(size, size)
    problem = puzzles.contradiction(grid)
    if problem:
        raise DataError(f"The puzzle contradicts itself: {problem}")
    return grid


def _size_of(seq_len: int) -> int:
    for size in puzzles.BOX_SHAPES:
        if size * size == seq_len:
            return size
    raise DataError(f"{seq_len} cells are not a Sudoku of a size known here (4x4, 6x6 or 9x9)")


def _tokens(grids: Grids) -> NDArray[np.uint8]:
    return (grids.reshape(len(grids), -1) + 1).astype(np.uint8)


Pairs = tuple[Grids, Grids]  # questions and their answers


def _generated(asked: BuildOptions, progress: Progress) -> dict[str, Pairs]:
    train, test = {"train": asked.train or 2000}, {"test": asked.test}
    if asked.train_blanks in (None, asked.num_blanks):
        return _distinct(asked, asked.num_blanks, {**train, **test}, progress)
    # Copies of a puzzle have as many blanks as it has, so the sides share none.
    assert asked.train_blanks is not None
    return {
        **_distinct(asked, asked.train_blanks, train, progress),
        **_distinct(asked, asked.num_blanks, test, progress),
    }


def _distinct(
    asked: BuildOptions, blanks: int, wanted: dict[str, int], progress: Progress
) -> dict[str, Pairs]:
    """The fingerprint alone decides between train and test, so no order of generation can mix them."""
    total = sum(wanted.values())
    kept: dict[str, dict[bytes, tuple[Grids, Grids]]] = {side: {} for side in wanted}
    fruitless = 0
    share = min(max(asked.test / total, 0.05), 0.95)  # neither side waits for a rare fingerprint
    for questions, answers in _endless(asked, blanks, min(_CHUNK, max(total, 64))):
        before = sum(map(len, kept.values()))
        marks = puzzles.fingerprints(questions, answers) < np.uint64(share * 2**64)
        for question, answer, is_test in zip(questions, answers, marks, strict=True):
            side = ("test" if is_test else "train") if len(wanted) > 1 else next(iter(wanted))
            if len(kept[side]) < wanted[side]:
                kept[side].setdefault(question.tobytes(), (question, answer))
        done = sum(map(len, kept.values()))
        progress(f"generating puzzles with {blanks} blanks", done, total)
        if done == total:
            break
        fruitless = fruitless + 1 if done == before else 0
        if fruitless == _FRUITLESS_CHUNKS:
            found = " and ".join(f"{len(pairs)} for {side}" for side, pairs in kept.items())
            raise DataError(
                f"Only {found} of the puzzles of size {asked.size} with {blanks} blanks were found; "
                f"{' and '.join(map(str, wanted.values()))} were asked for",
                hint="Ask for fewer puzzles, another number of blanks, or a larger size.",
            )
    return {side: _stack(list(pairs.values())) for side, pairs in kept.items()}


def _endless(asked: BuildOptions, blanks: int, chunk: int) -> Iterator[Pairs]:
    first = 0
    while True:
        yield puzzles.generate(asked.size, blanks, chunk, asked.seed, first=first)
        first += chunk


def _stack(pairs: list[tuple[Grids, Grids]]) -> Pairs:
    questions, answers = zip(*pairs, strict=True)
    return np.stack(questions), np.stack(answers)


def _from_file(asked: BuildOptions, progress: Progress) -> dict[str, Pairs]:
    assert asked.file is not None
    rows = read_rows(asked.file)
    order = np.random.Generator(np.random.Philox(asked.seed)).permutation(len(rows))
    ours = [rows[i] for i in order if asked.source in (None, rows[i].source)]
    others = [rows[i] for i in order if asked.test_source == rows[i].source] if asked.test_source else None
    num_train = asked.train or len(ours) - (asked.test if others is None else 0)
    num_test_rows = len(ours) - num_train if others is None else len(others)
    if num_train < 1 or num_train > len(ours) or num_test_rows < asked.test:
        wanted = f"{asked.train} for training" if asked.train else "at least one for training"
        sources = sorted({row.source for row in rows if row.source})
        raise DataError(
            f"{asked.file} has {len(ours)} puzzles"
            + ("" if others is None else f" for training and {len(others)} for testing")
            + f"; {wanted} and {asked.test} for testing were asked for",
            hint="Ask for fewer with --train and --test."
            + (f" Sources in the file: {', '.join(sources)}" if sources else ""),
        )
    train = _verified(ours[:num_train], asked, progress)
    test = _unlike(train, ours[num_train:] if others is None else others, asked, progress)
    return {"train": train, "test": test}


def _unlike(train: Pairs, rows: list[Row], asked: BuildOptions, progress: Progress) -> Pairs:
    """The first rows that are no symmetric copy of a training puzzle."""
    seen = puzzles.fingerprints(*train)
    kept: list[tuple[Grids, Grids]] = []
    chunk = min(_CHUNK, 2 * asked.test)  # few copies are expected, so mostly the first is enough
    for start in range(0, len(rows), chunk):
        pairs = _verified(rows[start : start + chunk], asked, progress)
        new = ~np.isin(puzzles.fingerprints(*pairs), seen)
        kept += list(zip(pairs[0][new], pairs[1][new], strict=True))
        if len(kept) >= asked.test:
            return _stack(kept[: asked.test])
    raise DataError(
        f"Only {len(kept)} of the {len(rows)} test puzzles in {asked.file} differ from every training "
        f"puzzle; {asked.test} were asked for",
        hint="The others are symmetric copies: digits renamed, rows or columns swapped.",
    )


def _verified(rows: list[Row], asked: BuildOptions, progress: Progress) -> Pairs:
    """Parsed, and each with exactly one solution: the stated one, where one is stated."""
    problems: list[str] = []
    rows = sorted(rows, key=lambda row: row.line)
    grids = [_parsed(row, row.question, asked.size, problems) for row in rows]
    _raise_if(problems, asked)
    questions = np.stack([grid for grid in grids if grid is not None])
    solved = []
    for start in range(0, len(rows), _CHUNK):
        progress("checking puzzles", start, len(rows))
        solved.append(puzzles.solve(questions[start : start + _CHUNK]))
    progress("checking puzzles", len(rows), len(rows))
    answers = np.concatenate([solutions for solutions, _ in solved])
    counts = np.concatenate([count for _, count in solved])
    for row, answer, count in zip(rows, answers, counts, strict=True):
        if count != 1:
            problems.append(
                f"line {row.line}: the puzzle has {'no' if count == 0 else 'more than one'} solution"
            )
        elif row.answer is not None:
            stated = _parsed(row, row.answer, asked.size, problems)
            if stated is not None and (stated != answer).any():
                problems.append(f"line {row.line}: the stated answer is not the solution")
    _raise_if(problems, asked)
    return questions, answers


def _parsed(row: Row, text: str, size: int, problems: list[str]) -> Grids | None:
    try:
        return parse_puzzle(text, size)
    except DataError as error:
        problems.append(f"line {row.line}: {error}")
        return None


def _raise_if(problems: list[str], asked: BuildOptions) -> None:
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        shown = "\n  ".join(problems[:5]) + more
        raise DataError(
            f"{asked.file}: {shown}",
            hint=f"These are read as {asked.size}x{asked.size}; nothing was written.",
        )
