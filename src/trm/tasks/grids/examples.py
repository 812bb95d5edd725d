"""Examples of a grid task, generated until there are enough of them.

The fingerprint of an example decides its split. Therefore no example is in both splits, and neither is a copy
that the task recognises as one. The number of processes does not change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from macbook_optimization.worker_pool import ordered
from trm.arrays import BoolArray, IntArray, WordArray
from trm.tasks.base import Progress
from trm.tasks.grids.options import OptionsT

if TYPE_CHECKING:
    from trm.tasks.grids.task import GridTask

Grids: TypeAlias = NDArray[np.int8 | np.uint8]  # (n, size, size) of symbols
Pairs: TypeAlias = tuple[Grids, Grids]  # questions and their answers

_MAX_FRUITLESS_CHUNKS = 20  # chunks in a row without a new example, after which generation gives up
_MIN_CHUNK_SIZE = 64
_MIN_TEST_SHARE, _MAX_TEST_SHARE = 0.05, 0.95  # of fingerprints, so that no split waits for rare ones


@dataclass(frozen=True, slots=True)
class Examples:
    questions: Grids
    answers: Grids
    fingerprints: WordArray
    difficulties: IntArray

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, rows: slice | IntArray | BoolArray) -> Examples:
        return Examples(
            questions=self.questions[rows],
            answers=self.answers[rows],
            fingerprints=self.fingerprints[rows],
            difficulties=self.difficulties[rows],
        )


def join(parts: Sequence[Examples]) -> Examples:
    return Examples(
        questions=np.concatenate([part.questions for part in parts]),
        answers=np.concatenate([part.answers for part in parts]),
        fingerprints=np.concatenate([part.fingerprints for part in parts]),
        difficulties=np.concatenate([part.difficulties for part in parts]),
    )


def examples_of(task: GridTask[OptionsT], questions: Grids, answers: Grids) -> Examples:
    """Return pairs with the fingerprints and difficulties that the task assigns to them."""
    return Examples(
        questions=questions,
        answers=answers,
        fingerprints=task.fingerprints(questions, answers),
        difficulties=task.difficulties(questions, answers),
    )


def generate_splits(
    task: GridTask[OptionsT], options: OptionsT, progress: Progress, jobs: int
) -> dict[str, Examples]:
    splits: dict[str, Examples] = {}
    for own_options, counts in task.split_counts(options):
        taken = np.zeros(0, dtype=np.uint64)
        if splits:
            taken = join(list(splits.values())).fingerprints
        splits |= _generate_distinct(task, own_options, counts, taken, progress, jobs)
    return splits


def _generate_distinct(
    task: GridTask[OptionsT],
    options: OptionsT,
    counts: Mapping[str, int],
    taken: WordArray,
    progress: Progress,
    jobs: int,
) -> dict[str, Examples]:
    """Generate this many different examples per split, none of them with a fingerprint in `taken`."""
    total = sum(counts.values())
    description = task.description(options)
    chunk_size = min(task.chunk_size, max(total, _MIN_CHUNK_SIZE))
    test_share = min(max(counts.get("test", 0) / total, _MIN_TEST_SHARE), _MAX_TEST_SHARE)
    collectors = {name: _Collector(number) for name, number in counts.items()}
    generate = partial(_generate_chunk, task, options, chunk_size)
    jobs = min(jobs, math.ceil(total / chunk_size))
    done = 0
    fruitless = 0
    with closing(ordered(generate, count(0, chunk_size), jobs)) as chunks:
        for chunk in chunks:
            before = done
            _distribute(chunk[~np.isin(chunk.fingerprints, taken)], collectors, test_share)
            done = sum(len(collector) for collector in collectors.values())
            progress(f"generating {description}", done, total)
            if done == total:
                return {name: join(collector.parts) for name, collector in collectors.items()}
            fruitless = fruitless + 1 if done == before else 0
            if fruitless == _MAX_FRUITLESS_CHUNKS:
                break
    found = " and ".join(f"{len(collector)} for {name}" for name, collector in collectors.items())
    raise DataError(
        f"Only {found} of the {description} were found; "
        f"{' and '.join(map(str, counts.values()))} were requested",
        hint="Request fewer or easier examples, or a larger size.",
    )


def _generate_chunk(task: GridTask[OptionsT], options: OptionsT, number: int, first: int) -> Examples:
    questions, answers = task.generate(options, number, first)
    return examples_of(task, questions, answers)


def _distribute(examples: Examples, collectors: Mapping[str, _Collector], test_share: float) -> None:
    """Give each split its examples: the lowest fingerprints are for testing.

    With one split only, all examples are its own.
    """
    if len(collectors) == 1:
        for collector in collectors.values():
            collector.take(examples)
        return
    is_test = examples.fingerprints < np.uint64(test_share * 2**64)
    for name, collector in collectors.items():
        collector.take(examples[is_test == (name == "test")])


class _Collector:
    """Collects examples with different questions, up to a number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: list[Examples] = []
        self.seen: set[bytes] = set()

    def __len__(self) -> int:
        return len(self.seen)

    def take(self, examples: Examples) -> None:
        new: list[int] = []
        for row, question in enumerate(examples.questions):
            content = question.tobytes()
            if len(self) < self.number and content not in self.seen:
                self.seen.add(content)
                new.append(row)
        self.parts.append(examples[np.array(new, dtype=np.int64)])
