"""The tables of an evaluation for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from macbook_optimization.terminal_text import one_line
from macbook_optimization.units import counted
from trm.mail.evaluation import ColumnResult, Evaluation
from trm.mail.model import BASELINE, LINEAR, RECURSIVE

_WIDTH = 79
_MODEL_WIDTH = 21
_NAME_WIDTH = 28
_MATRIX_NAME_WIDTH = 16
_LONGEST_HEAD = 7  # letters of a category above a column
_SHORT = {LINEAR: "linear", RECURSIVE: "recursive", BASELINE: "LinearSVC"}  # above narrow columns
_NUM_PAIRS = 15  # of a list that stands for a large matrix


def as_text(evaluation: Evaluation) -> str:
    main = evaluation.main
    parts = [_summary(evaluation), _categories(main)]
    if len(evaluation.columns) > 1:
        parts.append(_side_by_side(evaluation))
    parts.append(_confusion(main, evaluation.categories))
    return "\n\n".join("\n".join(part) for part in parts)


def _summary(evaluation: Evaluation) -> Iterator[str]:
    heads = f"{'accuracy':>10}{'macro-F1':>10}{'decided':>9}{'wrong of them':>15}{'calib. error':>14}"
    yield f"{counted(evaluation.messages, 'message'):{_MODEL_WIDTH}}{heads}"
    for column in evaluation.columns:
        decided, error, calibration = (
            "-" if value is None else f"{value:.1%}"
            for value in (column.decided, column.error_of_decided, column.calibration_error)
        )
        scores = f"{column.accuracy:>10.1%}{column.macro_f1:>10.3f}"
        yield f"{_cut(column.name, _MODEL_WIDTH)}{scores}{decided:>9}{error:>15}{calibration:>14}"


def _categories(column: ColumnResult) -> Iterator[str]:
    heads = "".join(f"{name:>11}" for name in ("number", "precision", "recall", "F1"))
    yield f"{_cut(f'category ({column.name})', _NAME_WIDTH)}{heads}"
    for each in column.categories:
        values = (each.precision, each.recall, each.f1)
        scores = "".join(f"{value:>11.3f}" if each.number else f"{'-':>11}" for value in values)
        yield f"{_cut(each.name, _NAME_WIDTH)}{each.number:>11,}{scores}"


def _side_by_side(evaluation: Evaluation) -> Iterator[str]:
    """Give the F1 of every column."""
    width = min(_MODEL_WIDTH, (_WIDTH - _NAME_WIDTH) // len(evaluation.columns))
    heads = [_cut(_SHORT.get(column.name, column.name), width - 1).rstrip() for column in evaluation.columns]
    yield f"{'F1':{_NAME_WIDTH}}{''.join(f'{head:>{width}}' for head in heads)}"
    for place, name in enumerate(evaluation.categories):
        found = [column.categories[place] for column in evaluation.columns]
        values = [f"{each.f1:.3f}" if each.number else "-" for each in found]
        yield f"{_cut(name, _NAME_WIDTH)}{''.join(f'{value:>{width}}' for value in values)}"


def _confusion(column: ColumnResult, categories: Sequence[str]) -> Iterator[str]:
    """Show the matrix, or the most frequent confusions where it is wider than a terminal."""
    names = [one_line(name) for name in categories]
    numbers = [str(number) for number in range(1, len(names) + 1)]
    numbered = [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]
    digits = len(f"{max(map(max, column.confusion))}")
    for titles, rows in (
        ([_cut(name, _LONGEST_HEAD).rstrip() for name in names], names),
        (numbers, numbered),
    ):
        cell = 2 + max(digits, *map(cell_len, titles))
        width = min(_MATRIX_NAME_WIDTH, max(map(cell_len, rows)))
        is_clear = len(set(titles)) == len(titles)
        if is_clear and width + cell * len(titles) <= _WIDTH:
            return _matrix(column.confusion, [_cut(name, width) for name in rows], titles, cell)
    return _pairs(column, categories)


def _matrix(confusion: list[list[int]], names: list[str], titles: list[str], cell: int) -> Iterator[str]:
    yield "Confusion: a row per category, a column per answer"
    blank = " " * cell_len(names[0])
    yield blank + "".join(" " * (cell - cell_len(title)) + title for title in titles)
    for name, row in zip(names, confusion, strict=True):
        yield name + "".join(f"{value or '.':>{cell}}" for value in row)


def _pairs(column: ColumnResult, categories: Sequence[str]) -> Iterator[str]:
    pairs = [
        (count, categories[row], categories[answer], sum(counts))
        for row, counts in enumerate(column.confusion)
        for answer, count in enumerate(counts)
        if count and answer != row
    ]
    pairs.sort(key=lambda pair: -pair[0])
    yield f"The most frequent of {counted(len(pairs), 'confusion')}; --html and --json have the matrix:"
    for count, name, answer, total in pairs[:_NUM_PAIRS]:
        yield f"{count:>8,} of {total:<7,} {_cut(name, 24)} answered {_cut(answer, 26).rstrip()}"


def _cut(name: str, width: int) -> str:
    """Return a name that takes exactly this width."""
    clean = one_line(name)
    return set_cell_size(clean, width) if cell_len(clean) <= width else set_cell_size(clean, width - 1) + "~"
