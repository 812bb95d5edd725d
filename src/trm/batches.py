"""Slots: the N places of an effective batch, and which example each one holds.

Nothing here keeps a random generator. Every draw is a hash of (seed, purpose, slot, k, ...), so slot i's
k-th example and its augmentation are the same whatever the micro-batch size, however many ranks share the
slots, and however often the run was interrupted. A slot is three integers; the rest follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import CheckpointError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
WordArray = NDArray[np.uint64]


class Purpose(IntEnum):
    """Keeps draws for different ends independent of each other."""

    ORDER = 1
    CHOICE = 2
    AUGMENT = 3
    EXPLORE = 4
    DEPTH = 5
    NOISE = 6
    HINTS = 7


def _mix(words: WordArray) -> WordArray:
    """The finaliser of splitmix64: a bijection of 64-bit words that passes BigCrush as a counter hash."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(*counters: IntArray | int) -> WordArray:
    """One 64-bit word for every combination of counters, which broadcast against each other."""
    with np.errstate(over="ignore"):
        words = np.zeros((), dtype=np.uint64)
        for counter in counters:
            words = _followed_by(words, np.asarray(counter, dtype=np.int64).astype(np.uint64))
        return words


def _followed_by(words: WordArray, counters: WordArray) -> WordArray:
    """What `random_words` makes of the counters so far, and one more."""
    return _mix(np.asarray(words + counters + np.uint64(0x9E3779B97F4A7C15)))


def uniforms(*counters: IntArray | int) -> FloatArray:
    """Numbers in [0, 1) with 53 random bits."""
    return np.asarray((random_words(*counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permuted(positions: IntArray, size: int, keys: WordArray) -> IntArray:
    """Where each position of 0..size-1 goes under the pseudo-random permutation that its key names.

    A four-round Feistel network on the smallest even number of bits that covers `size`, applied again
    until it lands inside: any position of any epoch without ever holding a permutation in memory.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    words = positions.astype(np.uint64)
    rounds = [random_words(keys.astype(np.int64), turn) for turn in range(4)]
    outside = np.arange(len(words))
    while len(outside):
        left, right = words[outside] >> half_bits, words[outside] & mask
        for keyed in rounds:
            left, right = right, left ^ (_followed_by(keyed[outside], right) & mask)
        words[outside] = moved = (left << half_bits) | right
        outside = outside[moved >= np.uint64(size)]
    return words.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Order:
    """Which example a slot takes. Groups are passed through once an epoch; a group's puzzle, and that
    puzzle's example, are then drawn (public datasets keep the augmented copies of a puzzle as a group)."""

    seed: int
    num_slots: int
    group_indices: NDArray[Any]  # group g is puzzles group_indices[g] : group_indices[g + 1]
    puzzle_indices: NDArray[Any]  # puzzle p is examples puzzle_indices[p] : puzzle_indices[p + 1]
    easiest: IntArray | None = None  # groups by difficulty, for a curriculum
    open_groups: Callable[[int], int] | None = None  # how many of them in this stage of it

    def examples(self, k: IntArray, stage: IntArray | int = 0) -> tuple[IntArray, IntArray]:
        """(example, puzzle) that each slot takes as its k-th, if it took it in this stage of a curriculum."""
        groups = np.empty(self.num_slots, dtype=np.int64)
        stages = np.broadcast_to(np.asarray(stage, dtype=np.int64), groups.shape)
        for each in np.unique(stages):
            here = stages == each
            groups[here] = self._groups(k[here], np.flatnonzero(here), int(each))
        draws = self.draws(Purpose.CHOICE, k, 2)
        puzzles = _draw_between(self.group_indices, groups, draws[:, 0])
        return _draw_between(self.puzzle_indices, puzzles, draws[:, 1]), puzzles

    def _groups(self, k: IntArray, slots: IntArray, stage: int) -> IntArray:
        num_groups = len(self.group_indices) - 1
        if self.easiest is not None and self.open_groups is not None:
            num_groups = self.open_groups(stage)
        epoch, position = np.divmod(k * self.num_slots + slots, num_groups)
        counters = (epoch, stage) if stage else (epoch,)
        groups = permuted(position, num_groups, random_words(self.seed, Purpose.ORDER, *counters))
        return groups if self.easiest is None else self.easiest[groups]

    def draws(self, purpose: Purpose, k: IntArray, count: int) -> FloatArray:
        """So many for each slot's k-th example."""
        slots = np.arange(self.num_slots)
        return uniforms(self.seed, purpose, slots[:, None], k[:, None], np.arange(count))

    def noise_seeds(self, k: IntArray) -> IntArray:
        words = random_words(self.seed, Purpose.NOISE, np.arange(self.num_slots), k)
        return (words >> np.uint64(1)).astype(np.int64)


def _draw_between(bounds: NDArray[Any], which: IntArray, draws: FloatArray) -> IntArray:
    start, stop = (bounds[each].astype(np.int64) for each in (which, which + 1))
    return np.asarray(start + (draws * (stop - start)).astype(np.int64))


@dataclass(slots=True)
class Slots:
    """How far each slot is. Saved in every checkpoint, and all that has to be."""

    k: IntArray  # which example, counted from 0; -1 before the first
    stage: IntArray  # of the curriculum in which it was taken
    supervised: IntArray  # supervision steps that this example has had
    halted: BoolArray  # takes its next example at the next step

    @classmethod
    def new(cls, num_slots: int) -> Slots:
        return cls(
            k=np.full(num_slots, -1, dtype=np.int64),
            stage=np.zeros(num_slots, dtype=np.int64),
            supervised=np.zeros(num_slots, dtype=np.int64),
            halted=np.ones(num_slots, dtype=bool),
        )

    @classmethod
    def from_lists(cls, lists: Mapping[str, list[int]], num_slots: int) -> Slots:
        lists = {"stage": [0] * num_slots, **lists}  # which older versions did not know
        wrong = [
            name for name in ("k", "stage", "supervised", "halted") if len(lists.get(name, ())) != num_slots
        ]
        if wrong:
            raise CheckpointError(f"The slots' {', '.join(wrong)} are not {num_slots} numbers")
        return cls(
            k=np.array(lists["k"], dtype=np.int64),
            stage=np.array(lists["stage"], dtype=np.int64),
            supervised=np.array(lists["supervised"], dtype=np.int64),
            halted=np.array(lists["halted"], dtype=bool),
        )

    def to_lists(self) -> dict[str, list[int]]:
        return {
            "k": self.k.tolist(),
            "stage": self.stage.tolist(),
            "supervised": self.supervised.tolist(),
            "halted": self.halted.astype(int).tolist(),
        }

    def refilled(self, stage: int = 0) -> Slots:
        """Halted slots move on to their next example, of the curriculum's present stage."""
        return Slots(
            k=self.k + self.halted,
            stage=np.where(self.halted, stage, self.stage),
            supervised=np.where(self.halted, 0, self.supervised),
            halted=np.zeros_like(self.halted),
        )

    def all_halted(self) -> Slots:
        return Slots(self.k, self.stage, self.supervised, np.ones_like(self.halted))

    def same_examples(self, other: Slots) -> bool:
        return np.array_equal(self.k, other.k) and np.array_equal(self.stage, other.stage)

    @property
    def fresh(self) -> BoolArray:
        return np.asarray(self.supervised == 0)

    def supervised_once(
        self, halt_margins: NDArray[np.float32], seed: int, max_steps: int, exploration: float
    ) -> Slots:
        """After a supervision step: halt where the model says so or the steps are used up, except that
        now and then a slot must go on for a drawn number of steps, so that late steps are learned too."""
        supervised = self.supervised + 1
        slots = np.arange(len(self.k))
        draws = uniforms(
            seed, Purpose.EXPLORE, slots[:, None], self.k[:, None], supervised[:, None], np.arange(2)
        )
        least = np.where(draws[:, 0] < exploration, 2 + (draws[:, 1] * (max_steps - 1)).astype(np.int64), 0)
        wants_to_halt = (halt_margins > 0) & (supervised >= least)
        return Slots(self.k, self.stage, supervised, np.asarray((supervised >= max_steps) | wants_to_halt))
